"""The real side of device.cuh: each wrapper compiles with nvcc to the instruction that it stands for."""

import re
import subprocess

import pytest
from bench import KERNELS

from devtools import cuda_toolkit
from simt import toolchain

# Kernel of intrinsics.cu (a part of its mangled name) and the instruction expected in its PTX.
SM80 = {
    "mmaIN5rudnn7float16E": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
    "mmaIN5rudnn8bfloat16E": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
    "load_matrixILi1ELb0": r"ldmatrix\.sync\.aligned\.m8n8\.x1\.shared\.b16",
    "load_matrixILi2ELb0": r"ldmatrix\.sync\.aligned\.m8n8\.x2\.shared\.b16",
    "load_matrixILi4ELb0": r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16",
    "load_matrixILi4ELb1": r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16",
    "shuffles": r"shfl\.sync\.idx|vote\.sync\.ballot",
    "matches": r"match\.any\.sync\.b32",
    "reductions": r"shfl\.sync\.bfly",
    "copy_asyncILi4E": r"cp\.async\.ca\.shared\.global",
    "copy_asyncILi16E": r"cp\.async\.cg\.shared\.global",
    "named_barriers": r"bar\.arrive",
    "vectorsIfLi4E": r"ld\.global\.(nc\.)?v4",
    "vectorsIN5rudnn7float16ELi8E": r"ld\.global\.(nc\.)?v4",
    "vectorsIN5rudnn7float16ELi2E": r"ld\.global\.(nc\.)?(v2\.u16|u32)",
    "round_tripIN5rudnn8bfloat16E": r"cvt\.rn\.bf16",
    "math": r"rsqrt\.approx|ex2\.approx",
    "atomics": r"(atom|red)\.global",
}
SM90 = {
    "copy_bulk": r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",
    "arrivals": r"mbarrier\.try_wait\.parity\.shared::cta\.b64",
}


@pytest.fixture(scope="module")
def ptx(bench):
    """The PTX of each kernel of intrinsics.cu, by its mangled name, for an architecture."""
    nvcc = cuda_toolkit.nvcc()
    if nvcc is None:
        pytest.skip(cuda_toolkit.NO_CUDA)
    known = {}

    def compile(arch):
        if arch not in known:
            output = bench.folder / f"{arch}.ptx"
            command = [nvcc, "-std=c++17", f"-arch={arch}", f"-I{toolchain.ROOT}", "--ptx"]
            done = subprocess.run(
                [*command, str(KERNELS / "intrinsics.cu"), "-o", str(output)], capture_output=True, text=True
            )
            assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
            entries = output.read_text().split(".entry ")[1:]
            known[arch] = {entry.split("(")[0]: entry for entry in entries}
        return known[arch]

    return compile


def body_of(kernels, part):
    found = [body for name, body in kernels.items() if part in name]
    assert len(found) == 1, f"{part} is in {len(found)} of {sorted(kernels)}"
    return found[0]


@pytest.mark.parametrize(
    "arch, kernel", [("sm_80", kernel) for kernel in SM80] + [("sm_90", kernel) for kernel in SM90]
)
def test_wrapper_becomes_its_instruction(ptx, arch, kernel):
    assert re.search({**SM80, **SM90}[kernel], body_of(ptx(arch), kernel))


@pytest.mark.parametrize("kernel", SM90)
def test_newer_instructions_trap_on_older_devices(ptx, kernel):
    assert re.search(r"\btrap;", body_of(ptx("sm_80"), kernel))


def test_kernels_with_seeded_faults_are_valid_cuda(bench):
    nvcc = cuda_toolkit.nvcc()
    if nvcc is None:
        pytest.skip(cuda_toolkit.NO_CUDA)
    command = [nvcc, "-std=c++17", "-arch=sm_90", f"-I{toolchain.ROOT}", "-c", str(KERNELS / "faults.cu")]
    done = subprocess.run([*command, "-o", str(bench.folder / "faults.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
