"""`get_kernel` from a Hub on this machine, as a user would: nothing is local at first, and LOCAL_KERNELS is not set."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_process import (
    FAMILIES,
    ROOT,
    by_family,
    check_call,
    get_kernel,
    hub_name,
    run_python,
    variant_of,
)
from kernels.verify import VerificationResult, verify_variant
from local_hub import Hub, Request, Server, serving

# Variants for other systems than this one, which no run here may load.
FOREIGN = (
    "torch-stable-abi211-cu130-x86_64-linux",
    "torch-stable-abi211-cpu-aarch64-darwin",
    "torch-stable-abi299-cpu-x86_64-linux",
    "torch29-cxx11-cpu-x86_64-linux",
    "torch211-metal-aarch64-darwin",
)

FAMILY = ROOT / "normalization"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> list[Path]:
    """Small variants that end the process where they are loaded."""
    variants = []
    for name in FOREIGN:
        variants.append(tmp_path_factory.mktemp("foreign", numbered=True) / name)
        variants[-1].mkdir()
        (variants[-1] / "__init__.py").write_text("import os\nos._exit(98)\n")
        metadata = json.loads((variant_of(FAMILY) / "metadata.json").read_text())
        (variants[-1] / "metadata.json").write_text(json.dumps(metadata | {"id": f"_{name.replace('-', '_')}"}))
    return variants


def hub_of(family: Path, *others: Path) -> Hub:
    """A repository whose branch v1 holds a family's CPU build, among other variants."""
    hub = Hub(hub_name(family))
    for variant in (*others, variant_of(family)):
        hub.add_variant("v1", variant)
    return hub


@pytest.fixture
def hub(foreign) -> Hub:
    return hub_of(FAMILY, *foreign)


@pytest.fixture
def server(hub) -> Iterator[Server]:
    with serving(hub) as server:
        yield server


def cache_of(directory: Path) -> Path:
    """Where `run_online` in this directory finds what was downloaded."""
    return directory / "writable" / "cache"


def run_online(directory: Path, server: Server, code: str, **variables: str) -> str:
    """As `run_python`, for a user whose Hub is this one."""
    online = {
        "HF_ENDPOINT": server.endpoint,
        "TEST_HUB": server.endpoint.removeprefix("http://"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(cache_of(directory)),
    }
    return run_python(directory, code, **online | variables)


def without_writing(directory: Path) -> dict[str, str]:
    """A variable with which the guard lets a process write nowhere but in an empty directory."""
    empty = directory / "empty"
    empty.mkdir(exist_ok=True)
    return {"TEST_WRITABLE": str(empty)}


def as_local(cache: Path, *hubs: Hub) -> dict[str, str]:
    """A variable that makes `get_kernel` take what is in the cache for local builds."""
    places = []
    for hub in hubs:
        (snapshot,) = cache.glob(f"hub/kernels--{hub.repository.replace('/', '--')}/snapshots/*")
        places.append(f"{hub.repository}={snapshot}")
    return {"LOCAL_KERNELS": ":".join(places)}


def files_in(cache: Path) -> set[Path]:
    return {path for path in cache.rglob("*") if path.is_file()}


def failing(code: str) -> str:
    """The code, which must raise; what it raises is printed."""
    return (
        "try:\n"
        f"    {code}"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "else:\n"
        "    raise AssertionError('this must fail')\n"
    )


LOAD = get_kernel(FAMILY) + check_call(FAMILY)


CALL_ALL = "".join(get_kernel(family) + check_call(family) for family in FAMILIES)


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory, foreign) -> Iterator[tuple[Path, Server]]:
    """Where every family has been downloaded, by one process, and the server of them all."""
    directory = tmp_path_factory.mktemp("downloaded")
    code = "".join(f"{get_kernel(family)}{check_call(family)}print(kernel.__file__)\n" for family in FAMILIES)
    with serving(*(hub_of(family, *foreign) for family in FAMILIES)) as server:
        places = [Path(line).parent.name for line in run_online(directory, server, code).split()]
        assert places == [variant_of(family).name for family in FAMILIES]
        yield directory, server


