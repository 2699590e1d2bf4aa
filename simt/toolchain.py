"""How to compile the engine and kernels for the bench."""

import platform
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


def engine_link_flags(engine: Path) -> list[str]:
    """Returns what links a library to the engine, which also provides the functions that the sanitizers call."""
    return [str(engine), f"-Wl,-rpath,{engine.resolve().parent}"]
