"""Commands that compile the engine and kernels for the bench."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Frame pointers and real calls let an error name the lines that led to it. addr2line of Debian 12 mistakes the files of
# DWARF 5 tables whose lines come from #line directives.
COMMON = ["g++", "-std=c++17", "-fPIC", "-g1", "-gdwarf-4", "-Wall"]
COMMON += ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
# Kernels reinterpret vectors as elements; pragmas are nvcc's; guards of statics would need hooks for atomics.
KERNEL = [*COMMON, "-DRUDNN_SIMT", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-threadsafe-statics"]
KERNEL += ["-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{ROOT}"]
FAST = ["-O2"] + (["-march=x86-64-v3"] if platform.machine() == "x86_64" else [])
CHECKED = ["-O1", "-fsanitize=thread,alignment,bounds,shift,integer-divide-by-zero"]
CHECKED += ["--param=tsan-instrument-func-entry-exit=0"]

NO_CUDA = "nvcc and its headers were not found: set CUDA_HOME, or install a CUDA toolkit or its wheels"


def cuda_home() -> Path | None:
    """Returns the directory that holds include/ and bin/ of a CUDA toolkit or of its pip wheels, or None."""
    candidates: list[str | Path | None] = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    wheels = importlib.util.find_spec("nvidia")
    if wheels:
        candidates += [Path(folder) / "cu13" for folder in wheels.submodule_search_locations or []]
    for candidate in candidates:
        if candidate and (Path(candidate) / "include/cuda_fp16.h").exists():
            return Path(candidate)
    return None


def nvcc() -> str | None:
    """Returns the nvcc to use, or None."""
    home = cuda_home()
    return shutil.which("nvcc", path=str(home / "bin") if home else None) or shutil.which("nvcc")


def engine_command(library: Path) -> list[str]:
    """Returns what builds the engine as a shared library."""
    sources = sorted(str(source) for source in (ROOT / "simt/engine").glob("*.cpp"))
    return [*COMMON, "-O2", "-Wextra", "-fvisibility=hidden", "-shared", *sources, "-o", str(library), "-ldl"]


def compile_command(source: Path, output: Path, *, checked: bool, shader: bool = False) -> list[str]:
    """Returns what compiles one .cu, launcher or, after the pre-pass, shader for the bench."""
    home = cuda_home()
    dialect = [f"-isystem{home / 'include'}"] if home else []
    if shader:
        dialect = [f"-I{ROOT / 'simt/metal/include'}", "-D__METAL_VERSION__=400"]
    mode = CHECKED if checked else FAST
    return [*KERNEL, *mode, *dialect, "-x", "c++", "-c", str(source), "-o", str(output)]


METAL_PIPELINE = ROOT / "simt/metal/pipeline.cpp"  # goes with every library that holds shaders


def link_command(objects: Iterable[Path], library: Path, engine: Path) -> list[str]:
    """Returns what links kernels to the engine, which also provides the functions that the sanitizers call."""
    rpath = f"-Wl,-rpath,{engine.resolve().parent}"
    return ["g++", "-shared", *map(str, objects), str(engine), rpath, "-o", str(library)]
