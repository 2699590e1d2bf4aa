"""The operator families, as their build.toml files describe them. Standard library only."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devtools.errors import Failure
from devtools.project import ROOT, relative


@dataclass(frozen=True)
class Component:
    """One section of build.toml that compiles sources: `[torch]` or a `[kernel.<name>]`."""

    backend: str | None
    """None for `[torch]`, whose sources belong to every backend."""
    sources: tuple[str, ...]
    """Everything listed, headers too: what is not listed does not exist for a release build."""
    include: tuple[str, ...]
    flags: tuple[str, ...]
    """For C++."""
    cuda_flags: tuple[str, ...] = ()
    """For nvcc."""
    cuda_capabilities: tuple[str, ...] = ()
    """What the section can be compiled for, such as 9.0a; empty if for everything."""
    cuda_minimum: tuple[int, int] = (0, 0)
    """The CUDA version below which the section is left out."""

    @property
    def units(self) -> list[str]:
        """The sources that are compiled on their own."""
        return [source for source in self.sources if source.endswith((".cpp", ".cc", ".cu", ".metal", ".mm"))]


@dataclass(frozen=True)
class Family:
    """A top-level directory with a build.toml: one kernel of the Hub."""

    directory: Path
    config: dict[str, Any]

    @property
    def title(self) -> str:
        """The directory's name, which is how commands name the family."""
        return self.directory.name

    @property
    def name(self) -> str:
        """The kernel's name on the Hub, such as rudnn-moe."""
        return str(self.config["general"]["name"])

    @property
    def repository(self) -> str:
        """The Hub repository, such as rudnn/rudnn-moe."""
        return str(self.config["general"]["hub"]["repo-id"])

    @property
    def version(self) -> int:
        """The kernel's version, within which nothing changes that a caller relies on."""
        return int(self.config["general"]["version"])

    @property
    def python_name(self) -> str:
        """The Python module's name, such as rudnn_moe."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        """The directory of the Python package."""
        return self.directory / "torch-ext" / self.python_name

    @property
    def suite(self) -> Path:
        """The cases of the family's benchmark."""
        return self.directory / "benchmarks" / "suite.py"

    @property
    def results(self) -> Path:
        """Where the family keeps what its benchmark measured."""
        return self.directory / "benchmarks" / "results"

    @cached_property
    def components(self) -> list[Component]:
        """All sections that list sources, `[torch]` first."""
        sections = [(None, self.config["torch"])]
        sections += [(kernel.get("backend"), kernel) for kernel in self.config.get("kernel", {}).values()]
        return [
            Component(
                backend=backend,
                sources=tuple(section.get("src", ())),
                include=tuple(section.get("include", ())),
                flags=tuple(section.get("cxx-flags", ())),
                cuda_flags=tuple(section.get("cuda-flags", ())),
                cuda_capabilities=tuple(section.get("cuda-capabilities", ())),
                cuda_minimum=_version(section.get("cuda-minver", "0")),
            )
            for backend, section in sections
        ]

    @property
    def backends(self) -> set[str]:
        """The backends for which there are sources."""
        return {component.backend for component in self.components if component.backend is not None}

    def components_of(self, backend: str) -> list[Component]:
        """Returns the sections that a backend compiles."""
        return [component for component in self.components if component.backend in (None, backend)]

    @property
    def listed(self) -> set[str]:
        """Every path in any source list, relative to the family's directory."""
        return {source for component in self.components for source in component.sources}

    @property
    def package_files(self) -> list[Path]:
        """The Python files that every variant carries, in a fixed order."""
        files = (path for suffix in ("*.py", "*.pyi") for path in self.package.rglob(suffix))
        return sorted(path for path in files if path != self.package / "_ops.py")


def _version(text: Any) -> tuple[int, int]:
    """Returns major and minor of a dotted version; what is none is for `configuration.validate` to refuse."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)*", str(text))
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def load(directory: Path) -> Family:
    """Reads a family's build.toml as far as the commands need it; `configuration.validate` checks it in full.

    Args:
        directory: The family's directory.

    Raises:
        Failure: The file is not TOML, or a table that every family has is missing.
    """
    path = directory / "build.toml"
    try:
        config = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Failure(f"{relative(path)} is not valid TOML: {error}") from None
    for table in ("general", "torch"):
        if not isinstance(config.get(table), dict):
            raise Failure(f"{relative(path)} has no [{table}] table")
    if not isinstance(config["general"].get("name"), str):
        raise Failure(f"{relative(path)} has no name in [general]")
    if not isinstance(config["general"].get("hub", {}).get("repo-id"), str):
        raise Failure(f"{relative(path)} has no repo-id in [general.hub]")
    return Family(directory, config)


def discover() -> list[Family]:
    """Returns all families in the order of their names."""
    return [load(path.parent) for path in sorted(ROOT.glob("*/build.toml"))]


def select(titles: Iterable[str]) -> list[Family]:
    """Returns the named families, or all of them if none is named.

    Raises:
        Failure: There is no such family.
    """
    every = {family.title: family for family in discover()}
    wanted = [title.rstrip("/") for title in titles]
    if unknown := [title for title in wanted if title not in every]:
        raise Failure(f"there is no family {', '.join(unknown)}; the families are: {', '.join(every)}")
    if not every:
        raise Failure(f"no directory with a build.toml was found in {ROOT}")
    return [every[title] for title in wanted] if wanted else list(every.values())
