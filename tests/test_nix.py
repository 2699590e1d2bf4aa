"""The check of the flakes accepts the project's and finds what was broken in a copy of them."""

import shutil

import pytest

from devtools import nix
from devtools.families import discover
from devtools.project import ROOT

pytestmark = pytest.mark.skipif(not nix.available(), reason="Nix was not found")

# name: (file, its text, what replaces it, part of a message)
BROKEN = {
    "syntax": ("flake.nix", "inherit all;", "inherit all", "syntax error"),
    "syntax_of_a_copy": ("common/flake.nix", "inherit self;", "inherit self", "syntax error"),
    "family_left_out": (
        "flake.nix",
        'type == "directory" &&',
        'name != "normalization" &&',
        "flake.nix: packages.aarch64-darwin lacks normalization",
    ),
    "family_left_out_of_a_system": (
        "flake.nix",
        "isFamily (builtins.readDir ./.)",
        'isFamily { normalization = "file"; }',
        "packages.x86_64-linux.all is [], not [",
    ),
    "more_than_the_families": (
        "flake.nix",
        '+ "/${name}/build.toml")',
        '+ "/${name}/flake.nix")',
        "flake.nix: packages: ",
    ),
    "wrong_directory": ("flake.nix", 'path = ./. + "/${name}"', "path = ./.", "flake.nix: packages: "),
    "unknown_package_of_the_builder": (
        "flake.nix",
        "system}.bundle)",
        "system}.bundles)",
        "attribute 'bundles' missing",
    ),
    "another_package_of_the_builder": (
        "flake.nix",
        "system}.ci)",
        "system}.bundle)",
        "checks.x86_64-linux.normalization is rudnn-normalization-bundle-x86_64-linux, not",
    ),
    "unknown_argument_of_the_builder": ("flake.nix", "inherit self;", "inherit self; rev = 1;", "argument 'rev'"),
    "no_all": ("flake.nix", "inherit all;", "", "flake.nix: packages.aarch64-linux lacks all"),
    "no_checks": ("flake.nix", "checks = ", "tests = ", "does not provide attribute"),
    "unknown_system": ("flake.nix", '"aarch64-linux"', '"riscv64-linux"', "attribute 'riscv64-linux' missing"),
    "copy_of_another_directory": (
        "normalization/flake.nix",
        "path = ./.",
        "path = ../.",
        "normalization/flake.nix: packages",
    ),
    "rev_of_flake": ("flake.nix", "kernels/8ac69fc5", "kernels/8ac69fc6", "flake.lock is not a lock of the flake.nix"),
    "rev_of_copied_flake": (
        "common/flake.nix",
        "kernels/8ac69fc5",
        "kernels/8ac69fc6",
        "common/flake.lock is not a lock",
    ),
    "rev_in_lock": (
        "flake.lock",
        '"rev": "8ac69fc5',
        '"rev": "8ac69fc6',
        "flake.lock has revision 8ac69fc642a4306eade0759ef7c45b4f2ae57df0 of kernel-builder",
    ),
    "rev_of_a_nested_input": ("flake.lock", '"rev": "11707dc2', '"rev": "11707dc3', "differs from common/flake.lock"),
    "hash": ("flake.lock", "sha256-h7n5", "sha256-h7n6", "flake.lock differs from common/flake.lock"),
    "hash_that_is_none": ("common/flake.lock", "sha256-h7n5", "sha256-", "common/flake.lock is not a lock"),
    "input_not_locked": ("flake.lock", '"systems": "systems"', "", "flake.lock is not as Nix would write it"),
    "input_unknown_to_the_lock": (
        "flake.lock",
        '"nixpkgs": "nixpkgs"',
        '"nixpkgs": "packages"',
        "flake.lock is not a lock",
    ),
    "format_of_the_lock": (
        "flake.lock",
        '  "version": 7',
        '  "version":  7',
        "flake.lock is not as Nix would write it",
    ),
}


@pytest.fixture
def flakes(tmp_path):
    """A copy of the flakes that a test may spoil."""
    return nix.stage(ROOT, ["", "common", *(family.title for family in discover())], tmp_path)


def test_flakes_are_accepted(flakes):
    assert nix.findings(flakes) == []


@pytest.mark.parametrize("name", BROKEN)
def test_broken_flake_is_found(flakes, name):
    path, old, new, message = BROKEN[name]
    text = (flakes / path).read_text()
    assert old in text
    (flakes / path).write_text(text.replace(old, new, 1))
    found = nix.findings(flakes)
    assert any(message in line for line in found), found


@pytest.mark.parametrize("path", ["flake.nix", "flake.lock", "common/flake.lock", "normalization/flake.nix"])
def test_missing_file_is_found(flakes, path):
    (flakes / path).unlink()
    assert nix.findings(flakes) == [f"{path} does not exist"]


def test_new_family_needs_no_edit(flakes):
    """The flake at the top finds a family by its build.toml."""
    shutil.copytree(flakes / "normalization", flakes / "new-family")
    text = (flakes / "new-family/build.toml").read_text()
    (flakes / "new-family/build.toml").write_text(text.replace("rudnn-normalization", "rudnn-new-family"))
    assert nix.findings(flakes) == []
