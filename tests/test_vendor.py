import pytest


def test_fresh_copies_pass(checkout):
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 0
    assert (checkout.family / "common/add.h").read_bytes() == (checkout.root / "common/add.h").read_bytes()
    assert (checkout.family / "torch-ext/rudnn_toy/_checks.py").is_file()
    assert (checkout.family / "tests/conftest.py").is_file()
    assert (checkout.family / "flake.lock").is_file()


@pytest.mark.parametrize(
    "copy", ["common/add.h", "torch-ext/rudnn_toy/_checks.py", "tests/conftest.py", "flake.nix", "flake.lock"]
)
def test_check_reports_a_changed_copy(checkout, copy):
    with (checkout.family / copy).open("a") as file:
        file.write("\n")
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 1
    assert f"toy/{copy} differs from common/" in done.stdout


def test_check_reports_a_missing_copy_and_changes_nothing(checkout):
    (checkout.family / "common/add.h").unlink()
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 1
    assert "toy/common/add.h is missing, a copy of common/add.h" in done.stdout
    assert not (checkout.family / "common/add.h").exists()


def test_unlisted_copy_is_reported_then_removed(checkout):
    left_over = checkout.family / "common/old.h"
    left_over.write_text("")
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 1
    assert "toy/common/old.h is not listed in build.toml any more" in done.stdout
    assert checkout.dev("vendor").returncode == 0
    assert not left_over.exists()


def test_missing_original_is_reported(checkout):
    checkout.edit("toy/build.toml", '"common/types.h"', '"common/types.h", "common/none.h"')
    done = checkout.dev("vendor")
    assert done.returncode == 1
    assert "common/none.h does not exist" in done.stdout


def test_check_reports_an_unlisted_include(checkout):
    (checkout.root / "common/more.h").write_text("")
    checkout.edit("toy/cpu/add.cpp", '#include "common/add.h"', '#include "common/add.h"\n#include "common/more.h"')
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 1
    assert 'toy/cpu/add.cpp includes "common/more.h", which build.toml does not list' in done.stdout


def test_check_reports_an_include_reached_through_a_header(checkout):
    checkout.edit("toy/build.toml", ', "common/types.h"', "")
    assert checkout.dev("vendor").returncode == 1
    done = checkout.dev("vendor", "--check")
    assert done.returncode == 1
    assert 'toy/common/add.h includes "common/types.h", which build.toml does not list' in done.stdout


def test_build_refuses_drift_with_a_hint(checkout):
    (checkout.family / "common/add.h").write_text("")
    done = checkout.dev("build")
    assert done.returncode == 1
    assert "toy/common/add.h differs from common/add.h" in done.stderr
    assert "run ./dev vendor" in done.stderr


def test_unknown_family_lists_the_known_ones(checkout):
    done = checkout.dev("vendor", "none")
    assert done.returncode == 1
    assert "there is no family none; the families are: toy" in done.stderr
