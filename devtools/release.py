"""What must hold before a release, and what it uploads.

A release is a commit with a tag `<family>-v<version>.<number>`; the number counts the releases of a version, and the
first may lack it. The Hub has a branch v<version> for each version, whose variants a release of that version replaces.
"""

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devtools import abi, signatures
from devtools.affected import TAG
from devtools.configuration import rust
from devtools.errors import Failure
from devtools.families import Family
from devtools.project import ROOT, relative
from devtools.variant import Variant

CARD_SECTIONS = ("Use", "API", "Devices and dtypes", "Figures", "Limits")

_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "metal": "Metal"}
_SHOWN = 5


@dataclass(frozen=True, order=True)
class Release:
    """A release of a family, in the order in which they were made."""

    version: int
    number: int
    tag: str

    @staticmethod
    def last(family: Family, *, before: bool = False) -> "Release | None":
        """Returns the family's last release that the current commit is or descends from.

        Args:
            family: Whose releases are looked at.
            before: Whether the current commit does not count, which may have got its tag already.
        """
        older = ("--no-contains", "HEAD") if before else ()
        tags = _git("tag", "--list", f"{family.title}-v*", "--merged", "HEAD", *older).split()
        return max(filter(None, (Release._parsed(family, tag) for tag in tags)), default=None)

    @staticmethod
    def next(family: Family) -> "Release":
        """Returns the release that the current commit is, or would be."""
        last = Release.last(family, before=True)
        number = last.number + 1 if last is not None and last.version == family.version else 0
        return Release(family.version, number, f"{family.title}-v{family.version}.{number}")

    def make(self) -> None:
        """Gives the current commit its tag, unless it has it already."""
        if self.tag not in _git("tag", "--points-at", "HEAD").split():
            _git("tag", self.tag)

    @staticmethod
    def _parsed(family: Family, tag: str) -> "Release | None":
        match = TAG.fullmatch(tag)
        if match is None or match["family"] != family.title:
            return None
        return Release(int(match["version"]), int(match["number"] or 0), tag)

    def signatures(self, family: Family) -> dict[str, str]:
        """Returns the content of each file of signatures that the release has, by its path in the repository."""
        directory = relative(signatures.file_of(family).parent)
        names = _git("ls-tree", "--name-only", self.tag, f"{directory}/").split()
        return {name: _git("show", f"{self.tag}:{name}") for name in names}


def tree_problems() -> Iterator[str]:
    """Yields why the checkout is not what a commit holds, or does not show what was released before."""
    changed = [line for line in _git("status", "--porcelain").splitlines() if line]
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        names = ", ".join(line[3:] for line in changed[:_SHOWN])
        yield f"the tree is not clean, commit or remove first: {names}{more}"
    if _git("rev-parse", "--is-shallow-repository").strip() == "true":
        yield "the clone is shallow, so earlier releases may be missing: git fetch --unshallow --tags"


def version_problems(family: Family) -> Iterator[str]:
    """Yields what a release changed of what the one before promised."""
    last = Release.last(family, before=True)
    if last is None:
        return
    if family.version < last.version:
        yield f"{_build_toml(family)} has version {family.version}, but {last.tag} was released"
    for name, content in last.signatures(family).items():
        path = ROOT / name
        if not path.is_file():
            yield f"{name} is missing, but {last.tag} has it"
        elif path.read_text() != content:
            changes = "; ".join(_changes(content, path.read_text())) or "only its form"
            yield f"{name} is not that of {last.tag} ({changes}); {_raise_version(family)}"


def signature_problems(family: Family, built: signatures.Signatures) -> Iterator[str]:
    """Yields where a build's public signatures are not those that the repository keeps for its version."""
    path = signatures.file_of(family)
    if not path.is_file():
        yield f"{relative(path)} does not exist; ./dev release --write-signatures {family.title} writes it"
        return
    for difference in _changes(path.read_text(), signatures.written(built)):
        yield f"{relative(path)}: {difference}; {_raise_version(family)}"


def _changes(before: str, after: str) -> Iterator[str]:
    """Yields how two files of signatures differ, or that one of them is none."""
    try:
        yield from signatures.differences(signatures.read(before), signatures.read(after))
    except ValueError as error:
        yield f"it cannot be read: {error}"


def _raise_version(family: Family) -> str:
    return (
        f"callers of version {family.version} rely on it, so take it back or raise version in {_build_toml(family)} "
        f"and run ./dev release --write-signatures {family.title}"
    )


