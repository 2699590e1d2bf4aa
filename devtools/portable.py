"""Python packages that a machine without a network and without this project's environment needs, to be copied there.

`python -m devtools.portable MODULE ARGUMENT ...` runs a module with them. They stand behind what the machine has of its
own. Standard library only, but for `prepare`, which runs in the environment.
"""

import functools
import importlib.metadata
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from devtools.environment import CONSTRAINTS, install
from devtools.errors import Failure
from devtools.project import CACHE, ROOT, relative

DIRECTORY = CACHE / "gpu"
PACKAGES = DIRECTORY / "packages"
_MANIFEST = DIRECTORY / "manifest.json"

NEEDED = ("kernels", "pytest", "pytest-timeout", "hypothesis", "rich")
"""What the families' tests and benchmarks import."""
LEFT_OUT = frozenset(
    {
        "torch",  # the machine's own
        "numpy",
        "sigstore",  # checks signatures of downloads, of which there are none
        "hf-xet",
    }
)
PYTHONS = ("3.11", "3.12", "3.13")
"""What the packages serve unless told otherwise."""
LIMIT = 40 << 20
"""Bytes; what is copied to the other machine should stay small."""

_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def prepare(pythons: Sequence[str]) -> int:
    """Installs the packages for another machine's Python, and replaces what was there.

    Args:
        pythons: The versions of Python that they must serve, such as 3.12. What is compiled for one of them bears its
            name, so they share a directory.

    Returns:
        Their size in bytes.

    Raises:
        Failure: pip failed, or the packages are too large.
    """
    constraints = (ROOT / CONSTRAINTS).read_text()
    staging = DIRECTORY / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    whole = staging / "whole"
    for python in pythons:
        names = closure(NEEDED, functools.partial(_requirements, python=python), LEFT_OUT)
        install(_pip(staging / python, python, pinned(names, constraints)))
        shutil.copytree(staging / python, whole, dirs_exist_ok=True)
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    if size > LIMIT:
        raise Failure(f"the packages for the other machine take {size >> 20} MiB, more than {LIMIT >> 20} MiB")
    shutil.rmtree(PACKAGES, ignore_errors=True)
    whole.rename(PACKAGES)
    shutil.rmtree(staging)
    _MANIFEST.write_text(json.dumps({"pythons": list(pythons)}) + "\n")
    return size


def _pip(target: Path, python: str, packages: Iterable[str]) -> list[str]:
    """Returns the command that installs wheels for another Python on Linux into a directory."""
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    return [sys.executable, "-m", "pip", "install", "--quiet", f"--target={target}", *options, *platforms, *packages]


def closure(
    roots: Iterable[str], requirements: Callable[[str], Iterable[str]], left_out: Collection[str] = ()
) -> list[str]:
    """Returns the packages that some need, directly or not, and those themselves, in alphabetical order.

    Args:
        roots: Where to begin.
        requirements: Gives the names of the packages that one needs.
        left_out: What is not followed.
    """
    found: set[str] = set()
    waiting = [canonical(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in left_out:
            found.add(name)
            waiting += map(canonical, requirements(name))
    return sorted(found)


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """Returns the packages with the versions that the constraints give them.

    Raises:
        Failure: A package has none.
    """
    lines = (line for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    pins = {canonical(line.split("==")[0]): line.strip() for line in lines}
    names = list(names)
    if missing := [name for name in names if name not in pins]:
        raise Failure(f"{CONSTRAINTS} gives no version of {', '.join(missing)}")
    return [pins[name] for name in names]


def canonical(name: str) -> str:
    """Returns a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(name: str, python: str) -> list[str]:
    """Returns what an installed package needs under another Python on Linux."""
    from packaging.requirements import Requirement

    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    every = (Requirement(text) for text in importlib.metadata.requires(name) or ())
    return [each.name for each in every if each.marker is None or each.marker.evaluate(environment)]


def activate() -> None:
    """Lets this process import the packages, where it has none of that name itself."""
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))


def problem() -> str | None:
    """Returns why the packages cannot serve this Python, or None; without packages only the machine's own count."""
    if not _MANIFEST.is_file():
        return None
    pythons = json.loads(_MANIFEST.read_text())["pythons"]
    mine = "{}.{}".format(*sys.version_info[:2])
    if mine in pythons:
        return None
    return (
        f"the packages in {relative(DIRECTORY)} are for Python {', '.join(pythons)}, this is {mine}; "
        f"make them with ./dev gpu --prepare --python {mine}"
    )


def command(module: str, *arguments: str | Path) -> list[str]:
    """Returns the command line that runs a module with the packages; it must run in the repository."""
    return [sys.executable, "-m", "devtools.portable", module, *map(str, arguments)]


if __name__ == "__main__":
    activate()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
