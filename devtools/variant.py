"""A variant: one family built for one profile, laid out as kernel-builder lays it out and as `kernels` loads it."""

import hashlib
import json
import platform
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from devtools.configuration import rust
from devtools.errors import Failure
from devtools.families import Family
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
    directory: str
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    portable: bool = True
    """Whether the result must meet the ABI that the Hub asks for; a sanitizer's runtime does not."""


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
PROFILES = (CPU, CPU_SANITIZED)


@dataclass(frozen=True)
class Variant:
    """One family in one profile."""

    family: Family
    profile: Profile

    @property
    def abi(self) -> tuple[int, int]:
        """The release of PyTorch whose stable ABI the variant is built for."""
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
        return f"torch-stable-abi{major}{minor}-{self.profile.backend}-{platform.machine()}-linux"

    @property
    def directory(self) -> Path:
        """Where the variant is published."""
        return self.family.directory / self.profile.directory / self.name

    @property
    def objects(self) -> Path:
        """Where its object files lie."""
        return CACHE / "objects" / self.profile.name / self.family.title

    @property
    def library(self) -> Path:
        """The linked extension, before it is published."""
        return self.objects / f"{self.family.python_name}.abi3.so"

    @cached_property
    def id(self) -> str:
        """Names the extension module and the operators' namespace: another source or flag, another id.

        `kernels` keeps loaded modules by this name and PyTorch operators by this namespace, so two versions of a
        kernel can live in one process only if it differs.
        """
        family = self.family
        digest = hashlib.sha256(repr((self.profile, CXX_FLAGS, LINK_FLAGS)).encode())
        listed = {source for part in family.components_of(self.profile.backend) for source in part.sources}
        files = {family.directory / source for source in listed} | set(family.package_files)
        files |= {family.directory / "build.toml", COMPATIBILITY, EXPORTS, *INCLUDE.iterdir()}
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
        return f"_{family.python_name}_{self.profile.backend}_{digest.hexdigest()[:7]}"

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
        backend = self.profile.backend
        digest = rust().Digest.hash_variant(rust().DigestAlgorithm.SHA256, directory)
        metadata = {
            "id": self.id,
            "name": self.family.name,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [*general.get("python-depends", ()), *general.get(backend, {}).get("python-depends", ())],
            "backend": {"type": backend},
            "digest": {"algorithm": str(digest.algorithm), "files": digest.files},
        }
        path = directory / "metadata.json"
        path.write_text(json.dumps(metadata, indent=2) + "\n")
        try:
            rust().Metadata.read_from_file(path)
        except ValueError as error:
            raise Failure(f"the metadata written for {self.family.title} is not valid: {error}") from None

    def _stale(self) -> list[Path]:
        same_backend = re.compile(rf"torch.*-{self.profile.backend}(-.*)?")
        directory = self.directory.parent
        return [path for path in directory.iterdir() if same_backend.fullmatch(path.name) and path != self.directory]
