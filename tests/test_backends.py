"""Builds for CUDA and for the bench, and the runs of ./dev test on the bench."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import conftest
import pytest
import twice
from conftest import Checkout, assert_fails, make_checkout
from kernels._rust import Metadata
from kernels.backends import CPU, CUDA
from kernels.variants import _resolve_variant_for_system, get_variants_local
from packaging.version import Version

from devtools import abi, cuda, cuda_toolkit
from devtools.commands.test import selecting
from devtools.errors import Failure

needs_bench = pytest.mark.skipif(platform.machine() != "x86_64", reason="the bench runs on x86-64")
needs_nvcc = pytest.mark.skipif(cuda_toolkit.nvcc() is None, reason=cuda_toolkit.NO_CUDA)

BENCH = {
    "simt-cuda": ("--backend", "simt-cuda"),
    "simt-cuda-checked": ("--backend", "simt-cuda", "--checked"),
    "simt-metal": ("--backend", "simt-metal"),
    "simt-metal-checked": ("--backend", "simt-metal", "--checked"),
}

USE = """
import torch
from kernels import get_kernel
kernel = get_kernel("rudnn/rudnn-twice", version=1, trust_remote_code=True)
x = torch.randn(200)
assert torch.equal(kernel.twice(x), 2 * x)
print(kernel.__name__)
"""


@pytest.fixture(scope="session")
def twice_checkout(tmp_path_factory) -> Checkout:
    """A checkout with the family `twice` too; tests must leave its sources as they found them."""
    fresh = make_checkout(tmp_path_factory.mktemp("twice"), conftest.FILES | twice.FILES)
    assert fresh.dev("vendor").returncode == 0
    return fresh


def built(checkout: Checkout, *options: str) -> str:
    """What a build prints, which succeeds."""
    done = checkout.dev("build", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def bench(twice_checkout) -> dict[str, str]:
    """What the build of each bench variant printed, in the order of BENCH."""
    if cuda_toolkit.cuda_home() is None:
        pytest.skip(cuda_toolkit.NO_CUDA)
    return {name: built(twice_checkout, *options) for name, options in BENCH.items()}


@pytest.fixture(scope="session")
def cuda_variant(twice_checkout):
    built(twice_checkout, "--backend", "cpu", "twice")
    built(twice_checkout, "--backend", "cuda", "twice")
    (variant,) = (twice_checkout.root / "twice/build").glob("*-cu*")
    return variant


def directory(checkout: Checkout, name: str):
    return checkout.root / "twice/build-simt" / name.removeprefix("simt-")


def use(checkout: Checkout, name: str) -> subprocess.CompletedProcess[str]:
    """Calls the operator of a bench variant in a process of its own."""
    # The engine asks addr2line for lines.
    environment = {"LOCAL_KERNELS": f"rudnn/rudnn-twice={directory(checkout, name)}", "PATH": os.environ["PATH"]}
    return subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True)


@needs_bench
@pytest.mark.parametrize("name", BENCH)
def test_a_bench_variant_serves_cpu_tensors(twice_checkout, bench, name):
    done = use(twice_checkout, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"_rudnn_twice_{name.removesuffix('-checked').replace('-', '_')}_")


@needs_bench
def test_bench_variants_are_told_apart_from_others(twice_checkout, bench):
    (stable,) = directory(twice_checkout, "simt-cuda").iterdir()
    (full,) = directory(twice_checkout, "simt-metal").iterdir()
    assert stable.name == "torch-stable-abi211-cpu-x86_64-linux"
    assert re.fullmatch(r"torch\d+-cxx11-cpu-x86_64-linux", full.name)
    metadata = [Metadata.read_from_file(variant / "metadata.json") for variant in (stable, full)]
    assert [str(each.backend.backend_type) for each in metadata] == ["cpu", "cpu"]


@needs_bench
def test_the_engine_and_host_code_are_compiled_once(bench):
    assert "compile simt/engine/scheduler.cpp" in bench["simt-cuda"]
    for name in ("simt-cuda", "simt-metal"):
        assert "compile twice/ops/twice.cpp" in bench[name]
    for name in ("simt-cuda-checked", "simt-metal-checked"):
        assert "compile twice/" in bench[name]
        assert not re.search(r"compile twice/\S+\.cpp", bench[name])
    assert "simt/engine" not in bench["simt-metal"]
    assert ".mm" not in bench["simt-metal"]


@needs_bench
def test_idle_bench_builds_do_no_work(twice_checkout, bench):
    for options in BENCH.values():
        assert built(twice_checkout, *options).splitlines() == ["ninja: no work to do."]


@needs_bench
def test_an_edit_of_the_translator_translates_again(twice_checkout, bench):
    with twice_checkout.appended("\n", "simt/metal/prepass.py"):
        assert "translate twice/metal/twice.metal" in built(twice_checkout, *BENCH["simt-metal"])


@needs_bench
def test_an_edit_of_a_shader_header_compiles_the_shader(twice_checkout, bench):
    built(twice_checkout, *BENCH["simt-metal"])
    with twice_checkout.appended("\n", "twice/metal/two.h"):
        printed = built(twice_checkout, *BENCH["simt-metal"])
    assert "translate twice/metal/twice.metal" in printed  # its macros may be the header's
    assert "compile twice/metal/twice.metal" in printed


@needs_bench
@pytest.mark.parametrize(
    ("path", "old", "device", "message"),
    [
        ("twice/cuda/twice.cuh", "__syncthreads();", "simt-cuda", "uninitialised-read at twice.cuh:11"),
        ("twice/metal/twice.metal", "if (i < n) ", "simt-metal", "out-of-bounds at twice.metal:7"),
    ],
    ids=["barrier", "overrun"],
)
def test_a_checked_build_finds_the_fault(twice_checkout, bench, path, old, device, message):
    # Blank, so that lines and columns stay as they are.
    with twice_checkout.edited(path, old, " " * len(old)):
        built(twice_checkout, *BENCH[f"{device}-checked"])
        done = use(twice_checkout, f"{device}-checked")
    assert done.returncode != 0
    assert message in done.stderr


@needs_bench
def test_a_wrong_shader_fails_the_build_with_its_line(twice_checkout, bench):
    with twice_checkout.edited("twice/metal/twice.metal", "two * input", "three * input"):
        done = twice_checkout.dev("build", *BENCH["simt-metal"])
    assert_fails(done, "the build failed")
    assert re.search(r"twice\.metal:7:.*three", done.stdout)


TESTS = """
import os
import pytest

