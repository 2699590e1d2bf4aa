"""torch.compile of every public function: one graph, dynamic shapes, the results of the eager run."""

import functools
import shutil

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, F32, OPERATIONS, for_each, gradients, random_gradients
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.isa_independent

SIZES = ((4, 21), (7, 33))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_run(kernel, operation, **options):
    def run(inputs):
        return operation.run(kernel, inputs)

    return torch.compile(run, fullgraph=True, **options)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_forward_and_backward(kernel, device, operation, dtype):
    run = compiled_run(kernel, operation, dynamic=True, backend="aot_eager")
    for shape in SIZES:
        inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
        assert_same(operation, kernel, run, inputs)


@for_each(*OPERATIONS)
def test_another_size_does_not_compile_again(kernel, device, operation):
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled_run(kernel, operation, dynamic=True, backend=counter)
    counts = []
    for shape in SIZES:
        inputs = operation.inputs(shape, device=device)
        for output, expected in zip(run(inputs), operation.run(kernel, inputs), strict=True):
            assert_bits_equal(output, expected)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[0] == counts[1]


@functools.cache
def why_inductor_cannot_run(device):
    """Its compiler, for a GPU Triton, may be missing: plain PyTorch code tells, which is no concern of the kernels."""
    if device == "cpu" and shutil.which("g++"):
        return None
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:
        return f"inductor cannot compile for {device} here: {str(error).splitlines()[0]}"
    return None


@for_each(*OPERATIONS)
def test_inductor(kernel, device, operation):
    if reason := why_inductor_cannot_run(device):
        pytest.skip(reason)
    run = compiled_run(kernel, operation)
    assert_same(operation, kernel, run, operation.inputs((4, 21), device=device, requires_grad=True))


def test_some_gradients_only(kernel, device):
    """The graph holds the choice of gradients that the eager call would make."""
    operation = next(op for op in OPERATIONS if op.id == "fused_add_layer_norm")
    run = compiled_run(kernel, operation, backend="aot_eager")
    inputs = operation.inputs((4, 21), device=device)
    inputs["residual"].requires_grad_()
    inputs["beta"].requires_grad_()
    assert_same(operation, kernel, run, inputs)


def assert_same(operation, kernel, run, inputs):
    outputs, expected = run(inputs), operation.run(kernel, inputs)
    for output, eager in zip(outputs, expected, strict=True):
        assert_bits_equal(output.detach(), eager.detach())
    grads = random_gradients(expected)
    found = gradients(outputs, inputs, grads)
    for name, grad in gradients(expected, inputs, grads).items():
        assert_bits_equal(found[name], grad)


def test_refused_input_raises_under_compile(kernel, device):
    run = torch.compile(kernel.rms_norm, backend="aot_eager")
    with pytest.raises(kernel.NormalizationError, match="gamma"):
        run(torch.ones(3, 8, device=device), torch.ones(9, device=device))
