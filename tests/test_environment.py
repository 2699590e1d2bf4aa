import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Checkout, assert_fails, make_checkout

from devtools import cuda_toolkit, environment, main
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


def test_a_link_in_place_of_the_environment_is_left_alone(monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").touch()
    link = tmp_path / ".venv"
    link.symlink_to("other")
    monkeypatch.setattr(environment, "VENV", link)
    with pytest.raises(Failure, match="is a link to an environment with other packages"):
        environment._install()
    assert (tmp_path / "other" / "kept").exists()


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


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """An environment that lacks nothing but a CUDA compiler, on a machine without one."""
    monkeypatch.setattr(environment, "_STAMP", tmp_path / "stamp")
    monkeypatch.setattr(environment, "_CUDA_STAMP", tmp_path / "cuda_stamp")
    (tmp_path / "stamp").write_text(environment.requirements_digest())
    monkeypatch.setattr(environment.cuda_toolkit, "cuda_home", lambda: None)
    installed, started = [], []
    monkeypatch.setattr(environment, "install", installed.append)
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    return installed, started


def test_the_cuda_compiler_is_installed_once_and_only_where_it_is_needed(complete):
    installed, started = complete
    environment.ensure(["demo"])
    assert installed == []
    for _ in range(2):
        environment.ensure(["build", "--backend", "cuda"], cuda=True)
    (command,) = installed
    assert command[-3:] == ["--no-deps", "-r", str(environment.ROOT / environment.CUDA_REQUIREMENTS)]
    assert len(started) == 1, "the command starts again after an installation, and not without one"


@pytest.mark.parametrize(("place", "packages"), [("toolkit", 0), ("venv/nvidia/cu13", 1)], ids=["machine", "packages"])
def test_a_toolkit_of_the_machine_is_enough(complete, monkeypatch, tmp_path, place, packages):
    """What lies in the virtual environment may be a part of one, brought along by a CUDA build of PyTorch."""
    home = tmp_path / place
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").write_text("")
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(environment.cuda_toolkit, "cuda_home", lambda: home)
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    environment.ensure(["build", "--backend", "cuda"], cuda=True)
    assert len(complete[0]) == packages


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (["build"], False),
        (["build", "--backend", "cuda"], True),
        (["build", "--backend", "simt-cuda"], True),
        (["build", "--backend", "simt-metal"], False),
        (["test"], platform.machine() == "x86_64"),
        (["test", "--device", "cpu"], False),
        (["demo"], False),
        (["vendor"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_which_commands_need_a_cuda_compiler(command, needed):
    assert main.needs_cuda(main.parser().parse_args(command)) == needed


@pytest.mark.parametrize(
    ("version", "found"),
    [("13000", (13, 0)), ("13020", (13, 2)), ("12080", (0, 0)), (None, (0, 0))],
    ids=["13.0", "13.2", "too_old", "no_headers"],
)
def test_cuda_is_found_by_its_headers(monkeypatch, tmp_path, version, found):
    (tmp_path / "include").mkdir()
    if version:
        (tmp_path / "include/cuda_fp16.h").write_text("")
        (tmp_path / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    monkeypatch.setattr(cuda_toolkit, "_candidates", lambda: [tmp_path])
    assert cuda_toolkit.cuda_version() == found


OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def bare(root: Path) -> Checkout:
    """A checkout without an environment, whose requirements are empty."""
    fresh = make_checkout(root)
    (root / ".venv").unlink()
    for path in root.glob("requirements*.txt"):
        path.write_text("")
    return fresh
