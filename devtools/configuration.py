"""Kernel-builder's own reading of build.toml and metadata.json, without importing PyTorch."""

import importlib.machinery
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

from devtools.errors import Failure
from devtools.families import Family
from devtools.project import relative


@cache
def rust() -> ModuleType:
    """Returns the module `kernels._rust`.

    An ordinary import would run `kernels/__init__.py`, which imports PyTorch and costs more than a whole idle build.
    """
    package = importlib.util.find_spec("kernels")
    if package is None or not package.submodule_search_locations:
        raise Failure("the package kernels is not installed; remove .venv and run ./dev again")
    path = Path(package.submodule_search_locations[0]) / "_rust.abi3.so"
    loader = importlib.machinery.ExtensionFileLoader("kernels._rust", str(path))
    spec = importlib.util.spec_from_file_location("kernels._rust", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def validate(family: Family) -> None:
    """Checks build.toml as kernel-builder does.

    Raises:
        Failure: With kernel-builder's reason in one line.
    """
    try:
        rust().Build.open(family.directory)
    except ValueError as error:
        reason = re.sub(r"\s+", " ", str(error)).split("build.toml: ", 1)[-1].strip()
        raise Failure(f"{_path(family)} is not valid: {reason}") from None


def check_sources(family: Family) -> None:
    """Checks what kernel-builder finds out late: that the listed files and the package are there, each once.

    Raises:
        Failure: With the first problem.
    """
    if missing := sorted(source for source in family.listed if not (family.directory / source).is_file()):
        raise Failure(f"{_path(family)} lists files that do not exist: {', '.join(missing)}")
    for backend in {component.backend for component in family.components if component.backend}:
        units = [unit for component in family.components_of(backend) for unit in component.units]
        if twice := sorted({unit for unit in units if units.count(unit) > 1}):
            raise Failure(f"{_path(family)} compiles a file twice for {backend}: {', '.join(twice)}")
    if not (family.package / "__init__.py").is_file():
        raise Failure(f"{relative(family.package)}/__init__.py does not exist, but {_path(family)} names the package")


def _path(family: Family) -> str:
    return relative(family.directory / "build.toml")
