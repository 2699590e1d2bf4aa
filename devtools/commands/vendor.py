"""`./dev vendor`."""

import argparse

from devtools import vendoring
from devtools.families import select

HELP = "copy what families share from common/ into each family"
DESCRIPTION = """\
A release packs one family's directory, so each family holds copies of the files of common/ that its build.toml lists.
Edit only the originals, then run this command. It also removes copies that are not listed any more.
"""
NEEDS_ENVIRONMENT = False


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; report copies that differ and includes that build.toml does not list, and fail if any",
    )
    parser.add_argument("family", nargs="*", help="families to look at (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Writes the copies, or with --check reports what is wrong with them."""
    families = select(arguments.family)
    for line in [] if arguments.check else [line for family in families for line in vendoring.update(family)]:
        print(line)
    found = [problem for family in families for problem in vendoring.problems(family)]
    for problem in found:
        print(problem)
    if not found:
        print("the copies of common/ are current")
    elif arguments.check:
        print("run ./dev vendor to write the copies; list new includes in build.toml")
    return 1 if found else 0
