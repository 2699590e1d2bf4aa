"""Each token's rows, weighted and summed, and the gradients that are called by hand."""

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact, in_layout
from operations import BF16, COMBINE, F16, F32, Shape, by_dtype, normal, plan_of, random_gradient

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

by_strategy = pytest.mark.parametrize("strategy", ["serial", "plane"])
SHAPES = [
    pytest.param(Shape(1, 1, 1, 1, 1), id="single_row"),
    pytest.param(Shape(5, 4, 2, 19, 1), id="odd_sizes", marks=pytest.mark.simt_checked),
    pytest.param(Shape(3, 8, 7, 64, 1), id="many_choices"),
    pytest.param(Shape(40, 7, 3, 33, 1), id="many_tokens", marks=pytest.mark.simt_checked),
    pytest.param(Shape(2, 4, 2, 600, 1), id="long_rows"),
]


def dispatched_of(kernel, inputs):
    plan = plan_of(kernel, inputs, inputs["weights"])
    return plan.dispatch(torch.zeros(len(inputs["indices"]), 1, device=inputs["indices"].device))


@by_strategy
@by_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_combine_backward(kernel, device, dtype, strategy, shape):
    """The weights' gradient is float32, and both are within the tolerance."""
    inputs = COMBINE.inputs(shape, dtype, device=device, requires_grad=True)
    plain = COMBINE.plain(inputs)
    exact, leaves = COMBINE.run_exact(kernel, inputs)
    grad = random_gradient(plain)
    found = dispatched_of(kernel, inputs).combine_backward_with_strategy(inputs["expert_output"], grad, strategy)
    names = ("expert_output", "weights")
    exact_found = torch.autograd.grad(exact, [leaves[name] for name in names], grad.cpu().double())
    plain_found = torch.autograd.grad(plain, [inputs[name] for name in names], grad)
    assert found.expert_output.dtype == dtype
    assert found.weights.dtype == F32
    for name, exact_one, plain_one in zip(names, exact_found, plain_found):
        assert_close_to_exact(getattr(found, name), exact_one, plain_one)


@by_dtype
def test_serial_is_the_default_and_what_autograd_runs(kernel, device, dtype):
    inputs = COMBINE.inputs(dtype=dtype, device=device, requires_grad=True)
    dispatched = dispatched_of(kernel, inputs)
    output = dispatched.combine(inputs["expert_output"])
    grad = random_gradient(output)
    default = dispatched.combine_backward(inputs["expert_output"], grad)
    for strategy in (kernel.CombineGradientStrategy.SERIAL, "serial"):
        again = dispatched.combine_backward_with_strategy(inputs["expert_output"], grad, strategy)
        for one, other in zip(default, again):
            assert_bits_equal(one, other)
    grad_rows, grad_weights = torch.autograd.grad(output, (inputs["expert_output"], inputs["weights"]), grad)
    assert_bits_equal(grad_rows, default.expert_output)
    assert_bits_equal(grad_weights, default.weights.to(dtype))


@by_dtype
@pytest.mark.parametrize("weight_dtype", [F32, F16, BF16], ids=["w_f32", "w_f16", "w_bf16"])
def test_weights_of_any_dtype(kernel, device, dtype, weight_dtype):
    inputs = COMBINE.inputs(dtype=dtype, device=device)
    inputs["weights"] = inputs["weights"].to(weight_dtype)
    output = dispatched_of(kernel, inputs).combine(inputs["expert_output"])
    assert output.dtype == dtype
    exact, _ = COMBINE.run_exact(kernel, inputs)
    assert_close_to_exact(output, exact)


@by_strategy
def test_choices_that_are_left_out(kernel, device, strategy):
    """They add nothing, whatever their weight holds; their weight's gradient is 0, and nobody's row gets 0."""
    weights = torch.tensor([[0.5, torch.nan], [torch.inf, 2.0]], device=device)
    plan = kernel.RoutingPlan(torch.tensor([[1, 9], [-1, 0]], device=device), weights, 2)
    dispatched = plan.dispatch(torch.ones(2, 3, device=device))
    rows = torch.tensor([[1.0, 2, 3], [4, 5, 6], [torch.nan] * 3, [torch.nan] * 3], device=device)
    assert dispatched.combine(rows).tolist() == [[2, 2.5, 3], [2, 4, 6]]
    found = dispatched.combine_backward_with_strategy(rows, torch.ones(2, 3, device=device), strategy)
    assert found.expert_output.tolist() == [[2, 2, 2], [0.5, 0.5, 0.5], [0, 0, 0], [0, 0, 0]]
    assert found.weights.tolist() == [[15, 0], [0, 6]]


@by_strategy
@pytest.mark.parametrize("layout", ["transposed", "every_second", "offset", "expanded_rows"])
def test_other_layouts(kernel, device, strategy, layout):
    inputs = COMBINE.inputs(device=device)
    dispatched = dispatched_of(kernel, inputs)
    rows = in_layout(inputs["expert_output"], layout)
    grad = in_layout(normal((5, 24), F32, device=device), layout)
    strided = dispatched.combine_backward_with_strategy(rows, grad, strategy)
    dense = dispatched.combine_backward_with_strategy(rows.contiguous(), grad.contiguous(), strategy)
    for one, other in zip(strided, dense):
        assert_bits_equal(one, other)


@pytest.mark.parametrize("name", ["weights", "row_slots", "slot_rows"])
def test_changing_what_was_saved_before_the_backward_raises(kernel, device, name):
    inputs = COMBINE.inputs(device=device)
    dispatched = dispatched_of(kernel, inputs)
    saved = dispatched.routing.weights if name == "weights" else getattr(dispatched, name)
    saved.add_(1)
    with pytest.raises(RuntimeError, match=f"{name} has been modified by an inplace operation"):
        dispatched.combine_backward(inputs["expert_output"], torch.ones(5, 24, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        dispatched.dispatch_backward(torch.ones(10, 1, device=device))
