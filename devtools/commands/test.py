"""`./dev test`."""

import argparse
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from devtools import cuda_toolkit, local_kernels
from devtools.commands.build import build
from devtools.console import console, heading, notice
from devtools.families import Family, select
from devtools.project import CACHE, ROOT

HELP = "build the kernels and run every test"
DESCRIPTION = """\
Builds the families, then runs the tests of the tools, those of loading, those of the SIMT bench (simt/) and each
family's pytest suite, every run in its own process and two at a time:
  - once as the CPU is;
  - once for each lower instruction set (RUDNN_CPU_ISA=avx2, generic), without the tests marked isa_independent;
  - once built with the address and undefined-behaviour sanitizers, the tests marked small;
then those that have CUDA or Metal sources again on the SIMT bench, each device
  - once in a fast build, the tests marked small, every operator in two orders of threads, which must agree in each bit;
  - once in a build that checks every access, the tests marked simt_checked, in three orders.
What a run prints is shown when it ends, and kept in .cache/reports/.
What follows a -- goes to each pytest, for example: ./dev test normalization -- -k softmax -x
The last lines count the runs of each device, and all together.
"""
NEEDS_ENVIRONMENT = True

LOWER_ISAS = ("avx2", "generic")
DEVICES = ("cpu", "simt-cuda", "simt-metal")

# The tests of a bench run, and the orders in which the threads of each kernel run.
_FAST = ("small", "forward,reverse")
_CHECKED = ("simt_checked", "forward,reverse,random")

_AT_ONCE = 2
_PROGRESS_SECONDS = 30
_NOTHING_COLLECTED = 5
_REPORTS = CACHE / "reports"


@dataclass(frozen=True)
class Run:
    """One pytest process."""

    title: str
    directory: Path
    device: str = "cpu"
    environment: dict[str, str] = field(default_factory=dict)
    marks: str = ""
    """Which tests, as an expression of pytest's -m."""
    options: tuple[str, ...] = ()
    """Further options of pytest."""
    preparation: tuple[str, ...] = ()
    """Arguments of a ./dev that must succeed first."""

    def report(self, suffix: str) -> Path:
        """The file for what the run leaves behind, by its kind."""
        return _REPORTS / f"{self.title.replace(', ', '-').replace(' ', '-')}{suffix}"


