"""`./dev build`."""

import argparse
import platform
import sys
from collections.abc import Sequence

from devtools import vendoring
from devtools.errors import Failure
from devtools.families import Family, discover, select
from devtools.locking import exclusive

HELP = "compile the kernels and lay them out for the kernels library"
DESCRIPTION = """\
Builds each family and puts it into <family>/build/<variant>/ as a release would, where
LOCAL_KERNELS="rudnn/rudnn-<family>=<directory of the family>" makes get_kernel find it. Only what changed is built.
"""
NEEDS_ENVIRONMENT = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="build with the address and undefined-behaviour sanitizers, into <family>/build-asan/",
    )
    parser.add_argument("family", nargs="*", help="families to build (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Builds the chosen families."""
    build(select(arguments.family), sanitize=arguments.sanitize)
    return 0


def build(families: Sequence[Family], *, sanitize: bool = False) -> None:
    """Builds the families for the CPU and publishes the variants that changed.

    Args:
        families: What to build.
        sanitize: Whether to build the sanitized variant instead of the ordinary one.

    Raises:
        Failure: A build.toml, a copy of common/, a source or the built ABI is wrong.
    """
    from devtools import abi, compilation, configuration
    from devtools.variant import CPU, CPU_SANITIZED, PROFILES, Variant

    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Failure(f"builds run on Linux on x86_64 or aarch64, not on {sys.platform} on {platform.machine()}")
    for family in families:
        configuration.validate(family)
        if problems := vendoring.problems(family):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise Failure(f"{problems[0]}{more}; run ./dev vendor, and see ./dev vendor --check")
        configuration.check_sources(family)

    profile = CPU_SANITIZED if sanitize else CPU
    variants = [Variant(family, profile) for family in families]
    with exclusive("building"):
        # The file always holds every family that is sound, so that building one does not forget the others.
        every = {family.title: family for family in discover() if _is_sound(family)}
        every |= {family.title: family for family in families}
        compilation.write_build_file([Variant(family, each) for family in every.values() for each in PROFILES])
        compilation.run(variants)
        for variant in variants:
            if variant.is_current():
                continue
            if profile.portable and (broken := abi.violations(variant.library)):
                raise Failure(f"{variant.family.title} breaks the ABI it promises: {'; '.join(broken)}")
            variant.publish()
            print(f"built {variant.directory} ({variant.id})")


def _is_sound(family: Family) -> bool:
    """Returns whether a family can be in the build file; one that is not must not stop the build of another."""
    from devtools import configuration
    from devtools.variant import PROFILES, Variant

    try:
        configuration.validate(family)
        configuration.check_sources(family)
        return all(Variant(family, profile).abi for profile in PROFILES)
    except Failure:
        return False
