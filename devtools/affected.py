"""Which families a workflow works on: `python3 -m devtools.affected --help`. Standard library only."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable

from devtools.errors import Failure
from devtools.families import Family, discover, select
from devtools.project import ROOT

# What every family is built from.
_SHARED = ("common", "flake.nix", "flake.lock")
TAG = re.compile(r"(?P<family>[a-z0-9-]+)-v(?P<version>\d+)(\.(?P<number>\d+))?")
"""Of a release; the first of a version may lack the number."""


def affected(families: Iterable[Family], paths: Iterable[str]) -> list[Family]:
    """Returns the families that are built from any of the paths, which are relative to the repository."""
    touched = {path.split("/", 1)[0] for path in paths}
    return [family for family in families if not touched.isdisjoint((family.title, *_SHARED))]


def changed_since(revision: str) -> list[str] | None:
    """Returns the paths that differ from where this branch left a revision; None if git does not have that.

    GitHub names no revision, or one of zeros, where there is nothing before.
    """
    command = ["git", "diff", "--name-only", "-z", f"{revision}...HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1] if revision and done.returncode == 0 else None


def released(tag: str) -> Family:
    """Returns the family that a tag releases, such as `moe-v1` or `moe-v1.2` for version 1 of moe.

    Raises:
        Failure: There is no such family, or its build.toml has another version.
    """
    match = TAG.fullmatch(tag)
    if match is None:
        raise Failure(f"the tag of a release is <family>-v<version>.<number>, not {tag}")
    (family,) = select([match["family"]])
    if (version := family.config["general"].get("version")) != int(match["version"]):
        raise Failure(f"{tag} does not release {family.title}, whose build.toml has version {version}")
    return family


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--since", metavar="REVISION", default="", help="families changed since then (default: all)")
    found.add_argument("--backend", help="of those, the ones with sources for this backend")
    found.add_argument("--tag", help="instead, the family that a tag releases")
    return found


def main(arguments: list[str]) -> int:
    """Prints a family's directory, or a JSON list of them; returns the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        if chosen.tag is not None:
            print(released(chosen.tag).title)
            return 0
        paths = changed_since(chosen.since)
        families = discover() if paths is None else affected(discover(), paths)
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    print(json.dumps([each.title for each in families if chosen.backend in (None, *each.backends)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
