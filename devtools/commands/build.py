"""`./dev build`."""

import argparse
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from devtools import cuda_toolkit, vendoring
from devtools.errors import Failure
from devtools.families import Family, discover, select
from devtools.locking import exclusive

if TYPE_CHECKING:
    from devtools.variant import Profile, Variant

HELP = "compile the kernels and lay them out for the kernels library"
DESCRIPTION = """\
Builds each family and puts it into <family>/build/<variant>/ as a release would, where
LOCAL_KERNELS="rudnn/rudnn-<family>=<directory of the family>" makes get_kernel find it. Only what changed is built.

The backends are:
  cpu         the default
  cuda        for devices of capability 8.0 and 9.0; beside each object, <object>.ptxas tells registers and spills
  simt-cuda   the CUDA sources compiled for the SIMT bench, as operators of CPU tensors, in
              <family>/build-simt/cuda[-checked]/<variant>/
  simt-metal  the Metal sources, in <family>/build-simt/metal[-checked]/<variant>/
"""
NEEDS_ENVIRONMENT = True

BACKENDS = ("cpu", "cuda", "simt-cuda", "simt-metal")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="what to build for (default: %(default)s)")
    parser.add_argument(
        "--checked",
        action="store_true",
        help="for the bench: look at every access of a kernel, for races, bounds and uninitialised memory",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="for the CPU: build with the address and undefined-behaviour sanitizers, into <family>/build-asan/",
    )
    parser.add_argument(
        "--all-architectures",
        action="store_true",
        help="for cuda: compile for every architecture of a release, which takes longer",
    )
    parser.add_argument("family", nargs="*", help="families to build (default: all that have the backend)")


def needs_cuda(arguments: argparse.Namespace) -> bool:
    """Whether nvcc or its headers are needed."""
    return arguments.backend in ("cuda", "simt-cuda")


def run(arguments: argparse.Namespace) -> int:
    """Builds the chosen families."""
    profile = _profile(arguments)
    build(select(arguments.family), profile, partly=not arguments.family)
    return 0


def _profile(arguments: argparse.Namespace) -> "Profile":
    """Returns the profile that the options ask for.

    Raises:
        Failure: They contradict each other.
    """
    from devtools import variant

    backend = arguments.backend
    if arguments.checked and not backend.startswith("simt-"):
        raise Failure(f"--checked is for the bench, with --backend simt-cuda or simt-metal, got {backend}")
    if arguments.sanitize and backend != "cpu":
        instead = "; on the bench, --checked looks at every access" if backend.startswith("simt-") else ""
        raise Failure(f"--sanitize is for --backend cpu, got {backend}{instead}")
    if arguments.all_architectures and backend != "cuda":
        raise Failure(f"--all-architectures is for --backend cuda, got {backend}")
    name = backend
    if arguments.checked:
        name += "-checked"
    elif arguments.sanitize:
        name += "-sanitized"
    elif arguments.all_architectures:
        name += "-release"
    return next(profile for profile in variant.PROFILES if profile.name == name)


def build(families: Sequence[Family], profile: "Profile | None" = None, *, partly: bool = False) -> None:
    """Builds the families for a profile and publishes the variants that changed.

    Args:
        families: What to build.
        profile: How; by default for the CPU.
        partly: Whether to pass over families that have no sources for the backend.

    Raises:
        Failure: A build.toml, a copy of common/, a source or the built ABI is wrong, or there is nothing to build.
    """
    from devtools import abi, compilation, configuration
    from devtools.variant import CPU, PROFILES, Variant

    profile = profile or CPU
    if reason := missing(profile):
        raise Failure(reason)
    with_sources = [family for family in families if profile.backend in family.backends]
    without = [family.title for family in families if family not in with_sources]
    if without and not (partly and with_sources):
        raise Failure(f"there are no {profile.backend} sources in {', '.join(without)}")
    for family in with_sources:
        configuration.validate(family)
        if problems := vendoring.problems(family):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise Failure(f"{problems[0]}{more}; run ./dev vendor, and see ./dev vendor --check")
        configuration.check_sources(family)

    variants = [Variant(family, profile) for family in with_sources]
    with exclusive("building"):
        # The file always holds all that can be built, so that building one variant does not forget the others.
        every = [Variant(family, each) for family in discover() for each in PROFILES]
        others = [variant for variant in every if variant not in variants and _is_sound(variant)]
        compilation.write_build_file([*variants, *others])
        compilation.run(variants)
        for variant in variants:
            if variant.is_current():
                continue
            if profile.portable and (broken := abi.violations(variant.library, cuda=profile.backend == "cuda")):
                raise Failure(f"{variant.family.title} breaks the ABI it promises: {'; '.join(broken)}")
            variant.publish()
            print(f"built {variant.directory} ({variant.id})")


def missing(profile: "Profile") -> str | None:
    """Returns why this machine cannot build a profile, or None."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        return f"builds run on Linux on x86_64 or aarch64, not on {sys.platform} on {machine}"
    if profile.bench and machine != "x86_64":
        return f"the bench runs on x86_64, not on {machine}"
    needs_nvcc = profile.backend == "cuda" and not profile.bench
    if (profile.backend == "cuda" and cuda_toolkit.cuda_home() is None) or (needs_nvcc and cuda_toolkit.nvcc() is None):
        return cuda_toolkit.NO_CUDA
    return None


def _is_sound(variant: "Variant") -> bool:
    """Returns whether a variant can be in the build file; one that is not must not stop the build of another."""
    from devtools import configuration

    family, profile = variant.family, variant.profile
    if profile.backend not in family.backends or missing(profile):
        return False
    try:
        configuration.validate(family)
        configuration.check_sources(family)
        return bool(variant.abi and variant.architectures is not None)
    except Failure:
        return False