@pytest.mark.small
def test_in_two_orders():
    assert os.environ["RUDNN_SIMT_ORDER"] == "forward,reverse"

@pytest.mark.simt_checked
@pytest.mark.kernels_ci
def test_in_three_orders(request):
    assert os.environ["RUDNN_SIMT_ORDER"] == "forward,reverse,random"
    assert "-checked" in os.environ["LOCAL_KERNELS"]

def test_not_here():
    assert "simt" not in os.environ["LOCAL_KERNELS"]
"""
MARKERS = "[tool.pytest.ini_options]\nmarkers = ['small', 'simt_checked', 'isa_independent', 'kernels_ci']\n"


@needs_bench
def test_bench_runs_are_counted_for_each_device(twice_checkout, bench):
    (twice_checkout.root / "twice/tests/test_twice.py").write_text(TESTS)
    (twice_checkout.root / "pyproject.toml").write_text(MARKERS)
    done = twice_checkout.dev("test", "--device", "simt-cuda", "--device", "simt-metal", "twice")
    assert done.returncode == 0, done.stdout
    *_, first, second, bench_time, last = done.stdout.splitlines()
    assert re.fullmatch(r"simt-cuda: 2 passed, 0 failed, 0 skipped in \d+ s", first)
    assert re.fullmatch(r"simt-metal: 2 passed, 0 failed, 0 skipped in \d+ s", second)
    assert re.fullmatch(r"the bench took \d+ s, with its builds", bench_time)
    assert last == "4 passed, 0 failed, 0 skipped"

    # The user's selection is made among the run's own.
    done = twice_checkout.dev("test", "--device", "simt-cuda", "twice", "--", "-m", "kernels_ci")
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    ("marks", "rest", "options"),
    [
        ("small", [], ["-m", "(small)"]),
        ("", ["-k", "norm"], ["-k", "norm"]),
        ("", ["-m", "a or b"], ["-m", "(a or b)"]),
        ("small", ["-x", "-m", "a or b", "--lf"], ["-x", "--lf", "-m", "(small) and (a or b)"]),
    ],
)
def test_marks_are_combined(marks, rest, options):
    assert selecting(marks, rest) == options


@needs_nvcc
def test_cuda_metadata_and_name(cuda_variant):
    metadata = Metadata.read_from_file(cuda_variant / "metadata.json")
    assert metadata.id.startswith("_rudnn_twice_cuda_")
    assert (str(metadata.backend.backend_type), metadata.backend.archs) == ("cuda", ["8.0", "9.0"])
    major, minor = cuda_toolkit.cuda_version()
    assert cuda_variant.name == f"torch-stable-abi211-cu{major}{minor}-{platform.machine()}-linux"


@needs_nvcc
def test_a_loader_chooses_by_the_system(cuda_variant):
    variants = get_variants_local(cuda_variant.parent)
    assert len(variants) == 2
    for backend in (CPU(), CUDA(Version("{}.{}".format(*cuda_toolkit.cuda_version())))):
        system = {"cpu": platform.machine(), "os": "linux", "torch_version": Version("2.11"), "torch_cxx11_abi": True}
        found, _ = _resolve_variant_for_system(variants, selected_backend=backend, tvm_ffi_version=None, **system)
        assert [variant.arch.backend for variant in found] == [backend]


@needs_nvcc
def test_registers_and_spills_are_kept_beside_the_object(twice_checkout, cuda_variant):
    told = (twice_checkout.root / ".cache/objects/cuda/twice/cuda/twice.cu.o.ptxas").read_text()
    for architecture in ("sm_80", "sm_90"):
        assert re.search(rf"twice_kernel\w* for '{architecture}'|twice_kernel\w*' for '{architecture}'", told)
    assert re.search(r"Used \d+ registers", told)
    assert "ptxas" not in built(twice_checkout, "--backend", "cuda", "twice")


@needs_nvcc
def test_cuda_errors_fail_the_build(twice_checkout, cuda_variant):
    with twice_checkout.appended("wrong\n", "twice/cuda/twice.cu"):
        done = twice_checkout.dev("build", "--backend", "cuda")
    assert_fails(done, "the build failed")
    assert "twice.cu" in done.stdout
    assert (cuda_variant / "metadata.json").is_file()


@needs_nvcc
@pytest.mark.parametrize(
    ("addition", "archs"),
    [('cuda-capabilities = ["8.0", "9.0a"]', ["8.0", "9.0a"]), ('cuda-capabilities = ["7.5", "8.0"]', ["8.0"])],
)
def test_cuda_capabilities_restrict_the_architectures(twice_checkout, cuda_variant, addition, archs):
    with twice_checkout.edited("twice/build.toml", 'backend = "cuda"\n', f'backend = "cuda"\n{addition}\n'):
        built(twice_checkout, "--backend", "cuda", "twice")
    assert json.loads((cuda_variant / "metadata.json").read_text())["backend"]["archs"] == archs


@needs_nvcc
@pytest.mark.parametrize(
    ("capabilities", "message"),
    [('["12.0"]', "gives the cuda-capabilities 12.0, none of which runs on 8.0, 9.0"), ('["sm_80"]', "got sm_80")],
)
def test_wrong_cuda_capabilities(twice_checkout, capabilities, message):
    addition = f'backend = "cuda"\ncuda-capabilities = {capabilities}\n'
    with twice_checkout.edited("twice/build.toml", 'backend = "cuda"\n', addition):
        assert_fails(twice_checkout.dev("build", "--backend", "cuda", "twice"), message)


@needs_nvcc
def test_cuda_flags_count(twice_checkout, cuda_variant):
    with (
        twice_checkout.edited("twice/build.toml", 'backend = "cuda"\n', 'backend = "cuda"\ncuda-flags = ["-DWRONG"]\n'),
        twice_checkout.appended("#ifdef WRONG\n#error as asked for\n#endif\n", "twice/cuda/twice.cu"),
    ):
        done = twice_checkout.dev("build", "--backend", "cuda", "twice")
    assert_fails(done, "the build failed")
    assert "as asked for" in done.stdout


@needs_nvcc
def test_a_section_for_a_later_cuda_is_left_out(twice_checkout, cuda_variant):
    with twice_checkout.edited("twice/build.toml", 'backend = "cuda"\n', 'backend = "cuda"\ncuda-minver = "99.0"\n'):
        done = twice_checkout.dev("build", "--backend", "cuda", "twice")
    assert_fails(done, "launch_twice", "is undefined")


@pytest.mark.parametrize(
    ("wanted", "capabilities", "chosen"),
    [
        (["8.0", "9.0"], [], ["8.0", "9.0"]),
        (["8.0", "9.0"], ["8.0", "8.6", "9.0a"], ["8.0", "9.0a"]),
        (["8.9"], ["8.0", "8.6", "9.0"], ["8.6"]),
        (["10.3"], ["10.0a", "10.0f"], ["10.0f"]),
        (["8.0", "12.0+PTX"], ["8.0", "12.0+PTX"], ["8.0", "12.0+PTX"]),
        (["9.0"], ["8.0", "10.0"], []),
    ],
    ids=["all", "listed", "newest_of_the_generation", "family", "ptx", "none"],
)
def test_architectures(wanted, capabilities, chosen):
    assert cuda.restricted(wanted, capabilities) == chosen


def test_generated_code():
    assert cuda.generate_code(["8.0", "9.0a", "12.0+PTX"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


def test_an_architecture_that_is_none():
    with pytest.raises(Failure, match="got sm_80"):
        cuda.restricted(["8.0"], ["sm_80"])


def test_a_library_must_need_libtorch(tmp_path):
    library = tmp_path / "empty.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    assert abi.violations(library) == ["libtorch.so is not needed, but it is what loads PyTorch's part for the device"]


@needs_nvcc
def test_only_a_cuda_library_may_need_the_cuda_run_time(cuda_variant):
    (library,) = cuda_variant.glob("*.so")
    assert abi.violations(library, cuda=True) == []
    assert [text.split(" is ")[0] for text in abi.violations(library)] == ["libcudart.so.13"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checked"], "--checked is for the bench"),
        (["--checked", "--backend", "cuda"], "--checked is for the bench"),
        (["--sanitize", "--backend", "cuda"], "--sanitize is for --backend cpu, got cuda"),
        (["--sanitize", "--backend", "simt-cuda"], "--checked looks at every access"),
        (["--all-architectures"], "--all-architectures is for --backend cuda, got cpu"),
        (["--backend", "simt-metal", "toy"], "there are no metal sources in toy"),
        (["--backend", "cuda", "toy"], "there are no cuda sources in toy"),
    ],
    ids=["checked_cpu", "checked_cuda", "sanitized_cuda", "sanitized_bench", "architectures", "no_metal", "no_cuda"],
)
def test_options_that_make_no_sense_are_refused(twice_checkout, options, message):
    assert_fails(twice_checkout.dev("build", *options), message)


def test_a_broken_family_does_not_stop_the_build_of_another(twice_checkout):
    with twice_checkout.edited("twice/build.toml", 'cuda = "2.11"\n', ""):
        built(twice_checkout, "toy")
        assert_fails(twice_checkout.dev("build", "--backend", "simt-cuda"), "gives no cuda version")
    shutil.rmtree(twice_checkout.root / "toy/build")
