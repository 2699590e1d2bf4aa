"""`./dev release`."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from devtools import signatures
from devtools.errors import Failure
from devtools.families import Family, select
from devtools.project import relative

if TYPE_CHECKING:
    from devtools.variant import Variant

HELP = "check that families are ready for a release, show what it uploads, and tag it"
DESCRIPTION = """\
Builds each family for what can be built here, then checks that
  - the tree is clean, so that the release is what a commit holds;
  - the version and the files in <family>/signatures/ keep what the last release, the last tag
    <family>-v<version>.<number>, promised;
  - the public signatures of the build are those in <family>/signatures/v<version>.json;
  - CARD.md, which the Hub shows, is filled in and lists every public function;
  - each variant has its digest and its ABI, and no other lies beside them;
and prints what is uploaded, with sizes. Without --dry-run the commit then gets its tag. Nothing leaves this machine:
the workflow that uploads starts when the tag is published, see CONTRIBUTING.md.
"""
NEEDS_ENVIRONMENT = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    alternatives = parser.add_mutually_exclusive_group()
    alternatives.add_argument("--dry-run", action="store_true", help="only check and show, tag nothing")
    alternatives.add_argument(
        "--write-signatures",
        action="store_true",
        help="only write signatures/v<version>.json from a build, for a version that was not released",
    )
    parser.add_argument("family", nargs="*", help="families to release (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Checks the families, and tags them unless told otherwise.

    Raises:
        Failure: A family is not ready.
    """
    from devtools.release import Release

    families = select(arguments.family)
    if arguments.write_signatures:
        for family in families:
            _write_signatures(family)
        return 0
    variants = _build(families)
    if refused := [name for name, problems in _checks(families, variants) if not _passed(name, problems)]:
        raise Failure(f"not ready for a release, see above: {', '.join(refused)}")
    for family in families:
        _show_uploads(family, variants[family.title])
    if arguments.dry_run:
        print("nothing was tagged")
        return 0
    for family in families:
        release = Release.next(family)
        release.make()
        print(f"tagged {release.tag}; next: git push origin {release.tag}, and a GitHub release of it")
    return 0


def _build(families: Sequence[Family]) -> dict[str, list["Variant"]]:
    """Brings up to date what can be built here, and returns the variants by family."""
    from devtools.commands.build import build, missing
    from devtools.console import notice
    from devtools.variant import CPU, CUDA_RELEASE, Variant

    variants: dict[str, list[Variant]] = {family.title: [] for family in families}
    for profile in (CPU, CUDA_RELEASE):
        chosen = [family for family in families if profile.backend in family.backends]
        if reason := missing(profile):
            notice(f"no {profile.backend} variant is built here: {reason}")
        elif chosen:
            build(chosen, profile)
            for family in chosen:
                variants[family.title].append(Variant(family, profile))
    if any("metal" in family.backends for family in families):
        notice("no metal variant is built here: that takes macOS and kernel-builder")
    return variants


def _checks(families: Sequence[Family], variants: dict[str, list["Variant"]]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields the name of each check, and the reasons against a release that it finds."""
    from devtools import release

    yield "clean tree", release.tree_problems()
    for family in families:
        built = _signatures_of(family)
        yield f"{family.title}: version", release.version_problems(family)
        yield f"{family.title}: signatures", release.signature_problems(family, built)
        yield f"{family.title}: CARD.md", release.card_problems(family, built)
        yield f"{family.title}: variants", release.variant_problems(family, variants[family.title])


def _passed(name: str, problems: Iterator[str]) -> bool:
    from devtools.console import console

    found = list(problems)
    console().print(f"[red]REFUSED[/] {name}" if found else f"[green]ok[/]      {name}")
    for problem in found:
        print(f"        {problem}", flush=True)
    return not found


def _signatures_of(family: Family) -> signatures.Signatures:
    from devtools.variant import CPU, Variant

    return signatures.of_build(Variant(family, CPU).directory)


def _write_signatures(family: Family) -> None:
    from devtools.commands.build import build
    from devtools.release import Release

    path = signatures.file_of(family)
    last = Release.last(family)
    if last is not None and relative(path) in last.signatures(family):
        raise Failure(f"{relative(path)} was released with {last.tag} and stays; raise version in build.toml first")
    build([family])
    path.parent.mkdir(exist_ok=True)
    path.write_text(signatures.written(_signatures_of(family)))
    print(f"wrote {relative(path)}")


def _show_uploads(family: Family, variants: Sequence["Variant"]) -> None:
    from devtools.release import Release, uploads

    files = [(branch, name, path.stat().st_size) for branch, name, path in uploads(family, variants)]
    print(f"\n{Release.next(family).tag} to kernel repository {family.repository}")
    for branch in dict.fromkeys(branch for branch, _, _ in files):
        ours = [(name, size) for each, name, size in files if each == branch]
        print(f"  branch {branch}: {len(ours)} files, {_kilobytes(sum(size for _, size in ours))}")
        for name, size in ours:
            print(f"    {_kilobytes(size):>12}  {name}")
    for variant in variants:
        sizes = [size for _, name, size in files if name.startswith(f"build/{variant.name}/")]
        print(f"  a user of {variant.name} downloads {len(sizes)} files, {_kilobytes(sum(sizes))}")


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.1f} kB"