def test_the_right_variants_are_downloaded_once_and_kept(downloaded):
    """One process downloads one variant of each kernel and nothing else; a later one asks for versions and variants."""
    directory, server = downloaded
    resolved, expected = [request for request in server.requests if "/resolve/" in request], []
    for hub, family in zip(server.hubs, FAMILIES, strict=True):
        ours = [path for path in hub.branches["v1"] if variant_of(family).name in path]
        place = f"/kernels/{hub.repository}/resolve/{hub.commit('v1')}"
        expected += [f"{method} {place}/{path}" for path in ours for method in ("HEAD", "GET")]
        assert hub.sent == sum(len(hub.branches["v1"][path].content) for path in ours)
    assert sorted(resolved) == sorted(expected)

    server.requests.clear()
    before = files_in(cache_of(directory))
    run_online(directory, server, CALL_ALL, **without_writing(directory))
    assert server.requests == [
        f"GET /api/kernels/{hub.repository}/{question}"
        for hub in server.hubs
        for question in ("refs", f"tree/{hub.commit('v1')}/build?recursive=false&expand=false")
    ]
    assert files_in(cache_of(directory)) == before


def test_importing_and_calling_opens_no_connection_and_writes_no_file(downloaded):
    """After the download; the guard ends the process at the first attempt."""
    directory, server = downloaded
    variables = as_local(cache_of(directory), *server.hubs) | without_writing(directory)
    run_python(directory, CALL_ALL, **variables)


def test_layers_by_version(tmp_path, server):
    """For which `kernelize` asks the Hub."""
    code = (
        f"repository = kernels.LayerRepository({hub_name(FAMILY)!r}, layer_name='RMSNorm', version=1,"
        " trust_remote_code=True)\n"
        "print(repository.load().__name__)\n"
    )
    assert run_online(tmp_path, server, code) == "RMSNorm\n"


def test_offline_after_a_download(tmp_path, hub, server):
    """`kernels` then looks for the version's branch, or for the files of every variant, and tells what is missing.

    What was downloaded can be used as a local build.
    """
    by_revision = LOAD.replace("version=1", f"revision={hub.commit('v1')!r}")
    run_online(tmp_path, server, by_revision)
    local = as_local(cache_of(tmp_path), hub)["LOCAL_KERNELS"]
    code = failing(get_kernel(FAMILY)) + failing(by_revision.splitlines(keepends=True)[0])
    code += f"os.environ['LOCAL_KERNELS'] = {local!r}\n{LOAD}"
    by_version, by_commit = run_python(tmp_path, code, HF_HOME=str(cache_of(tmp_path))).strip().split("\n")
    assert "not available in the local cache and Hugging Face Hub is in offline mode" in by_version
    assert "Cannot find a local snapshot" in by_commit


def test_two_versions(tmp_path, hub, server):
    """Who asks for version 1 gets it, and is told of version 2."""
    hub.branches["v2"] = {path: file for path, file in hub.branches["v1"].items() if not path.endswith("reference.py")}
    code = LOAD + "print(hasattr(kernel, 'reference'))\n"
    assert run_online(
        tmp_path, server, f"import logging; logging.basicConfig(stream=sys.stdout)\n{code}"
    ).splitlines() == [
        f"WARNING:kernels._versions:You are using version 1 of '{hub_name(FAMILY)}', but version 2 is available.",
        "True",
    ]


def test_a_publisher_who_is_not_trusted(tmp_path, server):
    """Nothing is downloaded without the user's word, which may name the repository."""
    refused = failing(f"kernels.get_kernel({hub_name(FAMILY)!r}, version=1)\n")
    allowed = LOAD.replace("trust_remote_code=True", f"trust_remote_code=[{hub_name(FAMILY)!r}]")
    assert "trust_remote_code=True" in run_online(tmp_path, server, refused + allowed)
    assert server.requests[:2] == [
        "GET /api/organizations/rudnn/overview",
        f"GET /api/kernels/{hub_name(FAMILY)}/refs",
    ]


def test_no_variant_for_this_system(tmp_path, foreign):
    hub = Hub(hub_name(FAMILY))
    for variant in foreign:
        hub.add_variant("v1", variant)
    hub.add_variant("v2", variant_of(FAMILY))
    with serving(hub) as server:
        code = failing(get_kernel(FAMILY)) + LOAD.replace("version=1", "version=2")
        output = run_online(tmp_path, server, code)
        assert output.startswith(f"FileNotFoundError Cannot find a build variant for this system in {hub.repository}")
        for name in FOREIGN:
            assert re.search(rf"^{re.escape(name)}: .*(does not match|too new)", output, re.MULTILINE), output
        assert "version v2" in output, "another version has one, which the error must tell"