@dataclass
class Count:
    """How many tests ended how."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """The line that ends the command."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def add(self, other: "Count") -> None:
        """Adds another run's numbers."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    count: Count
    seconds: float
    remark: str = ""
    """What the counts do not say, such as a crash."""


@dataclass
class Tally:
    """The runs of one device."""

    count: Count = field(default_factory=Count)
    began: float = math.inf
    ended: float = 0

    def __str__(self) -> str:
        """What is said of the device at the end; the times of two devices may overlap."""
        return f"{self.count} in {self.ended - self.began:.0f} s"

    def add(self, outcome: Outcome) -> None:
        """Adds a run that has just ended."""
        self.count.add(outcome.count)
        now = time.monotonic()
        self.began = min(self.began, now - outcome.seconds)
        self.ended = now


class Progress:
    """Says which runs are under way: when one begins, and now and then, so that a long log is never silent."""

    def __init__(self) -> None:
        """Starts with no run, and a thread that ends with the process."""
        self._started: dict[str, float] = {}
        threading.Thread(target=self._repeat, daemon=True).start()

    def begin(self, run: Run) -> None:
        """Notes that a run begins."""
        self._started[run.title] = time.monotonic()
        console().print(f"[dim]started[/] {run.title}")

    def end(self, run: Run) -> float:
        """Notes that a run ended, and returns how many seconds it took."""
        return time.monotonic() - self._started.pop(run.title)

    def _repeat(self) -> None:
        while True:
            time.sleep(_PROGRESS_SECONDS)
            now = time.monotonic()
            if running := [f"{title} ({now - start:.0f} s)" for title, start in self._started.copy().items()]:
                console().print(f"[dim]running[/] {', '.join(running)}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--device",
        action="append",
        choices=(*DEVICES, "all"),
        help="where the families' tests run; may be given more than once (default: all). The tests of the tools, of "
        "loading and of the bench go with cpu",
    )
    parser.add_argument("family", nargs="*", help="families to test (default: all of them, and the development tools)")


def needs_cuda(arguments: argparse.Namespace) -> bool:
    """Whether nvcc or its headers are needed."""
    return platform.machine() == "x86_64" and "simt-cuda" in _devices(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Builds, runs all tests, and fails if any fails or none ran."""
    families = select(arguments.family)
    devices = _devices(arguments)
    runs: list[Run] = []
    if "cpu" in devices:
        # Tests of a device's build load that of the CPU for comparison.
        build(families, partly=True)
        runs += _cpu_runs(families, with_tools=not arguments.family)
    runs += [
        each for device in devices if device != "cpu" for family in families for each in _bench_runs(family, device)
    ]

    tallies = {run.device: Tally() for run in runs}
    progress = Progress()
    _REPORTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {pool.submit(_execute, each, arguments.rest, progress): each for each in runs}
        try:
            for future in as_completed(futures):
                _show(futures[future], future.result())
                tallies[futures[future].device].add(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    heading("all runs")
    total = Count()
    for device, tally in tallies.items():
        total.add(tally.count)
        print(f"{device}: {tally}")
    if bench := [tally for device, tally in tallies.items() if device != "cpu"]:
        seconds = max(tally.ended for tally in bench) - min(tally.began for tally in bench)
        print(f"the bench took {seconds:.0f} s, with its builds")
    print(total, flush=True)
    return 1 if total.failed or not total.passed else 0


def _devices(arguments: argparse.Namespace) -> tuple[str, ...]:
    chosen = arguments.device or ["all"]
    return DEVICES if "all" in chosen else tuple(device for device in DEVICES if device in chosen)


def _cpu_runs(families: Sequence[Family], *, with_tools: bool) -> list[Run]:
    """Returns the runs on the CPU, the longest first, so that none of them is left to run alone."""
    sanitizer = _sanitizer_environment()
    runs = [each for family in families for each in _runs_of(family, families, sanitizer)]
    if with_tools:
        loading = ROOT / "tests" / "loading"
        runs += [Run("loading", loading, preparation=_cuda_build(families))]
        runs += [Run("tools", ROOT / "tests", options=(f"--ignore={loading}",))]
        if platform.machine() == "x86_64":
            runs.append(Run("simt", ROOT / "simt" / "tests"))
    if platform.machine() == "x86_64" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        notice("this CPU has no AVX-512, so those paths are not tested here")
    if not sanitizer:
        notice("libasan was not found next to g++, so the sanitized build is not tested here")
    return runs


def _cuda_build(families: Sequence[Family]) -> tuple[str, ...]:
    """Returns the arguments of the ./dev that builds for CUDA, or none where nothing can be built."""
    with_sources = any("cuda" in family.backends for family in families)
    return ("build", "--backend", "cuda") if with_sources and cuda_toolkit.nvcc() is not None else ()


def _bench_runs(family: Family, device: str) -> Iterator[Run]:
    """Yields a family's runs on the SIMT bench, which there are if it has sources for the device."""
    backend = device.removeprefix("simt-")
    if backend not in family.backends:
        return
    if platform.machine() != "x86_64":
        notice(f"the bench runs on x86_64, so the {backend} sources of {family.title} are not tested here")
        return
    for checked, (marks, orders) in ((False, _FAST), (True, _CHECKED)):
        suffix = "-checked" if checked else ""
        kernels = local_kernels.setting([family], f"build-simt/{backend}{suffix}")
        yield Run(
            f"{family.title}, {device}{' checked' if checked else ''}",
            family.directory / "tests",
            device,
            kernels | {"RUDNN_SIMT_ORDER": orders},
            marks,
            preparation=("build", "--backend", device, *(["--checked"] if checked else []), family.title),
        )


def _runs_of(family: Family, families: Sequence[Family], sanitizer: dict[str, str]) -> Iterator[Run]:
    directory = family.directory / "tests"
    kernels = local_kernels.setting(families)
    if sanitizer:
        sanitized = local_kernels.setting(families, "build-asan") | sanitizer
        yield Run(
            f"{family.title}, sanitized",
            directory,
            environment=sanitized,
            marks="small",
            # pytest must not capture the process's own stderr, or the sanitizer's report would die with the process.
            options=("--capture=sys",),
            # Compiled while other tests run.
            preparation=("build", "--sanitize", *(each.title for each in families)),
        )
    yield Run(family.title, directory, environment=kernels)
    if platform.machine() == "x86_64":
        for isa in LOWER_ISAS:
            limited = kernels | {"RUDNN_CPU_ISA": isa}
            yield Run(f"{family.title}, at most {isa}", directory, environment=limited, marks="not isa_independent")


def _execute(run: Run, rest: Sequence[str], progress: Progress) -> Outcome:
    """Runs one pytest process to its end; what it prints goes into a file."""
    progress.begin(run)
    results = run.report(".xml")
    results.unlink(missing_ok=True)
    options = [f"--junitxml={results}", *run.options, *selecting(run.marks, rest)]
    command = [sys.executable, "-m", "pytest", "-q", str(run.directory), *options]
    # Threads that spin while they wait take the CPU from those that work, when there are more than it has cores.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**threads, "HF_HUB_OFFLINE": "1", **os.environ, **run.environment}
    with run.report(".log").open("wb") as log:
        if run.preparation:
            prepared = subprocess.run(
                [sys.executable, str(ROOT / "dev"), *run.preparation], stdout=log, stderr=subprocess.STDOUT
            )
            if prepared.returncode != 0:
                remark = f"./dev {' '.join(run.preparation)} failed; this counts as one failed test"
                return Outcome(Count(failed=1), progress.end(run), remark)
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode

    count, remark = read_report(results) if results.is_file() else Count(), ""
    if status == _NOTHING_COLLECTED:
        remark = "no test was selected"
    elif status != 0 and not count.failed:
        # pytest died before it could report: a crash of a kernel, a sanitizer's finding, or a broken conftest.py.
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"gave exit status {status}"
        remark = f"pytest {reason}; this counts as one failed test"
        count.failed = 1
    return Outcome(count, progress.end(run), remark)


def selecting(marks: str, rest: Sequence[str]) -> list[str]:
    """Returns pytest's further options, with both the run's and the user's -m, of which pytest heeds only the last."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks", default="")
    given, others = parser.parse_known_args(rest)
    both = " and ".join(f"({expression})" for expression in (marks, given.marks) if expression)
    return [*others, *(["-m", both] if both else [])]


def _show(run: Run, outcome: Outcome) -> None:
    heading(f"{run.title}: {outcome.count}, {outcome.seconds:.0f} s")
    print(run.report(".log").read_text(errors="replace"), flush=True)
    if outcome.remark:
        notice(f"{run.title}: {outcome.remark}")


def read_report(report: Path) -> Count:
    """Returns the numbers of a JUnit file that pytest wrote."""
    count = Count()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests, failures, errors, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
        count.add(Count(max(tests - failures - errors - skipped, 0), failures + errors, skipped))
    return count


def _sanitizer_environment() -> dict[str, str]:
    """Returns what a process needs to load a sanitized library; empty if the sanitizer's runtime is not installed.

    libstdc++ is loaded early too, since the runtime looks up the functions it intercepts, `__cxa_throw` among them,
    before Python has loaded anything in C++. An abort makes pytest's faulthandler name the running test.
    """
    libraries = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if "/" not in path:
            return {}
        libraries.append(path)
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    }
