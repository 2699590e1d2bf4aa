"""Compiles and links variants: one build.ninja for the whole project, run by ninja."""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from devtools.errors import Failure
from devtools.families import Component
from devtools.ninja import NinjaFile
from devtools.project import CACHE, VENV
from devtools.variant import COMPATIBILITY, CXX_FLAGS, EXPORTS, INCLUDE, LINK_FLAGS, Variant

BUILD_FILE = CACHE / "build.ninja"


def torch_directory() -> Path:
    """Returns where PyTorch is installed, found without the second or two that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Failure("PyTorch is not installed; remove .venv and run ./dev again")
    return Path(spec.origin).parent


def write_build_file(variants: Sequence[Variant]) -> None:
    """Writes the build.ninja that holds every variant."""
    torch = torch_directory()
    file = NinjaFile()
    file.rule(
        "compile",
        "g++ $flags -MMD -MF $out.d -c $in -o $out",
        description="compile $name",
        depfile="$out.d",
        deps="gcc",
    )
    # The torch libraries stay needed even where nothing refers to them: libtorch brings in what a CUDA build needs.
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--as-needed"]
    searched = _command([f"-L{torch / 'lib'}", *libraries])
    file.rule("link", f"g++ $flags $in {searched} -o $out", description="link $name")

    compatibility = CACHE / "objects" / "manylinux.o"
    flags = _command(CXX_FLAGS)
    file.build(compatibility, "compile", [COMPATIBILITY], variables={"flags": flags, "name": COMPATIBILITY.name})
    for variant in variants:
        _add_variant(file, variant, torch, compatibility)
    file.save(BUILD_FILE)


def _add_variant(file: NinjaFile, variant: Variant, torch: Path, compatibility: Path) -> None:
    family, profile = variant.family, variant.profile
    objects = []
    for component in family.components_of(profile.backend):
        flags = _command(_compile_flags(variant, component, torch))
        for unit in component.units:
            output = (variant.objects / unit).with_suffix(".o")
            label = {"flags": flags, "name": f"{family.title}/{unit} ({profile.name})"}
            file.build(output, "compile", [family.directory / unit], variables=label)
            objects.append(output)
    if profile.portable:
        objects.append(compatibility)
    flags = _command([*LINK_FLAGS, f"-Wl,--version-script={EXPORTS}", *profile.link_flags])
    label = {"flags": flags, "name": f"{family.title} ({profile.name})"}
    file.build(variant.library, "link", objects, implicit=[EXPORTS], variables=label)


def _compile_flags(variant: Variant, component: Component, torch: Path) -> list[str]:
    major, minor = variant.abi
    flags = [
        *CXX_FLAGS,
        f"-D{variant.profile.backend.upper()}_KERNEL",
        f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}",
        "-DPy_LIMITED_API=0x03090000",
        *(f"-I{variant.family.directory / path}" for path in component.include),
        "-isystem",
        str(torch / "include"),
    ]
    if component.backend is None:
        # Only here, since the name changes with every edit and would compile everything again.
        flags.append(f"-DTORCH_EXTENSION_NAME={variant.id}")
        flags += [f"-I{INCLUDE}", "-isystem", sysconfig.get_path("include")]
    return [*flags, *component.flags, *variant.profile.compile_flags]


def run(variants: Sequence[Variant]) -> None:
    """Brings the variants' libraries up to date, in parallel, with ninja showing the progress.

    Raises:
        Failure: Something does not compile or link; ninja has shown the compiler's messages.
    """
    ninja = VENV / "bin" / "ninja"
    jobs = len(os.sched_getaffinity(0))
    command = [str(ninja), "-f", str(BUILD_FILE), "-j", str(jobs), *(str(variant.library) for variant in variants)]
    sys.stdout.flush()
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "TERM": os.environ.get("TERM", "dumb")}
    if subprocess.run(command, cwd=CACHE, env=environment).returncode != 0:
        raise Failure("the build failed, see the compiler's messages above")


def _command(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")
