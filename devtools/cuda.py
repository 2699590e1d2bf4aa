"""How CUDA sources are compiled: for which architectures, and with which flags of nvcc."""

import re
from collections.abc import Iterable

from devtools.errors import Failure

ARCHITECTURES = ("8.0", "9.0")
"""What a build is for unless it is told otherwise: the oldest supported one, and the newest that is widely used."""

ALL_ARCHITECTURES = ("8.0", "9.0", "10.0", "12.0+PTX")
"""What a release is for; devices yet to come compile the PTX when they load it."""

NVCC_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique,-Wall",
    # Registers, spills and shared memory of every kernel, kept beside the object.
    "-Xptxas=-v",
)

# Such as 8.0, 9.0a (that device only), 10.0f (its family) or 12.0+PTX.
_ARCHITECTURE = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)(?P<suffix>[af]?)(?P<ptx>\+PTX)?")


def restricted(wanted: Iterable[str], capabilities: Iterable[str]) -> list[str]:
    """Returns the architectures a section of build.toml is compiled for, as kernel-builder chooses them.

    Args:
        wanted: The architectures of the build.
        capabilities: What the section can be compiled for: of each generation the newest that runs on the wanted one.
            Empty if it is for everything.
    """
    capabilities = list(capabilities)
    if not capabilities:
        return list(wanted)
    chosen = (max(_runs_on(each, capabilities), key=_number, default=None) for each in wanted)
    return list(dict.fromkeys(each for each in chosen if each is not None))


def generate_code(architectures: Iterable[str]) -> list[str]:
    """Returns nvcc's flags for these architectures."""
    flags = []
    for architecture in architectures:
        parts = _parts(architecture)
        name = f"{parts['major']}{parts['minor']}{parts['suffix']}"
        flags.append(f"-gencode=arch=compute_{name},code=sm_{name}")
        if parts["ptx"]:
            flags.append(f"-gencode=arch=compute_{name},code=compute_{name}")
    return flags


def serves(architectures: Iterable[str], device: str) -> bool:
    """Returns whether code for some of these architectures runs on a device, or PTX among it can be compiled for it.

    Args:
        architectures: What was built, such as 9.0 or 12.0+PTX.
        device: The capability of the device, such as 9.0.
    """
    architectures = list(architectures)
    portable = [_number(each) for each in architectures if _parts(each)["ptx"] and not _parts(each)["suffix"]]
    return bool(_runs_on(device, architectures)) or any(each <= _number(device) for each in portable)


def _runs_on(device: str, capabilities: Iterable[str]) -> list[str]:
    """Returns the capabilities whose code runs on a device: those of its generation that are not newer.

    One with a suffix a runs on its own device only.
    """
    major, minor = _number(device)
    found = []
    for capability in capabilities:
        exact = _parts(capability)["suffix"] == "a"
        if _number(capability) == (major, minor) or (not exact and (major, 0) <= _number(capability) < (major, minor)):
            found.append(capability)
    return found


def _number(architecture: str) -> tuple[int, int]:
    parts = _parts(architecture)
    return int(parts["major"]), int(parts["minor"])


def _parts(architecture: str) -> re.Match[str]:
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise Failure(f"cuda-capabilities must be like 8.0, 9.0a or 12.0+PTX, got {architecture}")
    return match
