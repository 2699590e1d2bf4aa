"""Keeps each family's copies of `common/` identical to the originals. Standard library only.

A release packs one family's directory and nothing else, so what families share is copied into each. The manifest is
build.toml: every `common/...` path in its source lists. A few files are in every family.
"""

import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from devtools.families import Family
from devtools.project import ROOT, relative

COMMON = ROOT / "common"

# Written by the build, as kernel-builder does.
GENERATED_HEADERS = frozenset({"registration.h"})

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_CODE = frozenset({".h", ".cuh", ".cpp", ".cc", ".cu", ".metal", ".mm"})


@dataclass(frozen=True)
class Copy:
    """One file of a family that repeats a file of `common/`."""

    source: Path
    target: Path

    @property
    def current(self) -> bool:
        """Whether the copy is there and has the original's bytes."""
        return self.target.is_file() and self.target.read_bytes() == self.source.read_bytes()

    def write(self) -> None:
        """Makes the copy."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.source, self.target)


def manifest(family: Family) -> list[Copy]:
    """Returns every copy that the family must hold."""
    fixed = {
        "conftest.py": family.directory / "tests" / "conftest.py",
        "flake.nix": family.directory / "flake.nix",
        "flake.lock": family.directory / "flake.lock",
    }
    copies = [Copy(COMMON / source, target) for source, target in fixed.items()]
    copies += [Copy(path, family.package / f"_{path.name}") for path in sorted((COMMON / "python").glob("*.py"))]
    shared = sorted(path for path in family.listed if path.startswith("common/"))
    return copies + [Copy(ROOT / path, family.directory / path) for path in shared]


def stale(family: Family) -> list[Path]:
    """Returns the copies that build.toml lists no longer."""
    directory = family.directory / "common"
    wanted = {copy.target for copy in manifest(family)}
    return sorted(path for path in directory.rglob("*") if path.is_file() and path not in wanted)


def unlisted_includes(family: Family) -> Iterator[str]:
    """Yields a message for each include of a family's own file that build.toml does not list.

    Such a file is there in the checkout and missing from the sources of a release. Every listed file is read, so an
    include that is reached only through other headers is found too.
    """
    listed = family.listed
    roots = sorted({Path(), *(Path(path) for component in family.components for path in component.include)})
    for name in sorted(listed):
        path = family.directory / name
        if path.suffix not in _CODE or not path.is_file():
            continue
        for included in _INCLUDE.findall(path.read_text()):
            if included in GENERATED_HEADERS:
                continue
            candidates = [posixpath.normpath(root / included) for root in (Path(name).parent, *roots)]
            if not any(candidate in listed for candidate in candidates):
                yield f'{relative(path)} includes "{included}", which build.toml does not list'


def problems(family: Family) -> list[str]:
    """Returns what `./dev vendor --check` reports about a family: empty if all is well."""
    found = []
    for copy in manifest(family):
        if not copy.source.is_file():
            found.append(f"{relative(copy.source)} does not exist, but {family.title} needs a copy of it")
        elif not copy.current:
            state = "differs from" if copy.target.exists() else "is missing, a copy of"
            found.append(f"{relative(copy.target)} {state} {relative(copy.source)}")
    found += [f"{relative(path)} is not listed in build.toml any more" for path in stale(family)]
    return found + list(unlisted_includes(family))


def update(family: Family) -> list[str]:
    """Writes the copies that are not current and removes the stale ones; returns what was done."""
    done = []
    for copy in manifest(family):
        if copy.source.is_file() and not copy.current:
            copy.write()
            done.append(f"{relative(copy.target)} copied from {relative(copy.source)}")
    for path in stale(family):
        path.unlink()
        done.append(f"{relative(path)} removed")
    return done