def card_problems(family: Family, built: signatures.Signatures) -> Iterator[str]:
    """Yields what is missing in the family's CARD.md, which the Hub shows as the kernel's page."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import metadata_load

    path = family.directory / "CARD.md"
    if not path.is_file():
        yield f"{relative(path)} does not exist"
        return
    try:
        text, header = path.read_text(), metadata_load(path) or {}
    except (ValueError, yaml.YAMLError) as error:
        yield f"{relative(path)} cannot be read: {' '.join(str(error).split())}"
        return
    wanted = {"library_name": "kernels", "license": str(family.config["general"]["license"]).lower()}
    for key, value in wanted.items():
        if header.get(key) != value:
            yield f"{relative(path)} must give {key}: {value} in its header, got {header.get(key)}"
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for name in CARD_SECTIONS:
        if not sections.get(name, "").strip():
            yield f"{relative(path)} has no section {name}, or an empty one"
    for name, parameters in built.items():
        if parameters.startswith("(") and "." not in name:
            listed = re.findall(rf"`{name}(\([^`]*\))", sections.get("API", ""))
            if not any(_same_parameters(parameters, each) for each in listed):
                instead = f", but {name}{listed[0]}" if listed else ""
                yield f"{relative(path)} does not list {name}{parameters} in its section API{instead}"
    for backend in sorted(family.backends):
        if _BACKENDS[backend] not in sections.get("Devices and dtypes", ""):
            yield f"{relative(path)} says nothing about {_BACKENDS[backend]} in its section Devices and dtypes"
    if not re.search(r"\b20\d\d-\d\d-\d\d\b", sections.get("Figures", "")):
        yield f"{relative(path)} gives no date in its section Figures"
    # The builder takes the file for a template, and would fill these in or fail.
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\{\{|\{%|\{#|\bTODO\b", line):
            yield f"{relative(path)}:{number}: is not filled in: {line.strip()}"


def _same_parameters(first: str, second: str) -> bool:
    """Returns whether two lists of parameters say the same, however their defaults are written."""
    try:
        parsed = [ast.dump(ast.parse(f"def function{each}: ...")) for each in (first, second)]
    except SyntaxError:
        return first == second
    return parsed[0] == parsed[1]


def variant_problems(family: Family, variants: Sequence[Variant]) -> Iterator[str]:
    """Yields what is wrong with the built variants: one missing or left over, a digest, the ABI."""
    for variant in variants:
        yield from (f"{relative(variant.directory)}: {problem}" for problem in _problems_of(variant))
    expected = {variant.name for variant in variants}
    for path in sorted((family.directory / "build").glob("*/")):
        if path.name not in expected:
            yield f"{relative(path)} is not built from here, remove it"


def _problems_of(variant: Variant) -> Iterator[str]:
    try:
        metadata = rust().Metadata.read_from_file(variant.directory / "metadata.json")
    except (OSError, ValueError) as error:
        yield f"its metadata.json cannot be read: {error}"
        return
    # Of these there is no digest, and a build does not look at them where the files are as they must be.
    for key, found in {"name": str(metadata.name), "version": metadata.version, "license": metadata.license}.items():
        if found != (wanted := variant.family.config["general"][key]):
            yield f"its metadata.json has {key} {found}, but {_build_toml(variant.family)} has {wanted}; remove it"
    if metadata.digest is None:
        yield "has no digest"
    else:
        try:
            metadata.digest.validate(rust().Digest.hash_variant(rust().DigestAlgorithm.SHA256, variant.directory))
        except rust().DigestValidationError as error:
            yield from map(str, error.violations)
    library = variant.directory / f"{metadata.id}.abi3.so"
    if not library.is_file():
        yield f"{library.name} is missing"
    else:
        yield from abi.violations(library, cuda=variant.profile.backend == "cuda")


def uploads(family: Family, variants: Sequence[Variant]) -> Iterator[tuple[str, str, Path]]:
    """Yields branch, path on the Hub and local file of everything that a release uploads."""
    version = f"v{family.version}"
    yield "main", "README.md", family.directory / "CARD.md"
    for path in sorted((family.directory / "benchmarks").glob("benchmark*.py")):
        yield version, f"benchmarks/{path.name}", path
    for variant in variants:
        for path in sorted(variant.directory.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield version, f"build/{path.relative_to(variant.directory.parent)}", path


def _build_toml(family: Family) -> str:
    return relative(family.directory / "build.toml")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
