"""Where nvcc and the CUDA headers are: a toolkit of the machine, or the wheels of one."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

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


def include_flags() -> list[str]:
    """Returns what lets host code find the CUDA headers; without them, nothing."""
    home = cuda_home()
    return ["-isystem", str(home / "include")] if home else []
