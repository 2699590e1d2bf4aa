"""What layer_norm and fused_add_layer_norm have of their own; what all norms share is in test_norms.py."""

import pytest
import torch
from conftest import assert_bits_equal
from operations import (
    BF16,
    F32,
    FUSED_ADD_LAYER_NORM,
    LAYER_NORM,
    by_input_dtype,
    check_forward,
    check_gradients,
    for_each,
)

pytestmark = pytest.mark.kernels_ci


@pytest.mark.small
@for_each(LAYER_NORM, FUSED_ADD_LAYER_NORM)
@pytest.mark.parametrize(
    "mixed", [("gamma", F32, "beta", BF16), ("gamma", BF16, "beta", F32)], ids=["beta_bf16", "gamma_bf16"]
)
def test_gamma_and_beta_of_different_dtypes(kernel, device, operation, mixed):
    inputs = operation.inputs((3, 37), BF16, device=device)
    gamma, gamma_dtype, beta, beta_dtype = mixed
    inputs[gamma] = inputs[gamma].to(gamma_dtype)
    inputs[beta] = inputs[beta].to(beta_dtype)
    check_forward(kernel, operation, inputs)
    for tensor in inputs.values():
        tensor.requires_grad_()
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@by_input_dtype
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e4])
def test_constant_rows(kernel, device, dtype, value):
    """Equal elements are their own mean, so the result is beta, and the input's gradient does not blow up."""
    inputs = LAYER_NORM.inputs((3, 21), dtype, device=device)
    inputs["input"] = torch.full((1, 1), value, dtype=dtype, device=device).expand(3, 21)
    (output,) = LAYER_NORM.run(kernel, inputs)
    assert_bits_equal(output, inputs["beta"].to(dtype).expand(3, 21).contiguous())
    for tensor in inputs.values():
        tensor.requires_grad_()
    check_gradients(kernel, LAYER_NORM, inputs)


@for_each(LAYER_NORM, FUSED_ADD_LAYER_NORM)
@pytest.mark.parametrize("width", [4, 33, 1000, 9000])
@pytest.mark.parametrize("mean", [1e4, -1e4, 1e6])
def test_large_mean(kernel, device, operation, width, mean):
    inputs = operation.inputs((3, width), device=device)
    inputs["input"] = inputs["input"] + mean
    check_forward(kernel, operation, inputs)
    for tensor in inputs.values():
        tensor.requires_grad_()
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
def test_gradient_of_a_constant_row_of_large_values(kernel, device):
    """The variance is 0 and the sum of the row overflows; the gradient is the centred one over sqrt(epsilon)."""
    largest = torch.finfo(torch.float32).max
    row = torch.full((1, 64), largest, device=device, requires_grad=True)
    grad = torch.arange(64.0, device=device).remainder(2).unsqueeze(0)
    (found,) = torch.autograd.grad(kernel.layer_norm(row, torch.ones(64, device=device)), row, grad)
    torch.testing.assert_close(found, (grad - 0.5) / 1e-5**0.5)
