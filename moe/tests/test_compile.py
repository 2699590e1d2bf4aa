"""torch.compile of every operation: one graph, dynamic shapes, the results of the eager run."""

import functools
import shutil

import pytest
import torch
from conftest import assert_bits_equal
from operations import (
    BF16,
    F32,
    FORWARD,
    OPERATIONS,
    Shape,
    for_each,
    gradients,
    plan_of,
    random_gradient,
)
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.isa_independent

SIZES = (Shape(5, 4, 2, 24, 12), Shape(9, 4, 2, 24, 12))


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
        assert_same(operation, kernel, run, operation.inputs(shape, dtype, device=device, requires_grad=True))


@for_each(*OPERATIONS)
def test_another_size_does_not_compile_again(kernel, device, operation):
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled_run(kernel, operation, dynamic=True, backend=counter)
    counts = []
    for shape in SIZES:
        inputs = operation.inputs(shape, device=device)
        assert_bits_equal(run(inputs), operation.run(kernel, inputs))
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
    assert_same(operation, kernel, run, operation.inputs(device=device, requires_grad=True))


def test_some_gradients_only(kernel, device):
    """The graph holds the choice of gradients that the eager call would make."""
    run = compiled_run(kernel, FORWARD, backend="aot_eager")
    inputs = FORWARD.inputs(device=device)
    inputs["logits"].requires_grad_()
    inputs["up"].requires_grad_()
    assert_same(FORWARD, kernel, run, inputs)


def test_a_prepared_object(kernel, device):
    """SwiGluExperts and options made outside, as a model holds them."""
    inputs = FORWARD.inputs(device=device, requires_grad=True)
    experts = kernel.SwiGluExperts(inputs["gate"], inputs["up"], inputs["down"])
    options = kernel.RoutingOptions(2, True)

    def run(input, logits):
        return experts.forward(input, logits, options)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        part = inputs["input"][:tokens], inputs["logits"][:tokens]
        assert_bits_equal(compiled(*part).detach(), run(*part).detach())


def test_the_chain_by_hand(kernel, device):
    inputs = FORWARD.inputs(device=device)
    options = kernel.RoutingOptions(2, True)

    def run(input, logits, gate, up, down, grad):
        plan = kernel.route(logits, options)
        training = plan.into_training(logits, kernel.RouterWeightOptions("softmax", True))
        dispatched = training.routing.dispatch(input)
        rows = kernel.SwiGluExperts(gate, up, down).forward_dispatched_training(dispatched)
        output = dispatched.combine(rows.output)
        combine = dispatched.combine_backward(rows.output, grad)
        experts = rows.cache.backward(combine.expert_output)
        return output, dispatched.dispatch_backward(experts.values), training.backward(combine.weights), *experts[1:]

    arguments = *inputs.values(), torch.ones_like(inputs["input"])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*arguments), run(*arguments), strict=True):
        assert_bits_equal(one, other)


def test_a_plan_made_outside(kernel, device):
    inputs = next(op for op in OPERATIONS if op.id == "dispatch").inputs(device=device)
    plan = plan_of(kernel, inputs)
    run = torch.compile(lambda input: plan.dispatch(input).values, fullgraph=True, backend="aot_eager")
    assert_bits_equal(run(inputs["input"]), plan.dispatch(inputs["input"]).values)


def assert_same(operation, kernel, run, inputs):
    output, expected = run(inputs), operation.run(kernel, inputs)
    assert_bits_equal(output.detach(), expected.detach())
    grad = random_gradient(expected)
    found = gradients(output, inputs, grad)
    for name, gradient in gradients(expected, inputs, grad).items():
        assert_bits_equal(found[name], gradient)


def test_refused_input_raises_under_compile(kernel, device):
    run = torch.compile(kernel.route, backend="aot_eager")
    with pytest.raises(kernel.MoeError, match="logits"):
        run(torch.ones(3, 1, device=device), kernel.RoutingOptions(2))