def test_no_such_version_and_no_such_kernel(tmp_path, server):
    code = failing(get_kernel(FAMILY).replace("version=1", "version=7"))
    code += failing(get_kernel(FAMILY).replace(hub_name(FAMILY), "rudnn/rudnn-nothing"))
    version, kernel = run_online(tmp_path, server, code).split("\n", 1)
    assert version == "ValueError Version 7 not found, available versions: 1"
    assert kernel.startswith("RepositoryNotFoundError 404")
    assert "rudnn/rudnn-nothing" in kernel


def library_of(hub: Hub) -> str:
    (path,) = [path for path in hub.branches["v1"] if path.endswith(".abi3.so")]
    return path


def test_a_truncated_file(tmp_path, hub, server):
    """It is refused and not kept; when the server is well again, the same cache works."""
    library = library_of(hub)
    answers = []

    def cut_once(request: Request, path: str, content: bytes) -> bytes | None:
        answers.append(path)
        return content[:1000] if path == library and answers.count(path) == 1 else content

    hub.sending = cut_once
    kept = f"files = Path({str(cache_of(tmp_path))!r}).rglob('*')\n"
    kept += "print([path.name for path in files if path.suffix in ('.so', '.incomplete')])\n"
    output = run_online(tmp_path, server, failing(get_kernel(FAMILY)) + kept + LOAD)
    size = len(hub.branches["v1"][library].content)
    assert f"file should be of size {size} but has size 1000" in output
    assert "\n[]\n" in output, "nothing of the file is in the cache"
    assert answers.count(library) == 2
    others = [path for path in answers if path != library]
    assert len(others) == len(set(others)), "what was downloaded before is not downloaded again"


def test_a_connection_that_breaks_is_taken_up_again(tmp_path, hub, server):
    broken = []

    def break_once(request: Request, path: str, content: bytes) -> bytes | None:
        if not path.endswith(".so") or broken:
            return content
        broken.append(path)
        send_half(request, content)
        return None

    hub.sending = break_once
    run_online(tmp_path, server, LOAD)
    assert broken == [library_of(hub)]


def send_half(request: Request, content: bytes) -> None:
    """Sends the header of a whole file and half of it."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content[: len(content) // 2])


def test_a_server_that_dies_midway(tmp_path, hub):
    others = [path for path in hub.branches["v1"] if variant_of(FAMILY).name in path and not path.endswith(".so")]
    sent = threading.Semaphore(0)
    with serving(hub) as server:

        def die(request: Request, path: str, content: bytes) -> bytes | None:
            if not path.endswith(".so"):
                sent.release()
                return content
            # Last, since the client closes every connection when one is refused, which another thread would tell.
            assert all(sent.acquire(timeout=60) for _ in others)
            send_half(request, content)
            server.die()
            return None

        hub.sending = die
        output = run_online(tmp_path, server, failing(get_kernel(FAMILY)))
    assert "Connection refused" in output
    assert not [path for path in files_in(cache_of(tmp_path)) if path.suffix in (".so", ".incomplete")]

    hub.sending = lambda request, path, content: content
    with serving(hub) as server:
        run_online(tmp_path, server, LOAD)


def verification() -> str:
    """The lines of SECURITY.md by which a user checks a download before anything of it runs."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "SECURITY.md").read_text(), re.DOTALL)
    return code


def test_the_digest_finds_a_file_that_was_changed(tmp_path):
    """`get_kernel` does not look at the digest; the lines of SECURITY.md do, before anything is loaded."""
    code = verification()
    for name in re.findall(r"^(\w+) = get_local_kernel", code, re.MULTILINE):
        code += f"kernel = {name}\n"
    changed = tmp_path / "changed" / variant_of(FAMILY).name
    shutil.copytree(variant_of(FAMILY), changed)
    (changed / "reference.py").write_text((changed / "reference.py").read_text() + "# Not what was built.\n")
    (changed / "more.py").write_text("# Not what was built.\n")
    hub = Hub(hub_name(FAMILY))
    hub.add_variant("v1", changed)
    hub.add_variant("v2", variant_of(FAMILY))
    refused = f"try:\n{indented(code)}except kernels._rust.DigestValidationError as error:\n    print(error)\n"
    refused += "assert not kernels.get_loaded_kernels()\n"
    accepted = code.replace("version=1", "version=2") + check_call(FAMILY)
    with serving(hub) as server:
        output = run_online(tmp_path, server, refused + accepted)
    assert "reference.py" in output
    assert "more.py" in output


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


@by_family
def test_the_builds_are_not_signed_yet(family):
    """Which SECURITY.md says."""
    assert isinstance(verify_variant(variant_of(family)), VerificationResult.SignatureBundleMissing)
