import json
import platform
import shutil
import subprocess
import sys

import pytest
from conftest import assert_fails
from kernels._rust import Digest, Metadata

VARIANT = f"torch-stable-abi211-cpu-{platform.machine()}-linux"

USE = """
import torch
from kernels import get_kernel
kernel = get_kernel("rudnn/rudnn-toy", version=1, trust_remote_code=True)
assert torch.equal(kernel.add_one(torch.zeros(3)), torch.ones(3))
assert kernel.add_op_namespace_prefix("add_one") == kernel.__name__ + "::add_one"
try:
    kernel.add_one(torch.tensor(0.0))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def variant(built):
    return built.family / "build" / VARIANT


def test_kernels_loads_the_variant_and_exceptions_arrive(built):
    environment = {"LOCAL_KERNELS": f"rudnn/rudnn-toy={built.family}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "add_one: got rank 0" in done.stdout


def test_layout_and_metadata(variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id.startswith("_rudnn_toy_cpu_")
    assert (str(metadata.name), metadata.version, metadata.license) == ("rudnn-toy", 1, "Apache-2.0")
    names = {path.name for path in variant.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "_checks.py", "_ops.py", f"{metadata.id}.abi3.so", "metadata.json"}
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))


def test_idle_build_does_no_work_and_changes_nothing(built, variant):
    before = (variant.stat().st_ino, (variant / "metadata.json").read_bytes())
    done = built.dev("build")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["ninja: no work to do."]
    assert before == (variant.stat().st_ino, (variant / "metadata.json").read_bytes())


def test_python_edit_gives_a_new_id_and_compiles_only_the_binding(built, variant):
    before = json.loads((variant / "metadata.json").read_text())["id"]
    with built.appended("\n", "toy/torch-ext/rudnn_toy/__init__.py"):
        done = built.dev("build")
    assert done.returncode == 0
    assert "torch_binding.cpp" in done.stdout
    assert "cpu/add.cpp" not in done.stdout
    assert json.loads((variant / "metadata.json").read_text())["id"] != before


@pytest.mark.parametrize(
    "path", ["devtools/compat/manylinux.cpp", "devtools/compat/exports.map", "devtools/include/registration.h"]
)
def test_an_edit_of_what_every_build_has_gives_a_new_id(built, variant, path):
    before = json.loads((variant / "metadata.json").read_text())["id"]
    with built.appended("\n", path):
        assert built.dev("build").returncode == 0
    assert json.loads((variant / "metadata.json").read_text())["id"] != before


def test_header_edit_compiles_what_includes_it(built):
    with built.appended("\n", "common/types.h", "toy/common/types.h"):
        assert "cpu/add.cpp" in built.dev("build").stdout


def test_stale_variants_of_the_backend_are_removed_and_others_kept(built, variant):
    stale = variant.parent / f"torch213-cxx11-cpu-{platform.machine()}-linux"
    other = variant.parent / f"torch-stable-abi211-cu130-{platform.machine()}-linux"
    for directory in (stale, other):
        directory.mkdir()
    (variant / "_ops.py").unlink()
    assert built.dev("build").returncode == 0
    assert (variant / "_ops.py").is_file()
    assert not stale.exists()
    assert other.is_dir()
    other.rmdir()
    assert not list(variant.parent.glob(".*"))


def test_compiler_errors_fail_the_build_and_keep_the_variant(built, variant):
    with built.appended("wrong\n", "toy/cpu/add.cpp"):
        done = built.dev("build")
    assert_fails(done, "the build failed")
    assert "does not name a type" in done.stdout
    assert (variant / "metadata.json").is_file()


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("extern void elsewhere();\nvoid call() { elsewhere(); }\n", "_Z9elsewherev is undefined"),
        (
            'extern "C" int omp_get_num_threads();\nint call() { return omp_get_num_threads(); }\n',
            "omp_get_num_threads",
        ),
        ('extern "C" void* PyUnstable();\nvoid* call() { return PyUnstable(); }\n', "not in Python's stable ABI"),
        ("#include <sys/random.h>\n#include <charconv>\n", None),
    ],
    ids=["undefined_function", "openmp", "unstable_python", "harmless"],
)
def test_abi_is_checked(built, addition, message):
    addition = addition.replace(" call()", ' __attribute__((visibility("default"), used)) call()')
    with built.appended(addition, "toy/cpu/add.cpp"):
        done = built.dev("build")
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert_fails(done, "toy breaks the ABI it promises", message)


def test_new_glibc_function_breaks_the_abi(built):
    addition = "#include <pthread.h>\n__attribute__((used)) int call() { return pthread_join({}, {}); }\n"
    with built.appended(addition, "toy/cpu/add.cpp"):
        done = built.dev("build")
    assert_fails(done, "newer than manylinux_2_28")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[general]", "[general", "toy/build.toml is not valid TOML"),
        ('name = "rudnn-toy"', "", "toy/build.toml has no name in [general]"),
        ("[torch", "[torc", "toy/build.toml has no [torch] table"),
        ('repo-id = "rudnn/rudnn-toy"', "", "toy/build.toml has no repo-id in [general.hub]"),
        ('"cpu"]', '"gpu"]', "toy/build.toml is not valid"),
        ("edition = 5", "edition = 5\nunknown = 1", "toy/build.toml is not valid"),
        ('"cpu/add.cpp"', '"cpu/add.cpp", "cpu/none.cpp"', "lists files that do not exist: cpu/none.cpp"),
        ('src = ["torch-ext', 'src = ["cpu/add.cpp", "torch-ext', "compiles a file twice for cpu: cpu/add.cpp"),
        ('[torch.stable-abi]\ncpu = "2.11"\n', "", "gives no cpu version in [torch.stable-abi]"),
    ],
    ids=[
        "toml",
        "no_name",
        "no_torch",
        "no_repository",
        "backend",
        "unknown_key",
        "missing_source",
        "listed_twice",
        "no_abi",
    ],
)
def test_wrong_build_toml(checkout, old, new, message):
    checkout.edit("toy/build.toml", old, new)
    assert_fails(checkout.dev("build"), message)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"cpu/add.cpp"', '"cpu/none.cpp"'), ("edition = 5", "edition = 5\nunknown = 1"), ('cpu = "2.11"\n', "")],
    ids=["missing_source", "unknown_key", "no_abi"],
)
def test_a_broken_family_does_not_stop_the_build_of_another(built, variant, old, new):
    broken = built.root / "broken"
    shutil.copytree(built.family, broken, ignore=shutil.ignore_patterns("build"))
    try:
        (broken / "torch-ext/rudnn_toy").rename(broken / "torch-ext/rudnn_broken")
        built.edit("broken/build.toml", "rudnn-toy", "rudnn-broken")
        built.edit("broken/build.toml", old, new)
        (variant / "metadata.json").unlink()
        done = built.dev("build", "toy")
        assert done.returncode == 0, done.stdout + done.stderr
        assert (variant / "metadata.json").is_file()
        assert_fails(built.dev("build"), "broken")
    finally:
        shutil.rmtree(broken)


def test_sanitized_build_loads_and_finds_an_overrun(checkout):
    checkout.edit("toy/cpu/add.cpp", "i < n", "i <= n")
    (checkout.family / "tests/test_toy.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.isa_independent\n"
        "def test_right_natively():\n    pass\n"
        "@pytest.mark.small\n"
        "def test_overrun():\n"
        "    import torch\n"
        "    from kernels import get_kernel\n"
        "    kernel = get_kernel('rudnn/rudnn-toy', version=1, trust_remote_code=True)\n"
        "    kernel.add_one(torch.zeros(3))\n"
    )
    (checkout.root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['small', 'isa_independent']\n")
    done = checkout.dev("test", "toy")
    assert done.returncode == 1
    assert "heap-buffer-overflow" in done.stdout
    assert "test_overrun" in done.stdout
    assert done.stdout.splitlines()[-1].split(", ")[1] == "1 failed"
