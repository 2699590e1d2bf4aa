"""Runs Python code in a process of its own, in which other processes, the network and most files are out of reach.

The guard sees what Python does. What the kernels' own library could do by itself, `test_abi.py` sees by its symbols.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.families import load

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted(path.parent for path in ROOT.glob("*/build.toml"))

by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)

# One call of each family, as an expression that is true.
ONE_CALL = {
    "attention": "(kernel.attention(*(torch.ones(1, 2, 4, 40) for _ in range(3))) == 1).all()",
    "moe": "(kernel.route(torch.zeros(2, 8), kernel.RoutingOptions(4)).weights == 0.125).all()",
    "normalization": "(kernel.rms_norm(torch.full((2, 40), 3.0), torch.ones(40), 1e-30) == 1).all()",
}

# Ends the process at once, since an exception could be caught on its way: by the code that tries the network, say.
GUARD = """
import os, sys

NETWORK = ("connect", "sendto", "sendmsg", "getaddrinfo", "getnameinfo", "gethostbyname", "gethostbyaddr")
HUB, WRITABLE = os.environ["TEST_HUB"], os.path.realpath(os.environ["TEST_WRITABLE"])

def guard(event, arguments, network=NETWORK, writable=WRITABLE, hub=HUB, os=os):
    if event.startswith("socket.") and event.split(".")[1] in network:
        place = arguments[1] if event == "socket.connect" else arguments[:2]
        if not hub or ":".join(map(str, place)) != hub:
            end(f"network: {event} {arguments[1:]}")
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"):
        # Not the environment, which may hold secrets.
        end(f"process: {event} {arguments[:2]}")
    if event == "open":
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        # The event does not tell the open directory to which it may be relative.
        if not isinstance(path, int) and not os.path.isabs(path):
            end(f"write: {event} {path}")
        paths = [path]
    elif event == "sqlite3.connect":
        paths = arguments
    elif event in ("os.link", "os.symlink"):
        paths = arguments[1:2]
    elif event.split(".")[-1] in ("mkdir", "rename", "remove", "rmdir", "truncate", "chmod"):
        paths = [argument for argument in arguments[:2] if isinstance(argument, (str, bytes, os.PathLike))]
    else:
        return
    # The last argument of most, and -1 unless the path is relative to an open directory.
    directory = arguments[-1] if event not in ("open", "os.truncate", "sqlite3.connect") else -1
    base = os.getcwd() if directory < 0 else os.readlink(f"/proc/self/fd/{directory}")
    for path in paths:
        if isinstance(path, int):
            continue
        path = os.path.realpath(os.path.join(base, os.fsdecode(path)))
        if path != os.devnull and os.path.commonpath([path, writable]) != writable:
            end(f"write: {event} {path}")

def end(reason, os=os):
    os.write(2, f"guard: {reason}\\n".encode())
    os._exit(99)

sys.addaudithook(guard)
"""

IMPORTS = """
import torch, kernels
from pathlib import Path
"""


def clean_environment(directory: Path, **variables: str) -> dict[str, str]:
    """The environment of a user without network and with a home that must stay as it is."""
    home = directory / "home"
    writable = directory / "writable"
    for path in (home, writable):
        path.mkdir(exist_ok=True)
    home.chmod(0o555)
    ours = ("RUDNN_", "LOCAL_KERNELS", "KERNELS_", "HF_", "HUGGINGFACE_", "XDG_", "LD_PRELOAD")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return inherited | {
        "HOME": str(home),
        "TMPDIR": str(writable),
        "TEST_WRITABLE": str(writable),
        # The one address that may be reached, as host:port.
        "TEST_HUB": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "127.0.0.1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        **variables,
    }


def run_guarded(directory: Path, code: str, **variables: str) -> str:
    """What the code prints, run behind the guard; fails if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD + code],
        cwd=directory,
        env=clean_environment(directory, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(directory: Path, code: str, **variables: str) -> str:
    """As `run_guarded`, with `torch`, `kernels` and `Path` imported."""
    return run_guarded(directory, IMPORTS + code, **variables)


def hub_name(family: Path) -> str:
    return load(family).repository


def local_kernels(*families: Path) -> str:
    """The value of LOCAL_KERNELS for these families."""
    return ":".join(f"{hub_name(family)}={family}" for family in families)


def variant_of(family: Path) -> Path:
    """The family's one CPU variant."""
    (variant,) = family.glob("build/torch*-cpu-*")
    return variant


def get_kernel(family: Path) -> str:
    """The line of code that loads a family as a user does."""
    return f"kernel = kernels.get_kernel({hub_name(family)!r}, version=1, trust_remote_code=True)\n"


def check_call(family: Path) -> str:
    """The line of code that calls the loaded `kernel`."""
    return f"assert {ONE_CALL[family.name]}\n"
