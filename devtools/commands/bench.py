"""`./dev bench`."""

import argparse
import os
from collections.abc import Sequence

from devtools import local_kernels
from devtools.commands.build import build
from devtools.console import console, notice
from devtools.errors import Failure
from devtools.families import Family, select
from devtools.project import relative

HELP = "measure the kernels against PyTorch and other peers"
DESCRIPTION = """\
Runs the cases of each family's benchmarks/suite.py. The kernel and its peers are timed by turns in one process, after
the kernel's result has been checked; a wrong kernel gets no number. Close other programs first: two cores are few.
A CUDA device is timed by its own clock, with its cache flushed before each call.
"""
NEEDS_ENVIRONMENT = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, to see that everything runs")
    parser.add_argument(
        "--save", action="store_true", help="write JSON, Markdown and a plot into <family>/benchmarks/results/"
    )
    parser.add_argument("family", nargs="*", help="families to measure (default: all that have a suite)")


def needs_cuda(arguments: argparse.Namespace) -> bool:
    """Whether nvcc or its headers are needed."""
    return bool(arguments.device == "cuda")


def run(arguments: argparse.Namespace) -> int:
    """Builds and measures the families, and fails if a kernel was wrong."""
    families = select(arguments.family)
    if not arguments.family:
        families = [family for family in families if family.suite.is_file() and arguments.device in family.backends]
    for family in families:
        if not family.suite.is_file():
            raise Failure(f"{relative(family.suite)} does not exist, so there is nothing to measure")
    _check(arguments.device)
    _build(families, arguments.device)
    # Read by kernels when it loads a kernel, which is after this.
    os.environ.update(local_kernels.setting(families), HF_HUB_OFFLINE="1")
    correct = [
        _measure(family, device=arguments.device, quick=arguments.quick, save=arguments.save) for family in families
    ]
    return 0 if all(correct) else 1


def _check(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Failure(f"PyTorch {torch.__version__} finds no CUDA device")


def _build(families: Sequence[Family], device: str) -> None:
    from devtools.variant import CPU, CUDA

    build(families, CUDA if device == "cuda" else CPU)


def _measure(family: Family, *, device: str, quick: bool, save: bool) -> bool:
    from devtools import benchmark_report, measurement

    records = []
    with console().status(f"{family.title}: starting") as status:
        for result in measurement.results(family, quick=quick, device=device):
            status.update(f"{family.title}: {result.case.op} {result.case.shape} {result.case.direction}")
            records.append(benchmark_report.record(result))
    console().print(benchmark_report.table(family.name, records))
    for reason in benchmark_report.reasons(records):
        notice(reason)
    if save:
        facts = benchmark_report.machine(device)
        for path in benchmark_report.save(family.results, facts, records):
            print(f"wrote {relative(path)}")
    return all(record["correct"] for record in records)
