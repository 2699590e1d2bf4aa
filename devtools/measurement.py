"""Runs the cases of a family's `benchmarks/suite.py`.

As a program it measures one family in a process of its own, which may crash or hang with the kernel: it writes a line
of JSON as soon as there is something to tell, `{"facts": ...}`, `{"record": ...}` or `{"remark": ...}`.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from devtools.benchmarking import QUICK, THOROUGH, Result, copy_ceiling, matmul_ceiling, measure
from devtools.families import Family, select

CUT_SHORT = 3
"""The exit status that tells it; a program that fails gives 1 or 2."""

_CEILING_BYTES = 1 << 28


def results(family: Family, *, quick: bool, device: str) -> Iterator[Result]:
    """Measures a family's cases one by one on a device, with the kernel that get_kernel finds."""
    import kernels

    kernel = kernels.get_kernel(family.repository, version=1, trust_remote_code=True)
    for case in _load(family).cases(kernel, quick, device):
        yield measure(case, QUICK if quick else THOROUGH)


def ceilings(device: str) -> dict[str, str]:
    """Returns what a device reaches at its best, as a report words it."""
    import torch

    threads = torch.get_num_threads()
    products = {
        f"{str(dtype).removeprefix('torch.')} products": f"{matmul_ceiling(dtype, threads, device) / 1e12:.3g} TFLOP/s"
        for dtype in (torch.float32, torch.bfloat16)
    }
    return {"copy": f"{copy_ceiling(_CEILING_BYTES, threads, device) / 1e9:.4g} GB/s"} | products


def _load(family: Family) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{family.python_name}_suite", family.suite)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = suite
    spec.loader.exec_module(suite)
    return suite


def main(argv: list[str]) -> int:
    """Measures one family until a time limit, and returns 0, or CUT_SHORT if the time ran out before the last case."""
    from devtools import benchmark_report

    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, required=True, help="after which no further case begins")
    parser.add_argument("--lines", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args(argv)

    end = time.monotonic() + arguments.seconds
    with arguments.lines.open("w", buffering=1) as lines:

        def tell(kind: str, value: object) -> None:
            lines.write(json.dumps({kind: value}) + "\n")

        tell("facts", benchmark_report.machine(arguments.device) | ceilings(arguments.device))
        (family,) = select([arguments.family])
        for result in results(family, quick=arguments.quick, device=arguments.device):
            case = result.case
            tell("record", benchmark_report.record(result))
            print(f"{case.op} {case.shape} {case.direction}", flush=True)
            if time.monotonic() > end:
                tell("remark", f"time ran out: no case after {case.op} {case.shape} {case.direction} was measured")
                return CUT_SHORT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
