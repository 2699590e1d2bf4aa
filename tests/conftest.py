"""A small checkout of its own for each test: the real tools, the real environment, and one toy family."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

BUILD_TOML = """\
[general]
name = "rudnn-toy"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]

[general.hub]
repo-id = "rudnn/rudnn-toy"

[torch]
src = ["torch-ext/torch_binding.cpp"]
include = ["."]

[torch.stable-abi]
cpu = "2.11"

[kernel.toy_cpu]
backend = "cpu"
depends = ["torch"]
include = ["."]
src = ["common/add.h", "common/types.h", "cpu/add.cpp"]
"""

BINDING = """\
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>

#include "common/add.h"
#include "registration.h"

using torch::stable::Tensor;

Tensor add_one(Tensor input) {
  if (input.dim() == 0) {
    std::stringstream message;
    message << "add_one: got rank " << input.dim();
    throw std::runtime_error(message.str());
  }
  Tensor output = torch::stable::empty_like(input);
  add_one_to_all(static_cast<const float*>(input.data_ptr()), static_cast<float*>(output.data_ptr()), input.numel());
  return output;
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("add_one(Tensor input) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("add_one", TORCH_BOX(&add_one)); }
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

FILES = {
    "common/conftest.py": '"""Shared."""\n',
    "common/flake.lock": "{}\n",
    "common/flake.nix": "{ }\n",
    "common/python/checks.py": '"""Shared."""\n',
    "common/add.h": '#pragma once\n#include "common/types.h"\n'
    "void add_one_to_all(const float* input, float* output, Index n);\n",
    "common/types.h": "#pragma once\nusing Index = long;\n",
    "toy/build.toml": BUILD_TOML,
    "toy/cpu/add.cpp": '#include "common/add.h"\n'
    "void add_one_to_all(const float* input, float* output, Index n) {\n"
    "  for (Index i = 0; i < n; ++i) output[i] = input[i] + 1;\n"
    "}\n",
    "toy/torch-ext/torch_binding.cpp": BINDING,
    "toy/torch-ext/rudnn_toy/__init__.py": "from ._ops import add_op_namespace_prefix, ops\n\nadd_one = ops.add_one\n",
}


@dataclass(frozen=True)
class Checkout:
    """A copy of the repository that a test may spoil."""

    root: Path

    @property
    def family(self) -> Path:
        return self.root / "toy"

    def dev(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs ./dev as a user would, with variables added to the environment."""
        inherited = {key: value for key, value in os.environ.items() if key not in ("LOCAL_KERNELS", "RUDNN_CPU_ISA")}
        command = [str(self.root / "dev"), *arguments]
        return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=300)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text
        (self.root / path).write_text(text.replace(old, new))

    @contextlib.contextmanager
    def edited(self, path: str, old: str, new: str) -> Iterator[None]:
        """Edits a file, and at the end takes it back."""
        before = (self.root / path).read_text()
        try:
            self.edit(path, old, new)
            yield
        finally:
            (self.root / path).write_text(before)

    @contextlib.contextmanager
    def appended(self, addition: str, *paths: str) -> Iterator[None]:
        """Adds text to the end of files, and at the end takes it away again."""
        before = {self.root / path: (self.root / path).read_text() for path in paths}
        try:
            for path, text in before.items():
                path.write_text(text + addition)
            yield
        finally:
            for path, text in before.items():
                path.write_text(text)


def make_checkout(root: Path, files: Mapping[str, str] = FILES) -> Checkout:
    for path in (ROOT / "dev", *ROOT.glob("requirements*.txt")):
        shutil.copy2(path, root / path.name)
    for tools in ("devtools", "simt"):
        shutil.copytree(ROOT / tools, root / tools, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (root / ".venv").symlink_to(ROOT / ".venv")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Checkout(root)


def copied(original: Checkout, root: Path) -> Checkout:
    shutil.copytree(original.root, root, symlinks=True, dirs_exist_ok=True)
    return Checkout(root)


@pytest.fixture(scope="session")
def vendored(tmp_path_factory) -> Checkout:
    """The checkout that the others are copies of; nobody changes it."""
    fresh = make_checkout(tmp_path_factory.mktemp("vendored"))
    assert fresh.dev("vendor").returncode == 0
    return fresh


@pytest.fixture
def checkout(vendored, tmp_path) -> Checkout:
    """A checkout whose copies of common/ are current, and in which nothing was built."""
    return copied(vendored, tmp_path)


@pytest.fixture(scope="session")
def built(vendored, tmp_path_factory) -> Checkout:
    """A checkout in which the toy family was built; tests must leave it as they found it."""
    fresh = copied(vendored, tmp_path_factory.mktemp("built"))
    done = fresh.dev("build")
    assert done.returncode == 0, done.stdout + done.stderr
    return fresh


def assert_fails(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command failed with one line on stderr that holds all parts."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("dev: error: "), done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in lines[-1]
