"""A stable-ABI operator whose CUDA launcher runs on the bench, and which raises what the engine finds."""

import subprocess
from pathlib import Path

import pytest
from bench import KERNELS, ORDERS, compile_command, line_of, link_command

from devtools import cuda_toolkit

torch = pytest.importorskip("torch")
RMS_NORM = KERNELS / "example_rms_norm.cu"


@pytest.fixture(scope="module")
def rms_norm(bench):
    if cuda_toolkit.cuda_home() is None:
        pytest.skip(cuda_toolkit.NO_CUDA)
    folder = bench.folder
    package = Path(torch.__file__).parent
    headers = [f"-isystem{package / 'include'}", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    objects = [folder / "torch_kernel.o", folder / "torch_entry.o"]
    commands = [
        compile_command(RMS_NORM, objects[0], checked=True),
        [*compile_command(KERNELS / "example_rms_norm_torch.cpp", objects[1], checked=False), *headers],
        [
            *link_command(objects, folder / "op.so", bench.engine_path),
            *(f"-L{package / 'lib'}", "-ltorch", "-ltorch_cpu", f"-Wl,-rpath,{package / 'lib'}"),
        ],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    torch.ops.load_library(str(folder / "op.so"))
    bench.engine.simt_set_order(ORDERS["forward"])
    return torch.ops.simt_test.rms_norm


def test_operator_agrees_with_torch(rms_norm):
    x, gamma = torch.randn(3, 2048), torch.randn(2048)
    torch.testing.assert_close(rms_norm(x, gamma, 3), torch.nn.functional.rms_norm(x, (2048,), gamma, 1e-6))


@pytest.mark.parametrize(
    "rows, kind, message",
    [(4, "out-of-bounds", "the nearest is buffer 'x' of 24576 bytes"), (2, "unwritten-output", "8192 of 24576 bytes")],
)
def test_engine_errors_are_raised_and_do_not_stick(rms_norm, rows, kind, message):
    x, gamma = torch.randn(3, 2048), torch.randn(2048)
    with pytest.raises(RuntimeError, match=f"{kind} at example_rms_norm.cuh?:\\d+.*{message}"):
        rms_norm(x, gamma, rows)
    assert torch.isfinite(rms_norm(x, gamma, 3)).all()


def test_unwritten_output_names_the_launch(rms_norm):
    line = line_of(RMS_NORM, "launch(kernel, {")
    with pytest.raises(RuntimeError, match=f"unwritten-output at example_rms_norm.cu:{line}"):
        rms_norm(torch.randn(3, 64), torch.randn(64), 2)
