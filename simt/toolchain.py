"""How to compile the engine and kernels for the bench."""

import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPILER = "g++"
# Frame pointers and real calls let an error name the lines that led to it. addr2line of Debian 12 mistakes the files of
# DWARF 5 tables whose lines come from #line directives.
COMMON = ["-std=c++17", "-fPIC", "-g1", "-gdwarf-4", "-Wall", "-fvisibility=hidden"]
COMMON += ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
ENGINE = [*COMMON, "-O2", "-Wextra"]
# Host code around kernels that no checker looks into, the same for both kinds of build.
HOST = [*COMMON, "-O1", "-DRUDNN_SIMT", f"-I{ROOT}"]
# Kernels reinterpret vectors as elements; pragmas are nvcc's; guards of statics would need hooks for atomics.
KERNEL = [*COMMON, "-DRUDNN_SIMT", "-fno-strict-aliasing", "-fno-threadsafe-statics"]
KERNEL += ["-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{ROOT}"]
SHADER = [f"-I{ROOT / 'simt/metal/include'}", "-D__METAL_VERSION__=400"]
FAST = ["-O2"] + (["-march=x86-64-v3"] if platform.machine() == "x86_64" else [])
CHECKED = ["-O1", "-fsanitize=thread,alignment,bounds,shift,integer-divide-by-zero"]
CHECKED += ["--param=tsan-instrument-func-entry-exit=0"]

ENGINE_SOURCES = sorted((ROOT / "simt/engine").glob("*.cpp"))
ENGINE_LIBRARIES = ["-ldl"]
PREPASS_SOURCES = sorted((ROOT / "simt/metal").glob("*.py"))
METAL_PIPELINE = ROOT / "simt/metal/pipeline.cpp"  # goes with every library that holds shaders

CUDA_MAJOR = 13
NO_CUDA = f"nvcc and its headers were not found: set CUDA_HOME, or install a CUDA {CUDA_MAJOR} toolkit or its wheels"


def cuda_home() -> Path | None:
    """Returns the directory that holds include/ and bin/ of a CUDA toolkit or of its pip wheels, or None."""
    return next((home for home in _candidates() if _version(home)[0] == CUDA_MAJOR), None)


def _candidates() -> list[Path]:
    named = os.environ.get("CUDA_HOME")
    wheels = importlib.util.find_spec("nvidia")
    places = (wheels.submodule_search_locations or []) if wheels else []
    toolkits = [*([Path(named)] if named else []), Path("/usr/local/cuda")]
    return [*toolkits, *(Path(place) / f"cu{CUDA_MAJOR}" for place in places)]


def cuda_version() -> tuple[int, int]:
    """Returns the version of the CUDA headers that `cuda_home` found, such as (13, 0)."""
    home = cuda_home()
    return _version(home) if home else (0, 0)


def _version(home: Path) -> tuple[int, int]:
    """Returns what a toolkit's headers say, and (0, 0) where there are none."""
    header = home / "include/cuda_runtime_api.h"
    if not header.is_file() or not (home / "include/cuda_fp16.h").is_file():
        return 0, 0
    found = re.search(r"define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    version = int(found[1]) if found else 0
    return version // 1000, version % 1000 // 10


def nvcc() -> str | None:
    """Returns the nvcc to use, or None."""
    home = cuda_home()
    return shutil.which("nvcc", path=str(home / "bin") if home else None) or shutil.which("nvcc")


def cuda_flags() -> list[str]:
    """Returns what lets host code find the CUDA headers; without them, nothing."""
    home = cuda_home()
    return ["-isystem", str(home / "include")] if home else []


def engine_link_flags(engine: Path) -> list[str]:
    """Returns what links a library to the engine, which also provides the functions that the sanitizers call."""
    return [str(engine), f"-Wl,-rpath,{engine.resolve().parent}"]
