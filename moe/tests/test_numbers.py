"""Every operation against its definition in float64, forward and backward, whatever its inputs' layout."""

import pytest
import torch
from conftest import LAYOUTS, assert_bits_equal, guards_intact, in_layout, poisoned
from operations import (
    EXPERT_SHAPES,
    F32,
    FORWARD,
    FORWARD_DISPATCHED,
    FORWARD_FUSED_GATE,
    OPERATIONS,
    SMALL,
    WITH_EXPERTS,
    Shape,
    by_dtype,
    by_shape,
    by_strategy,
    check_forward,
    check_gradients,
    differentiable,
    for_each,
    for_each_of_experts,
    gradients,
    random_gradient,
    strategy_option,
)

WITHOUT_EXPERTS = [operation for operation in OPERATIONS if not operation.strategic]


@for_each(*WITHOUT_EXPERTS)
@by_dtype
@by_shape
def test_shapes(kernel, device, operation, dtype, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@for_each_of_experts(WITH_EXPERTS, EXPERT_SHAPES)
@by_strategy
def test_shapes_of_experts(kernel, device, operation, dtype, strategy, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs, strategy=strategy)
    check_gradients(kernel, operation, inputs, strategy=strategy)


@pytest.mark.small
@for_each(*WITH_EXPERTS)
@by_strategy
def test_without_gradients(kernel, device, operation, dtype, strategy):
    """Another path than with them: nothing is kept."""
    for shape in (SMALL, Shape(37, 4, 2, 40, 24)):
        inputs = operation.inputs(shape, dtype, device=device)
        check_forward(kernel, operation, inputs, strategy=strategy)


@pytest.mark.small
@pytest.mark.kernels_ci
@for_each(*OPERATIONS)
def test_auto(kernel, device, operation):
    """The strategy that nobody chose."""
    inputs = operation.inputs(SMALL, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(*OPERATIONS)
@by_dtype
def test_inputs_in_poisoned_storage(kernel, device, operation, dtype):
    inputs = operation.inputs(SMALL, dtype, device=device, requires_grad=True)
    inputs |= {name: poisoned(tensor) for name, tensor in differentiable(inputs).items()}
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)
    assert all(guards_intact(tensor) for tensor in differentiable(inputs).values())


def arguments_of_all_operations():
    return [
        pytest.param(operation, argument, id=f"{operation}-{argument}")
        for operation in OPERATIONS
        for argument in differentiable(operation.inputs())
    ]


@pytest.mark.small
@pytest.mark.parametrize("operation, argument", arguments_of_all_operations())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, device, operation, argument, layout):
    """A strided view gives the bits of its dense copy, forward and backward."""
    inputs = operation.inputs(SMALL, device=device, requires_grad=True)
    strided = {**inputs, argument: in_layout(inputs[argument], layout)}
    dense = {**inputs, argument: strided[argument].detach().contiguous().requires_grad_()}
    assert_same_run(kernel, operation, strided, dense)


@pytest.mark.small
@for_each(*(operation for operation in OPERATIONS if "indices" in operation.inputs()))
@pytest.mark.parametrize("kind", ["int64", "transposed"])
def test_kinds_of_indices(kernel, device, operation, kind):
    if kind == "transposed" and operation.id.startswith("selected_router"):
        pytest.skip("its indices must be contiguous")
    inputs = operation.inputs(SMALL, device=device, requires_grad=True)
    indices = inputs["indices"]
    other = indices.long() if kind == "int64" else indices.T.contiguous().T
    assert_same_run(kernel, operation, {**inputs, "indices": other}, inputs)


def assert_same_run(kernel, operation, inputs, expected_inputs):
    output, expected = operation.run(kernel, inputs), operation.run(kernel, expected_inputs)
    assert_bits_equal(output.detach(), expected.detach())
    grad = random_gradient(expected)
    found = gradients(output, inputs, grad)
    for name, gradient in gradients(expected, expected_inputs, grad).items():
        assert_bits_equal(found[name], gradient)


@pytest.mark.small
@for_each(*OPERATIONS)
@by_dtype
def test_no_tokens(kernel, device, operation, dtype):
    """Results without rows; gradients of weights are zeros."""
    inputs = operation.inputs(Shape(0, 4, 2, 24, 12), dtype, device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    assert output.shape == operation.plain(inputs).shape
    assert output.shape[0] == 0
    for name, gradient in gradients(output, inputs, torch.ones_like(output)).items():
        assert gradient.shape == inputs[name].shape
        assert not gradient.any()


@pytest.mark.small
@for_each(FORWARD_DISPATCHED, FORWARD, FORWARD_FUSED_GATE)
@by_strategy
def test_idle_experts_have_zero_gradients(kernel, device, operation, dtype, strategy):
    """Exactly zero, whatever lay in memory before."""
    inputs = operation.inputs(Shape(1, 6, 3, 24, 12), dtype, device=device, requires_grad=True)
    if "logits" in inputs:
        inputs["logits"] = torch.tensor([[0.0, 3, 0, 2, 0, 1]]).to(dtype).to(device).requires_grad_()
    else:
        inputs["indices"] = torch.tensor([[1, 3, 5]], dtype=torch.int32, device=device)
    output = operation.run(kernel, inputs, strategy=strategy)
    found = gradients(output, inputs, random_gradient(output))
    for name in {"gate", "up", "down"} & found.keys():
        assert not found[name][::2].any(), name
        assert all(found[name][expert].any() for expert in (1, 3, 5)), name


@pytest.mark.small
@for_each(*WITH_EXPERTS)
@by_strategy
def test_all_tokens_at_one_expert(kernel, device, operation, dtype, strategy):
    shape = Shape(21, 3, 1, 24, 12)
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    if "logits" in inputs:
        inputs["logits"] = torch.tensor([0.0, 1.0, 3.0]).to(dtype).to(device).repeat(21, 1).requires_grad_()
    else:
        inputs["indices"] = torch.full((21, 1), 2, dtype=torch.int32, device=device)
    check_forward(kernel, operation, inputs, strategy=strategy)
    check_gradients(kernel, operation, inputs, strategy=strategy)


def test_routing_weights_of_another_dtype(kernel, device):
    """float32 logits beside experts in bfloat16, as routers in float32 have it."""
    for operation in WITH_EXPERTS[1:]:
        inputs = operation.inputs(SMALL, torch.bfloat16, device=device)
        inputs["logits"] = inputs["logits"].to(F32)
        for tensor in differentiable(inputs).values():
            tensor.requires_grad_()
        check_forward(kernel, operation, inputs)
        check_gradients(kernel, operation, inputs, **strategy_option(operation, "auto"))
