"""./dev perf-static: what it reads from the compiler, what it calls a regression, and the check of the kept tables."""

import copy
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from devtools import cuda_toolkit, static_performance
from devtools.families import discover
from devtools.project import ROOT
from devtools.static_performance import Resources, Table, Traffic
from devtools.transactions import Row

PTXAS = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN5rudnn4normIfLi4EEEvPKf' for 'sm_80'
ptxas info    : Function properties for _ZN5rudnn4normIfLi4EEEvPKf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 66 registers, used 1 barriers, 64 bytes smem, 392 bytes cmem[0]
ptxas info    : Compile time = 30.204 ms
ptxas info    : Compiling entry function '_ZN5rudnn4normIfLi4EEEvPKf' for 'sm_90'
ptxas info    : Function properties for _ZN5rudnn4normIfLi4EEEvPKf
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers, 16 bytes cumulative stack size
"""
NORM = "norm<float, 4>"


def table() -> Table:
    return Table(
        compiler="nvcc 13.0",
        kernels={NORM: {"sm_80": Resources(66, 0, 64, 0), "sm_90": Resources(72, 0, 64, 0)}},
        accesses={"norm, warp row": {"global load": Traffic(4, 64, 64), "shared store": Traffic(2, 2, 2)}},
    )


def changed(architecture="sm_80", **numbers) -> Table:
    result = copy.deepcopy(table())
    result.kernels[NORM][architecture] = replace(result.kernels[NORM][architecture], **numbers)
    return result


def test_compiler_output_is_read_for_each_architecture():
    assert static_performance.kernels_of([PTXAS]) == {
        NORM: {"sm_80": Resources(66, 0, 64, 0), "sm_90": Resources(128, 32, 0, 16)}
    }


def test_same_figures_are_no_regression():
    assert list(static_performance.compare(table(), table())) == []


@pytest.mark.parametrize(
    "measured, problem",
    [
        (changed(registers=67), f"{NORM} on sm_80: registers rose from 66 to 67"),
        (changed("sm_90", shared_bytes=68), f"{NORM} on sm_90: shared bytes rose from 64 to 68"),
        (changed(stack_bytes=8), f"{NORM} on sm_80: stack bytes rose from 0 to 8"),
    ],
)
def test_more_of_a_resource_is_a_regression(measured, problem):
    assert list(static_performance.compare(table(), measured)) == [problem]


def test_less_of_everything_is_none():
    measured = changed(registers=32, shared_bytes=0)
    measured.accesses["norm, warp row"] = {"global load": Traffic(8, 64, 64)}
    assert list(static_performance.compare(table(), measured)) == []


def test_spill_needs_a_reason_even_in_the_table():
    spilling = changed(spill_bytes=8)
    assert list(static_performance.compare(spilling, spilling)) == [
        f"{NORM} on sm_80 spills 8 bytes, and the table gives no reason"
    ]
    spilling.reasons[NORM] = "a rare path"
    assert list(static_performance.compare(spilling, spilling)) == []


@pytest.mark.parametrize(
    "kind, traffic, problem",
    [
        ("global load", Traffic(4, 65, 64), "a global load moves 16.25 sectors, 16.00 in the table"),
        ("shared store", Traffic(2, 4, 2), "a shared store moves 2.00 passes, 1.00 in the table"),
        ("shared load", Traffic(2, 2, 2), "shared load is not in the table"),
    ],
)
def test_more_transactions_a_request_are_a_regression(kind, traffic, problem):
    measured = table()
    measured.accesses["norm, warp row"][kind] = traffic
    assert list(static_performance.compare(table(), measured)) == [f"norm, warp row: {problem}"]


def test_more_requests_of_the_same_kind_are_none():
    measured = table()
    measured.accesses["norm, warp row"]["global load"] = Traffic(8, 128, 128)
    assert list(static_performance.compare(table(), measured)) == []


def test_what_only_one_side_has_is_named():
    problems = list(static_performance.compare(table(), Table(kernels={"other": {}})))
    assert problems == [
        "kernel other is not in the table",
        f"kernel {NORM} is in the table but exists no longer",
        "case norm, warp row is in the table but exists no longer",
    ]


PTX = """\
.visible .entry _ZN5rudnn4normIfLi4EEEvPKf(
	.param .u64 parameter
)
.maxntid 128, 1, 1
{
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2}, {%r1}, {%r2}, {%f2};
}
.visible .entry _ZN5rudnn5otherEv()
{
	ret;
}
"""


def test_instructions_are_counted_in_the_kernels_meant_to_have_them():
    counted = static_performance.instructions_of([PTX], {"norm<": ("mma.sync", "cp.async")})
    assert counted == {NORM: {"mma.sync": 2, "cp.async": 0}}


def test_missing_instruction_is_a_problem_even_in_the_table():
    kept = table()
    kept.instructions[NORM] = {"mma.sync": 2, "cp.async": 0}
    assert list(static_performance.compare(kept, kept)) == [f"{NORM} has no cp.async"]


def test_traffic_sums_the_rows_of_a_kind():
    rows = [Row("a:1", "global load", 1, 4, 4), Row("a:2", "shared load", 1, 2, 1), Row("b:3", "global load", 2, 9, 8)]
    assert static_performance.traffic_of(rows) == {"global load": Traffic(3, 13, 12), "shared load": Traffic(1, 2, 1)}


def test_table_survives_its_file(tmp_path):
    kept = table()
    kept.reasons[NORM] = "a rare path"
    kept.instructions[NORM] = {"mma.sync": 2}
    static_performance.save(tmp_path / "static" / "cuda.json", kept)
    assert static_performance.load(tmp_path / "static" / "cuda.json") == kept
    assert static_performance.load(tmp_path / "absent.json") == Table()
    text = static_performance.markdown("norms", kept)
    assert "with nvcc 13.0" in text
    assert f"| `{NORM}` | 66 | 0 | 64 | 72 | 0 | 64 | a rare path |" in text
    assert f"| `{NORM}` | 2 |" in text
    assert "| norm, warp row | 16.00 (16.00) |  |  | 1.00 (1.00) |" in text


TABLES = {family.title: family.directory / "benchmarks" / "static" / "cuda.json" for family in discover()}
TABLES = {title: path for title, path in TABLES.items() if path.is_file()}


@pytest.mark.parametrize("family", TABLES)
def test_no_kernel_spills_without_a_reason(family):
    table = static_performance.load(TABLES[family])
    assert table.kernels
    spilling = {name for name, each in table.kernels.items() if any(on.spill_bytes for on in each.values())}
    assert spilling <= set(table.reasons)


# Cases that load float32 parameters or sums of rows, single elements, one row for each lane, or pairs of elements.
LOADS_OF_OTHER_KINDS = re.compile(
    r"scalar|float32|(ragged|wide block row|longer than held), back|elements|route|serial|experts .*back"
    r"|attention .*(back|bias)"
)


@pytest.mark.parametrize("family", TABLES)
def test_bfloat16_vectors_load_no_more_sectors_than_they_need(family):
    accesses = static_performance.load(TABLES[family]).accesses
    loads = {
        case: kinds["global load"]
        for case, kinds in accesses.items()
        if "bfloat16" in case and not LOADS_OF_OTHER_KINDS.search(case)
    }
    assert loads
    assert not {case: load for case, load in loads.items() if load.moved > load.ideal}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", TABLES)
def test_kernels_are_not_worse_than_the_table(family):
    """Compiles the kernels, unless that has been done."""
    if cuda_toolkit.nvcc() is None:
        pytest.skip(cuda_toolkit.NO_CUDA)
    command = [sys.executable, str(ROOT / "dev"), "perf-static", "--check", family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
