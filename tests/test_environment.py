import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Checkout, assert_fails, make_checkout

from devtools import environment
from devtools.errors import Failure


def tools(directory: Path, *names: str, **scripts: str) -> str:
    """Returns a PATH on which there are only the named tools and the given scripts."""
    directory.mkdir()
    (directory / "python3").symlink_to(Path(sys.executable).resolve())
    for name in ("env", "bash", *names):
        (directory / name).symlink_to(shutil.which(name) or name)
    for name, text in scripts.items():
        script = directory / name.replace("gxx", "g++")
        script.write_text(f"#!/usr/bin/env bash\n{text}\n")
        script.chmod(0o755)
    return str(directory)


def test_missing_compiler(checkout, tmp_path):
    assert_fails(checkout.dev("build", PATH=tools(tmp_path / "bin", "git")), "g++ was not found", "apt-get install g++")


def test_missing_git(checkout, tmp_path):
    assert_fails(checkout.dev("build", PATH=tools(tmp_path / "bin", "g++")), "git was not found")


def test_old_compiler(checkout, tmp_path):
    path = tools(tmp_path / "bin", "git", gxx="echo 9.4.0")
    assert_fails(checkout.dev("build", PATH=path), "g++ 9.4.0 is too old: version 11 or newer is needed")


def test_compiler_without_a_version(checkout, tmp_path):
    path = tools(tmp_path / "bin", "git", gxx="echo broken installation >&2; exit 1")
    assert_fails(checkout.dev("build", PATH=path), "does not tell its version: broken installation")


def test_compiler_that_cannot_compile(checkout, tmp_path):
    script = 'case "$*" in *version*) echo 12.2.0;; *) echo "error: cannot find cc1plus" >&2; exit 1;; esac'
    path = tools(tmp_path / "bin", "git", gxx=script)
    assert_fails(checkout.dev("build", PATH=path), "cannot compile a C++17 probe", "cannot find cc1plus")


def test_vendor_needs_no_tools(checkout, tmp_path):
    assert checkout.dev("vendor", "--check", PATH=tools(tmp_path / "bin")).returncode == 0


def test_full_disk_before_a_build(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(Failure, match=r"a build needs at least 0\.5 GB of disk space, 0\.0 GB are free"):
        environment.check_space(environment.BUILD_SPACE, "a build")


def test_full_disk_during_installation():
    error = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    with pytest.raises(Failure, match="the disk is full"):
        environment.install([sys.executable, "-c", f"import sys; sys.exit({error!r})"])


def test_failed_download(tmp_path):
    fresh = bare(tmp_path)
    (fresh.root / "requirements.txt").write_text("rudnn-does-not-exist==1\n")
    done = fresh.dev("demo", "none", **OFFLINE)
    assert_fails(done, "the pinned packages could not be installed", "No matching distribution", "check the network")
    # What it left must not pass for an environment, even if nothing is wrong any more.
    (fresh.root / "requirements.txt").write_text("")
    assert "making" in fresh.dev("demo", "none", **OFFLINE).stdout


def test_environment_is_made_once_and_repaired(tmp_path):
    fresh = bare(tmp_path)
    command = [str(fresh.root / "dev"), "demo", "none"]
    both = [
        subprocess.Popen(command, env=os.environ | OFFLINE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    assert sum("making" in output for output, _ in outputs) == 1
    assert all("there is no demo none" in errors for _, errors in outputs)

    again = fresh.dev("demo", "none", **OFFLINE)
    assert again.stdout == ""
    assert_fails(again, "there is no demo none")

    (fresh.root / ".venv/bin/python").unlink()
    assert "making" in fresh.dev("demo", "none", **OFFLINE).stdout

    for name in ("requirements.txt", environment.CONSTRAINTS):
        (fresh.root / name).write_text("# changed\n")
        changed = fresh.dev("demo", "none", **OFFLINE)
        assert "installing requirements.txt" in changed.stdout
        assert "making" not in changed.stdout
    assert fresh.dev("demo", "none", **OFFLINE).stdout == ""


OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def bare(root: Path) -> Checkout:
    """A checkout without an environment, whose requirements are empty."""
    fresh = make_checkout(root)
    (root / ".venv").unlink()
    for path in root.glob("requirements*.txt"):
        path.write_text("")
    return fresh
