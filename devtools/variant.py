"""A variant: one family built for one profile, laid out as kernel-builder lays it out and as `kernels` loads it."""

import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from devtools import cuda, cuda_toolkit
from devtools.configuration import rust
from devtools.cuda import NVCC_FLAGS
from devtools.errors import Failure
from devtools.families import Component, Family
from devtools.project import CACHE, ROOT, relative

# -fno-gnu-unique: a function's static variable must not be shared with another kernel that has a function of that name.
# -Wno-maybe-uninitialized: up to version 12, GCC's own AVX-512 intrinsics set it off wherever they are used.
CXX_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-fdiagnostics-color=auto",
)
LINK_FLAGS = ("-shared", "-Wl,-z,relro,-z,now")

COMPATIBILITY = ROOT / "devtools" / "compat" / "manylinux.cpp"
EXPORTS = ROOT / "devtools" / "compat" / "exports.map"
INCLUDE = ROOT / "devtools" / "include"

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_OPS = """\
import torch
from . import {id}
ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    \"\"\"Returns the operator's name with this build's namespace in front.\"\"\"
    return f"{id}::{{op_name}}"
"""


@dataclass(frozen=True)
class Profile:
    """How to build: for which backend, with which further flags, and into which directory of the family."""

    name: str
    backend: str
    """Whose sections of build.toml are compiled."""
    directory: str
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    portable: bool = True
    """Whether the result must meet the ABI that the Hub asks for; a sanitizer's runtime and the bench do not."""
    architectures: tuple[str, ...] = ()
    """Of CUDA devices."""
    bench: bool = False
    """Whether the backend's sources are compiled for the SIMT bench, which registers them for CPU tensors."""
    checked: bool = False
    """Whether the bench looks at every access."""

    @property
    def system(self) -> str:
        """The part of a variant's name that says what it runs on."""
        if self.backend == "cuda" and not self.bench:
            return "cu{}{}".format(*cuda_toolkit.cuda_version())
        return "cpu"

    @property
    def device(self) -> str:
        """The backend as the metadata names it: for whose tensors the operators are registered."""
        return "cpu" if self.bench else self.backend

    @property
    def stable_abi(self) -> bool:
        """Whether PyTorch's stable ABI is used; it has no command queue of Metal."""
        return self.backend != "metal"

    @property
    def host(self) -> str:
        """Names the objects of host code, which a fast and a checked bench build share."""
        return f"simt-{self.backend}" if self.bench else self.name

    @property
    def label(self) -> str:
        """The part of a variant's id between the kernel's name and the digest."""
        return f"simt_{self.backend}" if self.bench else self.backend


CPU = Profile("cpu", backend="cpu", directory="build")
# -g1, not -g: line numbers are all a report shows, and tracking variables makes the compiler several times slower.
CPU_SANITIZED = Profile(
    "cpu-sanitized",
    backend="cpu",
    directory="build-asan",
    compile_flags=("-O1", "-g1", "-fno-omit-frame-pointer", *SANITIZERS),
    link_flags=SANITIZERS,
    portable=False,
)
# What needs libtorch_cuda is bound when it is called, so that a CPU build of PyTorch can load the library too.
CUDA = Profile(
    "cuda",
    backend="cuda",
    directory="build",
    compile_flags=("-DUSE_CUDA=1",),
    link_flags=("-Wl,-z,lazy",),
    architectures=cuda.ARCHITECTURES,
)
CUDA_RELEASE = replace(CUDA, name="cuda-release", architectures=cuda.ALL_ARCHITECTURES)
BENCH = tuple(
    Profile(
        f"simt-{backend}{suffix}",
        backend=backend,
        directory=f"build-simt/{backend}{suffix}",
        portable=False,
        bench=True,
        checked=bool(suffix),
    )
    for backend in ("cuda", "metal")
    for suffix in ("", "-checked")
)
PROFILES = (CPU, CPU_SANITIZED, CUDA, CUDA_RELEASE, *BENCH)


