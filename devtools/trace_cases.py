"""Prints what the accesses of a family's static cases move, as JSON: a process of its own for `./dev perf-static`.

python -m devtools.trace_cases REPOSITORY CASES ENGINE, with LOCAL_KERNELS naming a checked build for the SIMT bench.
CASES is the file that defines `cases(kernel) -> Iterable[tuple[str, Callable[[], object]]]`.
"""

import dataclasses
import json
import runpy
import sys

import kernels
import torch

from devtools.transactions import Tracer


def main(repository: str, cases: str, engine: str) -> None:
    """Traces the first warp of every launch of each case, and prints the rows by case."""
    kernel = kernels.get_kernel(repository, version=1, trust_remote_code=True)
    tracer = Tracer(engine)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # what a gather moves depends on the indices
    traced = {}
    for name, call in runpy.run_path(cases)["cases"](kernel):
        with tracer.trace() as rows:
            call()
        traced[name] = [dataclasses.asdict(row) for row in rows]
    json.dump(traced, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
