"""Compiles and links variants: one build.ninja for the whole project, run by ninja."""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path

from devtools import cuda, cuda_toolkit
from devtools.errors import Failure
from devtools.families import Component
from devtools.ninja import NinjaFile
from devtools.project import CACHE, ROOT, VENV, relative
from devtools.variant import COMPATIBILITY, CXX_FLAGS, EXPORTS, INCLUDE, LINK_FLAGS, Variant
from simt import toolchain

BUILD_FILE = CACHE / "build.ninja"

ENGINE = CACHE / "objects" / "simt" / "libsimt.so"
"""The engine of the SIMT bench, which every variant for the bench loads from here."""

# What ptxas -v tells, which is for the file beside the object and not for the terminal.
_PTXAS_TOLD = r"^ptxas info|^ +[0-9]+ bytes stack frame|^$$"


def torch_directory() -> Path:
    """Returns where PyTorch is installed, found without the second or two that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Failure("PyTorch is not installed; remove .venv and run ./dev again")
    return Path(spec.origin).parent


def write_build_file(variants: Sequence[Variant]) -> None:
    """Writes the build.ninja that holds every variant."""
    file = NinjaFile()
    _add_rules(file)
    _compile(file, COMPATIBILITY, _compatibility_object(), CXX_FLAGS)
    if any(variant.profile.bench for variant in variants):
        _add_engine(file)
    for variant in variants:
        _add_variant(file, variant)
    file.save(BUILD_FILE)


def _add_rules(file: NinjaFile) -> None:
    file.rule(
        "compile",
        f"{toolchain.COMPILER} $flags -MMD -MF $out.d -c $in -o $out",
        description="compile $name",
        depfile="$out.d",
        deps="gcc",
    )
    file.rule("link", f"{toolchain.COMPILER} $flags $in $libraries -o $out", description="link $name")
    # The compiler's output is shown in full if it fails, else without the lines that are wanted in the file.
    file.rule(
        "compile_cuda",
        f"{cuda_toolkit.nvcc() or 'nvcc'} $flags -MMD -MF $out.d -MT $out -c $in -o $out 2> $out.ptxas && "
        f"{{ grep -Ev '{_PTXAS_TOLD}' $out.ptxas || true; }} || {{ cat $out.ptxas; exit 1; }}",
        description="compile $name",
        depfile="$out.d",
        deps="gcc",
    )
    file.rule(
        "translate_metal",
        f"cd {_command([str(ROOT)])} && {_command([sys.executable])} -m simt.metal.prepass $in $out $include",
        description="translate $name",
    )


def _add_engine(file: NinjaFile) -> None:
    objects = []
    for source in toolchain.ENGINE_SOURCES:
        objects.append(ENGINE.parent / f"{source.name}.o")
        _compile(file, source, objects[-1], toolchain.ENGINE)
    _link(file, objects, ENGINE, ["-shared"], toolchain.ENGINE_LIBRARIES, relative(ENGINE))


def _add_variant(file: NinjaFile, variant: Variant) -> None:
    profile = variant.profile
    objects = [
        _add_unit(file, variant, component, unit)
        for component in variant.components
        for unit in component.units
        if not (profile.bench and unit.endswith(".mm"))
    ]
    # The torch libraries stay needed even where nothing refers to them: libtorch brings in what a CUDA build needs.
    libraries = [f"-L{torch_directory() / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries.append("-Wl,--as-needed")
    implicit = [EXPORTS]
    if profile.portable:
        objects.append(_compatibility_object())
    if profile.architectures:
        home = cuda_toolkit.cuda_home()
        libraries += [f"-L{home}/lib64", f"-L{home}/lib", f"-l:libcudart.so.{cuda_toolkit.CUDA_MAJOR}"]
    if profile.bench:
        libraries += toolchain.engine_link_flags(ENGINE)
        implicit.append(ENGINE)
        if profile.backend == "metal":
            objects.append(_add_metal_pipeline(file, variant))
    flags = [*LINK_FLAGS, f"-Wl,--version-script={EXPORTS}", *profile.link_flags]
    name = f"{variant.family.title} ({profile.name})"
    _link(file, objects, variant.library, flags, libraries, name, implicit)


def _add_metal_pipeline(file: NinjaFile, variant: Variant) -> Path:
    """Adds what takes the place of pipeline.mm on the bench, one object for all families.

    Launches begin there, so it is compiled as kernels are: from its flags the engine knows whether they are checked.
    """
    profile = variant.profile
    output = CACHE / "objects" / profile.name / f"{toolchain.METAL_PIPELINE.name}.o"
    name = f"{relative(toolchain.METAL_PIPELINE)} ({profile.name})"
    _compile(file, toolchain.METAL_PIPELINE, output, [*toolchain.KERNEL, *_mode(variant)], name)
    return output


def _add_unit(file: NinjaFile, variant: Variant, component: Component, unit: str) -> Path:
    """Adds the edges of one source, and returns its object file."""
    add = {".cu": _add_cuda, ".metal": _add_shader}.get(Path(unit).suffix, _add_host)
    return add(file, variant, component, unit)


def _add_host(file: NinjaFile, variant: Variant, component: Component, unit: str) -> Path:
    source = variant.family.directory / unit
    output = variant.host_objects / f"{unit}.o"
    flags = _host_flags(variant, component, source)
    _compile(file, source, output, flags, _name(variant, unit, variant.profile.host))
    return output


def _add_cuda(file: NinjaFile, variant: Variant, component: Component, unit: str) -> Path:
    source = variant.family.directory / unit
    output = variant.objects / f"{unit}.o"
    name = _name(variant, unit, variant.profile.name)
    if variant.profile.bench:
        flags = [*_kernel_flags(variant, component), *_torch_flags(variant), "-x", "c++"]
        _compile(file, source, output, flags, name)
    else:
        variables = {"flags": _command(_nvcc_flags(variant, component)), "name": name}
        told = output.with_name(f"{output.name}.ptxas")
        file.build(output, "compile_cuda", [source], also=[told], variables=variables)
    return output


def _add_shader(file: NinjaFile, variant: Variant, component: Component, unit: str) -> Path:
    source = variant.family.directory / unit
    translated = variant.host_objects / f"{unit}.cpp"
    folders = [str(variant.family.directory / path) for path in component.include]
    variables = {"name": _name(variant, unit, variant.profile.host), "include": _command(folders)}
    # The macros of headers are expanded.
    headers = [variant.family.directory / path for path in component.sources if path.endswith(".h")]
    implicit = [*toolchain.PREPASS_SOURCES, *headers]
    file.build(translated, "translate_metal", [source], implicit=implicit, variables=variables)
    output = variant.objects / f"{unit}.o"
    # Its neighbours are included by their bare names, and the translation lies elsewhere.
    flags = [*_kernel_flags(variant, component), *toolchain.SHADER, "-iquote", str(source.parent)]
    _compile(file, translated, output, flags, _name(variant, unit, variant.profile.name))
    return output


def _name(variant: Variant, unit: str, profile: str) -> str:
    return f"{variant.family.title}/{unit} ({profile})"


def _host_flags(variant: Variant, component: Component, source: Path) -> list[str]:
    flags = [
        *_include_flags(variant, component),
        *(toolchain.HOST if variant.profile.bench else CXX_FLAGS),
        *_torch_flags(variant),
        "-DPy_LIMITED_API=0x03090000",
    ]
    if component.backend is None:
        flags += [f"-I{INCLUDE}", "-isystem", sysconfig.get_path("include")]
        if "TORCH_EXTENSION_NAME" in source.read_text(errors="replace"):
            # Only there, since the name changes with every edit and would compile everything again.
            flags.append(f"-DTORCH_EXTENSION_NAME={variant.id}")
    return [*flags, *component.flags, *variant.profile.compile_flags]


def _kernel_flags(variant: Variant, component: Component) -> list[str]:
    """Returns the flags for device code on the bench."""
    return [*_include_flags(variant, component), *toolchain.KERNEL, *component.flags, *_mode(variant)]


def _mode(variant: Variant) -> list[str]:
    return toolchain.CHECKED if variant.profile.checked else toolchain.FAST


def _nvcc_flags(variant: Variant, component: Component) -> list[str]:
    return [
        *cuda.NVCC_FLAGS,
        *cuda.generate_code(variant.architectures_of(component)),
        *_include_flags(variant, component),
        *_torch_flags(variant),
        *component.cuda_flags,
        *variant.profile.compile_flags,
    ]


def ptx_of(variant: Variant, units: Collection[str]) -> list[str]:
    """Returns the PTX of CUDA sources for the oldest architecture."""
    oldest = min(cuda.ARCHITECTURES, key=float).replace(".", "")
    texts = []
    for component in variant.components:
        flags = [flag for flag in _nvcc_flags(variant, component) if not flag.startswith(("-gencode", "-Xptxas"))]
        for unit in [each for each in component.units if each in units]:
            command = [cuda_toolkit.nvcc() or "nvcc", *flags, f"-arch=compute_{oldest}", "--ptx", "-o", "-"]
            done = subprocess.run([*command, str(variant.family.directory / unit)], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise Failure(f"{variant.family.title}/{unit} could not be compiled to PTX, see above")
            texts.append(done.stdout)
    return texts


def _include_flags(variant: Variant, component: Component) -> list[str]:
    return [f"-I{variant.family.directory / path}" for path in component.include]


def _torch_flags(variant: Variant) -> list[str]:
    """Returns what code that includes PyTorch's headers needs, and that of the backend."""
    profile = variant.profile
    headers = torch_directory() / "include"
    flags = [f"-D{profile.backend.upper()}_KERNEL", "-isystem", str(headers)]
    if profile.stable_abi:
        major, minor = variant.abi
        flags.append(f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}")
    else:
        flags += ["-isystem", str(headers / "torch/csrc/api/include")]
    return flags + (cuda_toolkit.include_flags() if profile.backend == "cuda" else [])


def _compile(file: NinjaFile, source: Path, output: Path, flags: Sequence[str], name: str = "") -> None:
    variables = {"flags": _command(flags), "name": name or relative(source)}
    file.build(output, "compile", [source], variables=variables)


def _link(
    file: NinjaFile,
    objects: Sequence[Path],
    output: Path,
    flags: Sequence[str],
    libraries: Sequence[str],
    name: str,
    implicit: Sequence[Path] = (),
) -> None:
    variables = {"flags": _command(flags), "libraries": _command(libraries), "name": name}
    file.build(output, "link", objects, implicit=implicit, variables=variables)


def _compatibility_object() -> Path:
    return CACHE / "objects" / "manylinux.o"


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
