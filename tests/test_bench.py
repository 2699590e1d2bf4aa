import time

import pytest
import torch

from devtools import benchmark_report
from devtools.benchmark_report import machine, record
from devtools.benchmarking import OURS, Case, Effort, Result, alternate, clock, measure

EFFORT = Effort(rounds=7, sample_seconds=1e-4, case_seconds=0.2)


def case(correct: bool = True, **changes) -> Case:
    x = torch.ones(1 << 12)
    settings = {
        "op": "copy",
        "shape": "4096",
        "dtype": torch.float32,
        "ours": x.clone,
        "peers": {"twice": lambda: (x.clone(), x.clone())},
        "check": lambda: correct,
        "bytes": 2 * x.nbytes,
    }
    return Case(**settings | changes)


def test_times_are_those_of_the_calls():
    times = alternate({"short": lambda: time.sleep(1e-3), "long": lambda: time.sleep(3e-3)}, EFFORT)
    assert min(times["short"]) >= 1e-3
    assert min(times["long"]) >= 3e-3
    assert len(times["short"]) == len(times["long"]) == 7


def test_contenders_take_turns():
    order = []
    alternate({name: lambda name=name: order.append(name) or time.sleep(1e-3) for name in "abc"}, EFFORT)
    assert order[-9:] == list("abccbaabc")


def test_result_is_complete():
    result = measure(case(), EFFORT)
    assert result.correct
    assert set(result.seconds) == {OURS, "twice"}
    assert result.copy_bytes_per_second > 0
    assert result.matmul_flops_per_second == 0, "there was nothing to compare with it"


def test_numbers_of_a_result():
    seconds = {
        OURS: [2.0, 1.0, 4.0, 2.0, 2.0],
        "twice": [4.0, 2.0, 8.0, 4.0, 4.0],
        "drifting": [1.0, 2.0, 2.0, 6.0, 4.0],
    }
    result = Result(case(bytes=6 * 10**9), seconds, copy_bytes_per_second=6e9)
    assert result.correct
    assert result.median == 2.0
    assert result.ratios == {"twice": 2.0, "drifting": 2.0}
    assert result.share == 0.5
    assert result.rate == "3.0 GB/s"
    assert result.spread == (3.0 - 1.5) / 2.0


def test_the_share_is_of_the_ceiling_that_bounds():
    seconds = {OURS: [4.0, 4.0]}
    measured = {"copy_bytes_per_second": 1e9, "matmul_flops_per_second": 1e12}
    product = Result(case(bytes=10**9, flops=2 * 10**12), seconds, **measured)
    assert product.share == 0.5
    assert product.rate == "500.0 GFLOP/s"
    assert Result(case(bytes=4 * 10**9, flops=10**12), seconds, **measured).share == 1.0


def test_products_are_compared_with_the_product_ceiling():
    x = torch.ones(256, 256)
    result = measure(case(ours=lambda: x @ x, bytes=3 * x.nbytes, flops=2 * 256**3, peers={}), EFFORT)
    assert result.matmul_flops_per_second > 0


def test_threads_are_those_of_the_case_and_then_as_before():
    before = torch.get_num_threads()
    used = set()
    measure(case(threads=before + 1, ours=lambda: used.add(torch.get_num_threads())), EFFORT)
    assert used == {before + 1}
    assert torch.get_num_threads() == before


def failing() -> None:
    raise RuntimeError("no compiler\nand more")


def test_wrong_kernel_gets_no_number(tmp_path):
    result = measure(case(correct=False), EFFORT)
    assert not result.correct
    assert "WRONG" in benchmark_report.cells(record(result))
    benchmark_report.save(tmp_path, machine("cpu"), [record(result)])


@pytest.mark.parametrize("part", ["check", "ours"])
def test_a_kernel_that_raises_gets_no_number(part):
    row = benchmark_report.cells(record(measure(case(**{part: failing}), EFFORT)))
    assert "WRONG" in row
    assert row[-1] == "RuntimeError: no compiler"


def test_a_peer_that_cannot_run_is_left_out():
    result = measure(case(peers={"broken": failing, "other": lambda: None}), EFFORT)
    assert set(result.seconds) == {OURS, "other"}
    told = record(result)
    assert "broken: could not run" in benchmark_report.cells(told)[-1]
    assert benchmark_report.reasons([told, told]) == ["broken: RuntimeError: no compiler"]


def test_a_gpu_times_itself_unless_starting_is_what_costs():
    clocks = {clock("cpu", 1), clock("cuda", 1), clock("cuda", 1 << 30)}
    assert len(clocks) == 3
    assert clock("cpu", 1) is clock("cpu", 1 << 30)


def test_threads_are_told_of_the_cpu_only():
    result = Result(case(threads=7), {OURS: [1.0, 2.0]}, copy_bytes_per_second=1e9)
    told = record(result)
    column = benchmark_report.COLUMNS.index("threads")
    assert benchmark_report.cells(told)[column] == "7"
    assert benchmark_report.cells(told | {"device": "cuda"})[column] == ""


def test_files_are_named_after_what_was_measured():
    facts = {"cpu": "Some (R) Processor", "gpu": "NVIDIA H200"}
    assert benchmark_report.stem(facts) == "nvidia-h200"
    assert benchmark_report.stem({"cpu": facts["cpu"]}) == "some-r-processor"


def test_saved_files(tmp_path):
    result = Result(case(), {OURS: [1.0, 2.0], "twice": [2.0, 4.0]}, copy_bytes_per_second=1e9)
    written = benchmark_report.save(tmp_path, machine("cpu"), [record(result)])
    assert sorted(path.suffix for path in written) == [".json", ".md", ".png"]
    assert all(path.stat().st_size for path in written)
    markdown = next(path for path in written if path.suffix == ".md").read_text()
    assert "| copy | 4096 | float32 | forward | 1 |" in markdown
    assert torch.__version__ in markdown
