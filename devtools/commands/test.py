"""`./dev test`."""

import argparse
import os
import platform
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devtools import local_kernels
from devtools.commands.build import build
from devtools.console import heading, notice
from devtools.families import Family, select
from devtools.project import CACHE, ROOT

HELP = "build the kernels and run every test"
DESCRIPTION = """\
Builds the families, then runs the tests of the tools and each family's pytest suite, every run in its own process:
  - once as the CPU is;
  - once for each lower instruction set (RUDNN_CPU_ISA=avx2, generic), without the tests marked isa_independent;
  - once built with the address and undefined-behaviour sanitizers, the tests marked small.
What follows a -- goes to each pytest, for example: ./dev test normalization -- -k softmax -x
The last line counts all runs together.
"""
NEEDS_ENVIRONMENT = True

LOWER_ISAS = ("avx2", "generic")

_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Run:
    """One pytest process."""

    title: str
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Further options of pytest."""


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


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where to run (default: %(default)s)")
    parser.add_argument("family", nargs="*", help="families to test (default: all of them, and the development tools)")


def run(arguments: argparse.Namespace) -> int:
    """Builds, runs all tests, and fails if any fails or none ran."""
    families = select(arguments.family)
    sanitizer = _sanitizer_environment()
    build(families)
    if sanitizer:
        build(families, sanitize=True)

    runs = [] if arguments.family else [Run("tools", ROOT / "tests")]
    for family in families:
        runs += _runs_of(family, families, sanitizer)
    if platform.machine() == "x86_64" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        notice("this CPU has no AVX-512, so those paths are not tested here")
    if not sanitizer:
        notice("libasan was not found next to g++, so the sanitized build is not tested here")

    total = Count()
    for each in runs:
        heading(each.title)
        total.add(_execute(each, arguments.rest))
    heading("all runs")
    print(total, flush=True)
    return 1 if total.failed or not total.passed else 0


def _runs_of(family: Family, families: Sequence[Family], sanitizer: dict[str, str]) -> Iterator[Run]:
    directory = family.directory / "tests"
    kernels = local_kernels.setting(families)
    yield Run(family.title, directory, kernels)
    if platform.machine() == "x86_64":
        for isa in LOWER_ISAS:
            limited = kernels | {"RUDNN_CPU_ISA": isa}
            yield Run(f"{family.title}, at most {isa}", directory, limited, ("-m", "not isa_independent"))
    if sanitizer:
        sanitized = local_kernels.setting(families, "build-asan") | sanitizer
        # pytest must not capture the process's own stderr, or the sanitizer's report would die with the process.
        yield Run(f"{family.title}, sanitized", directory, sanitized, ("-m", "small", "--capture=sys"))


def _execute(run: Run, rest: Sequence[str]) -> Count:
    report = CACHE / "reports" / f"{run.title.replace(', ', '-').replace(' ', '-')}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", str(run.directory), f"--junitxml={report}", *run.options]
    # Threads that spin while they wait take the CPU from those that work, when there are more than it has cores.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**threads, "HF_HUB_OFFLINE": "1", **os.environ, **run.environment}
    sys.stdout.flush()
    status = subprocess.run([*command, *rest], cwd=ROOT, env=environment).returncode

    count = _read(report) if report.is_file() else Count()
    if status == _NOTHING_COLLECTED:
        notice(f"{run.title}: no test was selected")
    elif status != 0 and not count.failed:
        # pytest died before it could report: a crash of a kernel, a sanitizer's finding, or a broken conftest.py.
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"gave exit status {status}"
        notice(f"{run.title}: pytest {reason}; this counts as one failed test")
        count.failed = 1
    return count


def _read(report: Path) -> Count:
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
