"""Every way in which users load a kernel, each in a fresh process without network."""

import hashlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import (
    FAMILIES,
    ONE_CALL,
    by_family,
    check_call,
    clean_environment,
    get_kernel,
    hub_name,
    local_kernels,
    run_guarded,
    run_python,
    variant_of,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_hub_cache(cache: Path, family: Path) -> None:
    """Lays the family's variant out as a download from the Hub does: named blobs, a snapshot of links, a branch."""
    variant = variant_of(family)
    repository = cache / f"kernels--{hub_name(family).replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT / "build" / variant.name
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    for source in variant.rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            blob = blobs / hashlib.sha256(source.read_bytes()).hexdigest()
            shutil.copyfile(source, blob)
            link = snapshot / source.relative_to(variant)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    ref = repository / "refs" / "v1"
    ref.parent.mkdir()
    ref.write_text(COMMIT)


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "network"),
        ("import socket; socket.socket(type=socket.SOCK_DGRAM).sendmsg([b'x'], [], 0, ('127.0.0.1', 9))", "network"),
        ("open(os.path.expanduser('~/file'), 'w')", "write"),
        ("os.mkdir('directory')", "write"),
        ("os.mkdir('directory', dir_fd=os.open('.', os.O_RDONLY))", "write"),
        ("os.symlink(os.environ['TEST_WRITABLE'], 'link')", "write"),
        ("os.chdir(os.environ['TEST_WRITABLE']); os.open('file', os.O_CREAT | os.O_WRONLY, dir_fd=3)", "write"),
        ("import sqlite3; sqlite3.connect('file')", "write"),
        ("import threading; threading.Thread(target=open, args=('/file', 'w')).start()", "write"),
        ("import subprocess; subprocess.run(['true'])", "process"),
        ("os.system('true')", "process"),
        ("os.execv('/bin/true', ['true'])", "process"),
        ("os.posix_spawn('/bin/true', ['true'], os.environ)", "process"),
        ("os.fork()", "process"),
    ],
    ids=[
        "connection",
        "message",
        "file",
        "directory",
        "directory_in_directory",
        "link",
        "file_in_directory",
        "database",
        "file_of_a_thread",
        "command",
        "shell",
        "exec",
        "spawn",
        "fork",
    ],
)
def test_the_guard_ends_the_process(tmp_path, code, reason):
    with pytest.raises(AssertionError, match=f"exit status 99\\s+guard: {reason}"):
        run_guarded(tmp_path, code, TEST_HUB="127.0.0.1:8")


def test_the_guard_lets_pass_what_may_be(tmp_path):
    """A connection to the Hub, and files where the process may write."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        code = (
            f"import socket; socket.create_connection({place!r}).close()\n"
            "os.chdir(os.environ['TEST_WRITABLE'])\n"
            "os.mkdir('directory', dir_fd=os.open('.', os.O_RDONLY))\n"
            "os.symlink('/target', 'link')\n"
        )
        run_guarded(tmp_path, code, TEST_HUB=f"{place[0]}:{place[1]}")
    assert (tmp_path / "writable" / "directory").is_dir()


def test_every_family_has_a_call_here():
    assert {family.name for family in FAMILIES} == set(ONE_CALL)


def test_local_kernels_all_families_in_one_process(tmp_path):
    code = ""
    for family in FAMILIES:
        code += f"assert kernels.has_kernel({hub_name(family)!r}, version=1, trust_remote_code=True)\n"
        code += get_kernel(family) + check_call(family)
    code += f"assert len(kernels.get_loaded_kernels()) == {len(FAMILIES)}\n"
    run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(*FAMILIES))


@by_family
@pytest.mark.parametrize("place", ["family", "build", "variant"])
def test_l1_get_local_kernel(tmp_path, family, place):
    """huggingface/kernels#553, #580: asked the network, or wrote, although all was there."""
    path = {"family": family, "build": family / "build", "variant": variant_of(family)}[place]
    run_python(tmp_path, f"kernel = kernels.get_local_kernel(Path({str(path)!r}))\n{check_call(family)}")
    assert list((tmp_path / "home").iterdir()) == []


@by_family
def test_digest_and_metadata(family):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = variant_of(family)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert str(metadata.name) == f"rudnn-{family.name}"
    assert metadata.version == 1
    assert metadata.id.startswith(f"_{metadata.name.python_name}_cpu_")


@by_family
@pytest.mark.parametrize("variable", ["KERNELS_CACHE", "HF_HUB_CACHE", "HF_HOME"])
def test_hub_cache(tmp_path, family, variable):
    """A kernel that was downloaded before, with no LOCAL_KERNELS."""
    cache = tmp_path / "cache"
    make_hub_cache(cache / "hub" if variable == "HF_HOME" else cache, family)
    run_python(tmp_path, get_kernel(family) + check_call(family), **{variable: str(cache)})


@by_family
def test_layers_from_the_hub_cache(tmp_path, family):
    """LayerRepository with a version looks for the branch, which only a cache has offline."""
    if not (variant_of(family) / "layers.py").is_file():
        pytest.skip(f"{family.name} has no layers")
    make_hub_cache(tmp_path / "cache", family)
    code = get_kernel(family) + (
        "layers = [name for name, member in vars(kernel.layers).items()"
        " if isinstance(member, type) and member.__module__ == kernel.layers.__name__]\n"
        "assert layers\n"
        "for name in layers:\n"
        f"    repository = kernels.LayerRepository({hub_name(family)!r}, layer_name=name, version=1,"
        " trust_remote_code=True)\n"
        "    assert repository.load() is getattr(kernel.layers, name)\n"
    )
    run_python(tmp_path, code, KERNELS_CACHE=str(tmp_path / "cache"))


@by_family
def test_without_a_build_the_error_says_so(tmp_path, family):
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        "try:\n"
        f"    kernels.get_kernel({hub_name(family)!r}, version=1, trust_remote_code=True)\n"
        "except FileNotFoundError as error:\n"
        "    print(error)\n"
    )
    assert str(empty) in run_python(tmp_path, code, LOCAL_KERNELS=f"{hub_name(family)}={empty}")


@by_family
def test_kernels_info(tmp_path, family):
    done = subprocess.run(
        [Path(sys.executable).with_name("kernels"), "info", str(family), "--json"],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert (info["name"], info["version"]) == (f"rudnn-{family.name}", 1)
    assert "cpu" in info["backends"]
    assert info["license"] == "Apache-2.0"


@by_family
def test_l2_one_build_from_two_paths(tmp_path, family):
    """huggingface/kernel-builder#11: the second registration of a namespace ended the process."""
    code = ""
    for name in ("first", "second"):
        copy = tmp_path / name
        shutil.copytree(variant_of(family), copy / variant_of(family).name)
        code += f"kernel = kernels.get_local_kernel(Path({str(copy)!r}))\n{check_call(family)}"
    run_python(tmp_path, code)


@by_family
def test_modules_belong_to_their_id(tmp_path, family):
    """Nothing is registered under a name that another build would use too."""
    code = get_kernel(family) + (
        "import sys\n"
        "id = kernels.get_loaded_kernels()[0].metadata.id\n"
        "assert kernel.__name__ == id and kernel._ops.ops.name == id\n"
        f"assert 'rudnn_{family.name.replace('-', '_')}' not in sys.modules\n"
    )
    run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(family))
