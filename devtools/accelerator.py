"""What a machine needs to run the builds, and what it lacks.

As a program it tells, as JSON, what the Python that runs it has: in a process of its own, so that PyTorch takes no
memory of the device from the tests, and that a PyTorch which cannot be imported ends no more than that process.
"""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from devtools import cuda, portable
from devtools.environment import CONSTRAINTS
from devtools.errors import Failure
from devtools.families import Family
from devtools.project import ROOT, relative

_IMPORTED = ("numpy", "huggingface_hub", "kernels", "pytest", "pytest_timeout", "hypothesis", "rich")
_VARIANT = re.compile(r"torch-stable-abi(\d)(\d+)-(?:cu(\d+)(\d)|cpu)-x86_64-linux")


@dataclass(frozen=True)
class Device:
    """One CUDA device."""

    name: str
    capability: str
    """Such as 9.0."""


@dataclass(frozen=True)
class Machine:
    """What Python finds there."""

    torch: str | None
    """PyTorch's version; None without PyTorch."""
    cuda: str | None = None
    """The CUDA version that PyTorch was built with."""
    devices: tuple[Device, ...] = ()
    kernels: str | None = None
    """The version of the kernels library."""
    broken: dict[str, str] = field(default_factory=dict)
    """Why a module cannot be imported, by its name."""


@dataclass(frozen=True)
class Build:
    """One published variant of a family."""

    family: str
    torch: tuple[int, int]
    """The PyTorch from which on it can be loaded."""
    cuda: tuple[int, int] | None
    """None for a build for the CPU."""
    architectures: tuple[str, ...] = ()


def machine() -> Machine:
    """Returns what this Python has, with the packages that were copied here.

    Raises:
        Failure: Importing PyTorch ended the process.
    """
    asked = subprocess.run(portable.command(__name__), cwd=ROOT, capture_output=True, text=True)
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise Failure(f"the PyTorch of {sys.executable} cannot be imported: {reason}")
    told = json.loads(asked.stdout.splitlines()[-1])
    return Machine(**told | {"devices": tuple(Device(**device) for device in told["devices"])})


def builds(family: Family) -> list[Build]:
    """Returns a family's published variants for this kind of machine."""
    found = []
    for path in sorted((family.directory / "build").glob("*/metadata.json")):
        if name := _VARIANT.fullmatch(path.parent.name):
            abi, toolkit = (name[1], name[2]), (name[3], name[4])
            found.append(
                Build(
                    family.title,
                    (int(abi[0]), int(abi[1])),
                    (int(toolkit[0]), int(toolkit[1])) if name[3] else None,
                    tuple(json.loads(path.read_text())["backend"].get("archs", ())),
                )
            )
    return found


def problems(machine: Machine, found: Sequence[Build], families: Sequence[str], device: str) -> Iterator[str]:
    """Yields what keeps the families from running on the machine, each as a sentence that says what to do.

    Args:
        machine: What `machine` told.
        found: The builds of all families.
        families: Which of them must run.
        device: `cuda` or `cpu`.
    """
    if machine.torch is None:
        yield f"{sys.executable} has no PyTorch; run `<a Python that has it> dev gpu`"
        return
    yield from _missing_packages(machine)
    if device == "cuda" and not machine.devices:
        yield f"there is no CUDA device that PyTorch {machine.torch} can use"
        return
    for title in families:
        fitting = [build for build in found if build.family == title and (build.cuda is not None) == (device == "cuda")]
        if not fitting:
            option = "" if device == "cuda" else f" --device {device}"
            yield (
                f"there is no {device} build of {title}; make it with ./dev gpu --prepare{option} on a machine with a "
                f"compiler, and copy {title}/build"
            )
        else:
            yield from _unfit(machine, fitting)


def _missing_packages(machine: Machine) -> Iterator[str]:
    if machine.broken:
        absent = "ModuleNotFoundError: No module named {!r}".format
        told = (name if reason == absent(name) else f"{name} ({reason})" for name, reason in machine.broken.items())
        place = relative(portable.DIRECTORY)
        remedy = f"make {place} with ./dev gpu --prepare on a machine with a network, and copy it"
        if portable.PACKAGES.is_dir():
            remedy = f"the machine's own may be in the way of those in {place}"
        yield f"what cannot be imported: {', '.join(told)}; {remedy}"
    wanted = portable.pinned(["kernels"], (ROOT / CONSTRAINTS).read_text())[0]
    if machine.kernels is not None and f"kernels=={machine.kernels}" != wanted:
        yield f"the machine's own kernels {machine.kernels} hides the copied one; {wanted} is needed"


def _unfit(machine: Machine, fitting: Sequence[Build]) -> Iterator[str]:
    """Yields why none of a family's builds can be loaded, as the kernels library decides it, or used by the device."""
    newest = fitting[-1]
    assert machine.torch is not None
    if not any(build.torch <= _version(machine.torch) for build in fitting):
        yield "PyTorch {} is too old: the build of {} needs {}.{} or later".format(
            machine.torch, newest.family, *newest.torch
        )
    if newest.cuda is None:
        return
    if not any(build.cuda is not None and _serves(build.cuda, machine.cuda) for build in fitting):
        yield "PyTorch {} comes with CUDA {}, but the build of {} needs CUDA {}.{} or a later {}".format(
            machine.torch, machine.cuda, newest.family, *newest.cuda, newest.cuda[0]
        )
    used = machine.devices[0]
    if not any(cuda.serves(build.architectures, used.capability) for build in fitting):
        yield (
            f"{used.name} has capability {used.capability}, but {newest.family} was built for "
            f"{', '.join(newest.architectures)}; build it with ./dev gpu --prepare --all-architectures"
        )


def _serves(build: tuple[int, int], torch_cuda: str | None) -> bool:
    if torch_cuda is None:
        return False
    major, minor = _version(torch_cuda)
    return build[0] == major and build[1] <= minor


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _look() -> Machine:
    broken, versions = {}, {}
    for module in _IMPORTED:
        try:
            versions[module] = getattr(importlib.import_module(module), "__version__", None)
        except Exception as error:  # whatever a broken package may raise
            broken[module] = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return Machine(None, broken=broken)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = (torch.cuda.get_device_properties(index) for index in range(count))
    devices = tuple(Device(each.name, f"{each.major}.{each.minor}") for each in found)
    return Machine(str(torch.__version__), torch.version.cuda, devices, versions.get("kernels"), broken)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_look())))
