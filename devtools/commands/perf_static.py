"""`./dev perf-static`."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from devtools import cuda_toolkit, local_kernels
from devtools.commands.build import build
from devtools.console import console, heading, notice
from devtools.errors import Failure
from devtools.families import Family, select
from devtools.project import ROOT, relative

if TYPE_CHECKING:
    from devtools.transactions import Row

HELP = "tell registers, spills and memory transactions of the CUDA kernels, without a GPU"
DESCRIPTION = """\
Compiles each family's CUDA kernels for sm_80 and sm_90 and reads their registers, spills and shared memory from the
compiler; then traces the cases of benchmarks/static_cases.py on the SIMT bench and counts the sectors and bank
conflicts of a warp. The figures are kept in <family>/benchmarks/static/. A kernel may spill if its entry in the JSON
file has a "reason". Where static_cases.py has INSTRUCTIONS, the kernels whose names hold one of its keys are looked
through for those in their PTX.
"""
NEEDS_ENVIRONMENT = True

_CASES = Path("benchmarks/static_cases.py")
_TABLE = Path("benchmarks/static/cuda.json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--save", action="store_true", help="write the figures into <family>/benchmarks/static/")
    parser.add_argument(
        "--check", action="store_true", help="fail where a kernel spills or a figure is worse than kept"
    )
    parser.add_argument("family", nargs="*", help="families to look at (default: all that have static cases)")


def needs_cuda(arguments: argparse.Namespace) -> bool:
    """Whether nvcc is needed."""
    return True


def run(arguments: argparse.Namespace) -> int:
    """Measures the families, and fails if --check finds something."""
    families = [each for each in select(arguments.family) if arguments.family or (each.directory / _CASES).is_file()]
    for family in families:
        if not (family.directory / _CASES).is_file():
            raise Failure(f"{relative(family.directory / _CASES)} does not exist, so there is nothing to trace")
    problems = [problem for family in families for problem in _look_at(family, arguments.save)]
    print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    return 1 if arguments.check and problems else 0


def _look_at(family: Family, save: bool) -> Iterator[str]:
    """Measures a family, shows what is not ideal, and yields the problems."""
    from devtools import static_performance

    path = family.directory / _TABLE
    table = static_performance.load(path)
    traces = _traces(family)
    told = _compiler_output(family)
    kernels = static_performance.kernels_of(told.values())
    measured = static_performance.Table(
        "nvcc {}.{}".format(*cuda_toolkit.cuda_version()),
        kernels,
        {name: why for name, why in table.reasons.items() if name in kernels},
        _instructions(family, told),
        {case: static_performance.traffic_of(rows) for case, rows in traces.items()},
    )
    heading(family.title)
    _show(kernels, traces)
    if save:
        static_performance.save(path, measured)
        path.with_suffix(".md").write_text(static_performance.markdown(family.name, measured))
        print(f"wrote {relative(path)} and {path.stem}.md")
        table = measured
    elif table.compiler != measured.compiler:
        notice(
            f"the table of {family.title} was made with {table.compiler or 'no compiler'}, this is {measured.compiler}"
        )
    yield from (f"{family.title}: {problem}" for problem in static_performance.compare(table, measured))


def _compiler_output(family: Family) -> dict[str, str]:
    """Returns what the compiler told of each source."""
    from devtools.variant import CUDA, Variant

    build([family], CUDA)
    variant = Variant(family, CUDA)
    units = [unit for component in variant.components for unit in component.units if unit.endswith(".cu")]
    return {unit: (variant.objects / f"{unit}.o.ptxas").read_text() for unit in units}


def _instructions(family: Family, told: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Returns how often the kernels of a family have the instructions that its static cases name."""
    from devtools import static_performance
    from devtools.compilation import ptx_of
    from devtools.variant import CUDA, Variant

    wanted = runpy.run_path(str(family.directory / _CASES)).get("INSTRUCTIONS", {})
    units = [
        unit
        for unit, text in told.items()
        if any(part in kernel for kernel in static_performance.kernels_of([text]) for part in wanted)
    ]
    return static_performance.instructions_of(ptx_of(Variant(family, CUDA), units), wanted)


def _traces(family: Family) -> "dict[str, list[Row]]":
    """Returns the accesses of each case, from a process that loads the bench build."""
    from devtools.compilation import ENGINE
    from devtools.transactions import Row
    from devtools.variant import BENCH

    profile = next(each for each in BENCH if each.name == "simt-cuda-checked")
    build([family], profile)
    arguments = [family.repository, str(family.directory / _CASES), str(ENGINE)]
    environment = os.environ | local_kernels.setting([family], profile.directory) | {"HF_HUB_OFFLINE": "1"}
    environment["RUDNN_SIMT_ORDER"] = "forward"
    command = [sys.executable, "-m", "devtools.trace_cases", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failure(f"the static cases of {family.title} could not be traced, see above")
    return {case: [Row(**row) for row in rows] for case, rows in json.loads(done.stdout).items()}


def _show(kernels: Collection[str], traces: "dict[str, list[Row]]") -> None:
    """Prints the lines whose accesses are not ideal, over all cases."""
    worst: dict[tuple[str, str], tuple[float, Row, str]] = {}
    for case, rows in traces.items():
        for row in rows:
            excess = row.moved / row.ideal
            if excess > worst.get((row.line, row.kind), (1.0,))[0]:
                worst[row.line, row.kind] = (excess, row, case)
    print(f"{len(kernels)} kernels, {len(traces)} cases")
    for excess, row, case in sorted(worst.values(), key=lambda each: -each[0]):
        console().print(f"{row.kind}, {row.moved} instead of {row.ideal} ({excess:.2f}x): {row.line} in {case}")
