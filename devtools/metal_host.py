"""Checks the host code of Metal kernels with clang where there is no Mac: nothing is built or run.

Ops and launchers are C++ over PyTorch's full ABI. `common/metal/pipeline.mm` is Objective-C++ over Apple's frameworks,
whose declarations `devtools/stubs/apple` repeats as far as it and PyTorch's headers use them.
"""

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devtools.compilation import torch_directory
from devtools.families import Family
from devtools.project import ROOT
from devtools.variant import INCLUDE
from simt.metal import lint

PIPELINE = ROOT / "common" / "metal" / "pipeline.mm"
STUBS = ROOT / "devtools" / "stubs" / "apple"

# What kernel-builder defines; an unknown selector is only a warning.
FLAGS = "-fsyntax-only -fno-color-diagnostics -std=c++17 -Wall -Wextra -Werror -DMETAL_KERNEL"
OBJECTIVE_CXX = "-x objective-c++ -fblocks -fobjc-runtime=macosx"
OBJECTIVE_CXX += ' -DEMBEDDED_METALLIB_HEADER="metallib.h" -DEMBEDDED_METALLIB_NAMESPACE=family_metal'


def check(source: Path, text: str | None = None, include: Sequence[Path] = (ROOT,)) -> list[str]:
    """Returns the messages of `simt.metal.lint.compiler()`, which must be there, about a source; none if it is right.

    Args:
        source: A .mm or .cpp file.
        text: What to read instead of the file.
        include: Directories of the project's headers.
    """
    torch = torch_directory() / "include"
    system = [torch, torch / "torch/csrc/api/include", Path(sysconfig.get_path("include")), STUBS]
    objective = source.suffix == ".mm"
    folders = [f"-I{folder}" for folder in include] + ["-iquote", str(source.parent)]
    folders += [f"-isystem{folder}" for folder in system]
    language = OBJECTIVE_CXX.split() if objective else ["-x", "c++", "-DTORCH_EXTENSION_NAME=family"]
    command = [lint.compiler() or "clang-19", *FLAGS.split(), *language, *folders, "-"]
    text = f'#line 1 "{source}"\n' + (source.read_text() if text is None else text)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    messages = [line for line in done.stderr.splitlines() if re.search(r": (fatal )?(error|warning): ", line)]
    if done.returncode and not messages:
        raise RuntimeError(f"{command[0]} could not check {source}: {done.stderr}")
    return messages


def findings(families: Iterable[Family]) -> Iterator[str]:
    """Yields the messages about pipeline.mm and about the C++ sources of every family that has Metal kernels."""
    jobs: list[tuple[Path, tuple[Path, ...]]] = [(PIPELINE, (ROOT,))]
    for family in families:
        components = family.components_of("metal")
        if not any(component.backend == "metal" for component in components):
            continue
        for component in components:
            include = tuple(family.directory / folder for folder in component.include)
            units = [unit for unit in component.units if unit.endswith(".cpp")]
            jobs += [(family.directory / unit, (*include, INCLUDE)) for unit in units]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for messages in pool.map(lambda job: check(job[0], include=job[1]), jobs):
            yield from messages
