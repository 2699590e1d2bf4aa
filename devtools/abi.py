"""Checks that an extension runs wherever the Hub promises: with an old glibc, other Pythons and later PyTorches."""

import re
import subprocess
from pathlib import Path

import kernel_abi_check

MANYLINUX = "manylinux_2_28"
PYTHON = "3.9"

_LIBRARIES = re.compile(
    r"lib(torch|torch_cpu|c10)\.so"
    r"|lib(c|m|pthread|dl|rt)\.so\.\d+"
    r"|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.\d+"
)
# The driver and whatever else a CUDA kernel could need is reached through the run time, which PyTorch loads.
_CUDA_LIBRARIES = re.compile(r"libcudart\.so\.13")
# Torch's stable ABI is plain C; Python's is checked on its own. Weak symbols may stay undefined.
_STABLE_SYMBOL = re.compile(r"(aoti_torch_|torch_|Py|_Py)\w+")


def violations(library: Path, *, cuda: bool = False) -> list[str]:
    """Returns what breaks a promise, one line each; empty if the library keeps them all.

    Args:
        library: The extension.
        cuda: Whether it is built for CUDA and may need the CUDA run time.
    """
    object_file = kernel_abi_check.ObjectFile(library)
    found = [
        f"{symbol.name} of {symbol.dep} is newer than {MANYLINUX}: {symbol.version}"
        for symbol in object_file.check_manylinux(MANYLINUX)
    ]
    found += [
        f"{symbol!r} is not in Python's stable ABI of {PYTHON}" for symbol in object_file.check_python_abi(PYTHON)
    ]
    found += [
        f"{symbol} is undefined and not in PyTorch's stable ABI"
        for symbol in _undefined_symbols(library)
        if not _STABLE_SYMBOL.fullmatch(symbol)
    ]
    needed = _needed_libraries(library)
    allowed = "torch, the CUDA run time and the C and C++ libraries" if cuda else "torch and the C and C++ libraries"
    found += [
        f"{name} is needed, but a kernel may need only {allowed}"
        for name in needed
        if not _LIBRARIES.fullmatch(name) and not (cuda and _CUDA_LIBRARIES.fullmatch(name))
    ]
    if "libtorch.so" not in needed:
        found.append("libtorch.so is not needed, but it is what loads PyTorch's part for the device")
    return found


def _undefined_symbols(library: Path) -> list[str]:
    """Returns the strong undefined symbols without a version; torch and Python give theirs none, glibc and GCC do."""
    rows = _output("nm", "--dynamic", "--undefined-only", library)
    return [row.split()[-1] for row in rows if row.split()[0] == "U" and "@" not in row]


def _needed_libraries(library: Path) -> list[str]:
    rows = _output("readelf", "--dynamic", "--wide", library)
    return [match[1] for row in rows if (match := re.search(r"\(NEEDED\).*\[(.+)\]", row))]


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
