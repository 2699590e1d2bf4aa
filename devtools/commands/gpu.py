"""`./dev gpu`."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from devtools import accelerator, environment, local_kernels, portable
from devtools.commands.build import build
from devtools.commands.test import Count, read_report
from devtools.console import console, heading, notice
from devtools.errors import Failure
from devtools.families import Family, select
from devtools.project import CACHE, ROOT, relative

HELP = "test and measure on a machine with an NVIDIA GPU, without building anything there"
DESCRIPTION = """\
With --prepare, in the development environment: builds the families for CUDA and gathers in .cache/gpu/ the Python
packages that the other machine may lack. Copy the repository there with that directory and each <family>/build/.

Without, on a machine with an NVIDIA GPU and its own PyTorch (2.11 or later, of the builds' CUDA version) and NumPy:
runs each family's tests, then the quick cases of its benchmark, and ends in one table. No compiler and no network is
needed. The table also goes into <family>/benchmarks/results/, as JSON and Markdown, and what pytest prints into
.cache/reports/.
"""
NEEDS_ENVIRONMENT = False

DEFAULT_MINUTES = 10.0

# Of a family's time, what its tests may take; the rest is for its benchmark.
_TEST_SHARE = 0.6
_TEST_SECONDS = 120
# A process that has not ended this long after it should have is killed.
_GRACE_SECONDS = 20
_TABLE_SECONDS = 10
_LINES_SHOWN = 30
_NOTHING_COLLECTED = 5
_CUT_SHORT = 3  # of devtools.measurement, which imports PyTorch


@dataclass
class Tests:
    """How a family's tests ended."""

    count: Count
    seconds: float
    remark: str = ""
    """What the counts do not say, such as a crash."""


@dataclass
class Measured:
    """What a family's benchmark told before it ended."""

    facts: dict[str, str] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True)
class Outcome:
    """All that is known of a family."""

    family: Family
    tests: Tests
    measured: Measured

    @property
    def good(self) -> bool:
        """Whether tests ran and passed, and every case was measured and right."""
        passed = self.tests.count.passed > 0 and not self.tests.count.failed and not self.tests.remark
        return passed and self.measured.complete and all(record["correct"] for record in self.measured.records)

    @property
    def remarks(self) -> list[str]:
        """What the table has no column for."""
        return [f"tests: {self.tests.remark}"] * bool(self.tests.remark) + self.measured.remarks


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--prepare", action="store_true", help="build, and gather what the other machine may lack")
    parser.add_argument(
        "--python",
        action="append",
        help="with --prepare: a Python that the packages must serve; may be given more than once "
        f"(default: {', '.join(portable.PYTHONS)})",
    )
    parser.add_argument(
        "--all-architectures", action="store_true", help="with --prepare: build for every architecture of a release"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu rehearses the whole run on a machine without a GPU (default: cuda)",
    )
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, help="when all must have ended (default: %(default)g)"
    )
    parser.add_argument("--full", action="store_true", help="measure every case, which takes far longer")
    parser.add_argument("--output", type=Path, help="a directory for all that is written, instead of those above")
    parser.add_argument("family", nargs="*", help="families to run (default: all that have code for the device)")


def run(arguments: argparse.Namespace) -> int:
    """Prepares, or tests and measures, and fails if a test failed, a kernel was wrong or something did not end."""
    if arguments.prepare:
        environment.ensure(sys.argv[1:], cuda=arguments.device == "cuda")
        return _prepare(arguments)

    until = time.monotonic() + 60 * arguments.minutes - _TABLE_SECONDS
    families = _chosen(arguments)
    portable.activate()
    _check(families, arguments.device)
    outcomes = []
    for index, family in enumerate(families):
        available = (until - time.monotonic()) / (len(families) - index)
        outcomes.append(_run_family(family, arguments, available))
    return _report(outcomes, arguments)


def _chosen(arguments: argparse.Namespace) -> list[Family]:
    with_sources = [family for family in select(arguments.family) if arguments.device in family.backends]
    families = select(arguments.family) if arguments.family else with_sources
    if without := [family.title for family in families if family not in with_sources]:
        raise Failure(f"there are no {arguments.device} sources in {', '.join(without)}")
    return families


def _prepare(arguments: argparse.Namespace) -> int:
    from devtools.variant import CPU, CUDA, CUDA_RELEASE

    pythons = arguments.python or portable.PYTHONS
    if wrong := [python for python in pythons if not re.fullmatch(r"3\.\d+", python)]:
        raise Failure(f"--python must be a version such as 3.12, got {wrong[0]}")
    families = _chosen(arguments)
    cuda = CUDA_RELEASE if arguments.all_architectures else CUDA
    build(families, cuda if arguments.device == "cuda" else CPU)
    size = portable.prepare(pythons)
    places = ", ".join(relative(family.directory / "build") for family in families)
    print(f"gathered {size / 2**20:.0f} MiB of packages for Python {', '.join(pythons)}")
    print(f"copy the repository to the other machine, with {relative(portable.DIRECTORY)} and {places}")
    print("and there: ./dev gpu")
    return 0


def _check(families: Sequence[Family], device: str) -> None:
    """Raises a Failure that names everything that is wrong with this machine."""
    if wrong := portable.problem():
        raise Failure(wrong)
    found = [each for family in families for each in accelerator.builds(family)]
    titles = [family.title for family in families]
    if wrong := "; ".join(accelerator.problems(accelerator.machine(), found, titles, device)):
        raise Failure(wrong)


