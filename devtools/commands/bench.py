"""`./dev bench`."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from devtools import local_kernels
from devtools.commands.build import build
from devtools.console import console
from devtools.errors import Failure
from devtools.families import Family, select
from devtools.project import relative

HELP = "measure the kernels against PyTorch and other peers"
DESCRIPTION = """\
Runs the cases of each family's benchmarks/suite.py. The kernel and its peers are timed by turns in one process, after
the kernel's result has been checked; a wrong kernel gets no number. Close other programs first: two cores are few.
"""
NEEDS_ENVIRONMENT = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, to see that everything runs")
    parser.add_argument(
        "--save", action="store_true", help="write JSON, Markdown and a plot into <family>/benchmarks/results/"
    )
    parser.add_argument("family", nargs="*", help="families to measure (default: all that have a suite)")


def run(arguments: argparse.Namespace) -> int:
    """Builds and measures the families, and fails if a kernel was wrong."""
    families = [family for family in select(arguments.family) if arguments.family or _suite_path(family).is_file()]
    for family in families:
        if not _suite_path(family).is_file():
            raise Failure(f"{relative(_suite_path(family))} does not exist, so there is nothing to measure")
    build(families)
    # Read by kernels when it loads a kernel, which is after this.
    os.environ.update(local_kernels.setting(families), HF_HUB_OFFLINE="1")
    correct = [_measure(family, quick=arguments.quick, save=arguments.save) for family in families]
    return 0 if all(correct) else 1


def _measure(family: Family, *, quick: bool, save: bool) -> bool:
    import kernels

    from devtools import benchmark_report
    from devtools.benchmarking import QUICK, THOROUGH, measure

    kernel = kernels.get_kernel(family.repository, version=1, trust_remote_code=True)
    results = []
    with console().status(f"{family.title}: starting") as status:
        for case in _load(family).cases(kernel, quick):
            status.update(f"{family.title}: {case.op} {case.shape} {case.direction}")
            results.append(measure(case, QUICK if quick else THOROUGH))
    console().print(benchmark_report.table(family.name, results))
    if save:
        for path in benchmark_report.save(_suite_path(family).parent / "results", results):
            print(f"wrote {relative(path)}")
    return all(result.correct for result in results)


def _suite_path(family: Family) -> Path:
    return family.directory / "benchmarks" / "suite.py"


def _load(family: Family) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{family.python_name}_suite", _suite_path(family))
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = suite
    spec.loader.exec_module(suite)
    return suite