def torch_version() -> tuple[int, int]:
    """Returns the release of the installed PyTorch, without the second or two that importing it takes."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Variant:
    """One family in one profile."""

    family: Family
    profile: Profile

    @cached_property
    def components(self) -> list[Component]:
        """The sections of build.toml that are compiled, `[torch]` first."""
        components = self.family.components_of(self.profile.backend)
        return [component for component in components if component.cuda_minimum <= cuda_toolkit.cuda_version()]

    @property
    def abi(self) -> tuple[int, int]:
        """The release of PyTorch for whose ABI the variant is built."""
        if not self.profile.stable_abi:
            return torch_version()
        version = self.family.config["torch"].get("stable-abi", {}).get(self.profile.backend)
        if version is None:
            raise Failure(
                f"{relative(self.family.directory)}/build.toml gives no {self.profile.backend} version "
                "in [torch.stable-abi]"
            )
        major, minor = str(version).split(".")[:2]
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """The variant's directory name, by which the loader chooses."""
        major, minor = self.abi
        framework = f"torch-stable-abi{major}{minor}" if self.profile.stable_abi else f"torch{major}{minor}-cxx11"
        return f"{framework}-{self.profile.system}-{platform.machine()}-linux"

    @property
    def architectures(self) -> list[str]:
        """The CUDA architectures that some section is compiled for, in kernel-builder's order."""
        sections = (component for component in self.components if component.backend is not None)
        return sorted({each for component in sections for each in self.architectures_of(component)})

    def architectures_of(self, component: Component) -> list[str]:
        """Returns the CUDA architectures that one section is compiled for.

        Raises:
            Failure: It can be compiled for none of those wanted.
        """
        chosen = cuda.restricted(self.profile.architectures, component.cuda_capabilities)
        if self.profile.architectures and not chosen:
            raise Failure(
                f"{relative(self.family.directory)}/build.toml gives the cuda-capabilities "
                f"{', '.join(component.cuda_capabilities)}, none of which runs on "
                f"{', '.join(self.profile.architectures)}"
            )
        return chosen

    @property
    def directory(self) -> Path:
        """Where the variant is published."""
        return self.family.directory / self.profile.directory / self.name

    @property
    def objects(self) -> Path:
        """Where its object files lie."""
        return CACHE / "objects" / self.profile.name / self.family.title

    @property
    def host_objects(self) -> Path:
        """Where the object files of host code lie."""
        return CACHE / "objects" / self.profile.host / self.family.title

    @property
    def library(self) -> Path:
        """The linked extension, before it is published."""
        return self.objects / f"{self.family.python_name}.abi3.so"

    @cached_property
    def id(self) -> str:
        """Names the extension module and the operators' namespace: another source or flag, another id.

        `kernels` keeps loaded modules by this name and PyTorch operators by this namespace, so two versions of a
        kernel can live in one process only if it differs. A fast and a checked bench build never do, and have one id.
        """
        family = self.family
        alike = [profile for profile in PROFILES if profile.host == self.profile.host]
        compiler = (NVCC_FLAGS, cuda_toolkit.cuda_version()) if self.profile.architectures else ()
        digest = hashlib.sha256(repr((alike, CXX_FLAGS, LINK_FLAGS, *compiler)).encode())
        listed = {source for part in self.components for source in part.sources}
        files = {family.directory / source for source in listed} | set(family.package_files)
        files |= {family.directory / "build.toml", COMPATIBILITY, EXPORTS, *INCLUDE.iterdir()}
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
        return f"_{family.python_name}_{self.profile.label}_{digest.hexdigest()[:7]}"

    def is_current(self) -> bool:
        """Whether the published variant is intact and what a build would publish now."""
        try:
            metadata = rust().Metadata.read_from_file(self.directory / "metadata.json")
            if metadata.id != self.id or metadata.digest is None:
                return False
            metadata.digest.validate(rust().Digest.hash_variant(rust().DigestAlgorithm.SHA256, self.directory))
        except (OSError, ValueError, rust().DigestValidationError):
            return False
        published = self.directory / f"{self.id}.abi3.so"
        return published.is_file() and published.read_bytes() == self.library.read_bytes()

    def publish(self) -> None:
        """Puts the finished variant in its place, and removes stale variants of its backend.

        Who loads it meanwhile finds the old variant, none, or the new one, but never a part of one. The loader prefers
        some variants over others, so one that is left over could hide this one.
        """
        staging = self.directory.parent / f".staging-{self.name}"
        shutil.rmtree(staging, ignore_errors=True)
        for path in self.family.package_files:
            target = staging / path.relative_to(self.family.package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (staging / "_ops.py").write_text(_OPS.format(id=self.id))
        shutil.copy2(self.library, staging / f"{self.id}.abi3.so")
        self._write_metadata(staging)

        for stale in self._stale():
            shutil.rmtree(stale)
        replaced = self.directory.parent / f".replaced-{self.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(replaced)
        staging.rename(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _write_metadata(self, directory: Path) -> None:
        general = self.family.config["general"]
        device = self.profile.device
        digest = rust().Digest.hash_variant(rust().DigestAlgorithm.SHA256, directory)
        metadata = {
            "id": self.id,
            "name": self.family.name,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [*general.get("python-depends", ()), *general.get(device, {}).get("python-depends", ())],
            "backend": {"type": device} | ({"archs": self.architectures} if self.profile.architectures else {}),
            "digest": {"algorithm": str(digest.algorithm), "files": digest.files},
        }
        path = directory / "metadata.json"
        path.write_text(json.dumps(metadata, indent=2) + "\n")
        try:
            rust().Metadata.read_from_file(path)
        except ValueError as error:
            raise Failure(f"the metadata written for {self.family.title} is not valid: {error}") from None

    def _stale(self) -> list[Path]:
        system = r"cu\d+" if self.profile.system.startswith("cu") else self.profile.system
        same_system = re.compile(rf"torch.*-{system}(-.*)?")
        directory = self.directory.parent
        return [path for path in directory.iterdir() if same_system.fullmatch(path.name) and path != self.directory]