def _run_family(family: Family, arguments: argparse.Namespace, available: float) -> Outcome:
    """Runs a family's tests, and whatever became of them its benchmark, within the seconds available."""
    reports = arguments.output or CACHE / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    stem = f"{family.title}-{arguments.device}"
    heading(f"{family.title}: tests on {arguments.device}, in at most {available * _TEST_SHARE:.0f} s")
    tests = _test(family, available * _TEST_SHARE, reports / f"{stem}-tests")
    print(f"{tests.count}, {tests.seconds:.0f} s", flush=True)

    left = available - (time.monotonic() - began)
    if not family.suite.is_file():
        return Outcome(family, tests, Measured(remarks=["there is no benchmark"], complete=True))
    heading(f"{family.title}: benchmark on {arguments.device}, in at most {left:.0f} s")
    measured = _measure(family, arguments, left, reports / f"{stem}-benchmark")
    return Outcome(family, tests, measured)


def _test(family: Family, seconds: float, stem: Path) -> Tests:
    results, log = stem.with_suffix(".xml"), stem.with_suffix(".log")
    results.unlink(missing_ok=True)
    # 0 would mean no limit.
    limits = [f"--session-timeout={max(seconds - _GRACE_SECONDS, 1):.0f}", f"--timeout={_TEST_SECONDS}"]
    command = portable.command("pytest", "-q", family.directory / "tests", f"--junitxml={results}", *limits)
    began = time.monotonic()
    status = _execute(command, family, seconds, log)
    print("\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]))
    tests = Tests(read_report(results) if results.is_file() else Count(), time.monotonic() - began)
    if "session-timeout:" in log.read_text(errors="replace"):
        tests.remark = "time ran out, the rest was not run"
    elif status == _NOTHING_COLLECTED:
        tests.remark = "there are none"
    elif status != 0 and not tests.count.failed:
        tests.remark = f"pytest {_ending(status)}; this counts as one failed test"
        tests.count.failed = 1
    return tests


def _measure(family: Family, arguments: argparse.Namespace, seconds: float, stem: Path) -> Measured:
    lines, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    lines.unlink(missing_ok=True)
    quick = [] if arguments.full else ["--quick"]
    limits = [f"--device={arguments.device}", f"--seconds={seconds - 2 * _GRACE_SECONDS:.0f}"]
    command = portable.command("devtools.measurement", family.title, *limits, *quick, f"--lines={lines}")
    status = _execute(command, family, seconds, log)
    measured = Measured(complete=status == 0)
    for line in lines.read_text().splitlines() if lines.is_file() else ():
        told = json.loads(line)
        measured.facts |= told.get("facts", {})
        measured.records += [told["record"]] if "record" in told else []
        measured.remarks += [told["remark"]] if "remark" in told else []
    if not arguments.full:
        measured.remarks.append("the quick cases only; --full measures all")
    if status not in (0, _CUT_SHORT):
        measured.remarks.append(f"the benchmark {_ending(status)}, see {log}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]))
    return measured


def _execute(command: list[str], family: Family, seconds: float, log: Path) -> int:
    """Runs a process and all that it starts until it ends or the time is over, and returns its exit status."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **local_kernels.setting([family])}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "took too long, or too much memory, and was killed"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"gave exit status {status}"


def _report(outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> int:
    """Writes each family's files, prints the table of all and returns the exit status."""
    from devtools import benchmark_report

    facts: dict[str, str] = {}
    for outcome in outcomes:
        facts |= outcome.measured.facts
        for path in _save(outcome, arguments):
            print(f"wrote {relative(path)}")
    table = benchmark_report.empty_table(", ".join(f"{key} {value}" for key, value in facts.items()))
    for outcome in outcomes:
        table.add_row(*_tests_row(outcome), style="" if not outcome.tests.count.failed else "red")
        for record in outcome.measured.records:
            table.add_row(*benchmark_report.cells(record), style="" if record["correct"] else "red")
        table.add_section()
    for outcome in outcomes:
        for remark in outcome.remarks + benchmark_report.reasons(outcome.measured.records):
            notice(f"{outcome.family.title}: {remark}")
    console().print(table)
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


def _tests_row(outcome: Outcome) -> list[str]:
    """Returns the family's line of the table, which its tests have."""
    count = outcome.tests.count
    told = [f"{outcome.family.title} tests", f"{count.passed} passed", f"{count.failed} failed"]
    return [*told, f"{count.skipped} skipped", "", f"{outcome.tests.seconds:.0f} s", "", "", "", outcome.tests.remark]


def _save(outcome: Outcome, arguments: argparse.Namespace) -> list[Path]:
    """Writes a family's JSON and Markdown files, named after the machine."""
    from devtools import benchmark_report

    measured = outcome.measured
    facts = measured.facts or benchmark_report.machine("cpu")
    directory = arguments.output / outcome.family.title if arguments.output else outcome.family.results
    directory.mkdir(parents=True, exist_ok=True)
    data, text = (directory / f"run-{benchmark_report.stem(facts)}{suffix}" for suffix in (".json", ".md"))
    told = {"machine": facts, "tests": asdict(outcome.tests), "results": measured.records, "remarks": outcome.remarks}
    data.write_text(json.dumps(told, indent=1) + "\n")
    rows = [_tests_row(outcome), *map(benchmark_report.cells, measured.records)]
    document = benchmark_report.markdown("./dev gpu", facts, rows)
    text.write_text(document + "".join(f"\n{remark}.\n" for remark in outcome.remarks))
    return [data, text]
