"""rms_norm, rms_norm_gated and fused_add_rms_norm against the exact result, forward and backward."""

import pytest
import torch
from conftest import LAYOUTS, assert_bits_equal, assert_close_to_exact, guards_intact, in_layout, poisoned
from operations import (
    BF16,
    F16,
    F32,
    FUSED_ADD_RMS_NORM,
    RMS_NORM,
    RMS_NORM_GATED,
    RMS_NORMS,
    by_dtypes,
    by_input_dtype,
    by_shape,
    by_width,
    check_forward,
    check_gradients,
    check_rows_of_any_scale,
    for_each,
    for_each_with_dtypes,
    gradients,
)

pytestmark = pytest.mark.kernels_ci

# Rows of one or two elements have a gradient of the order of epsilon, far below the terms that cancel to give it: with
# a tiny epsilon the comparison would be one of noise with noise.
GRADIENT_EPSILON = 0.1


@for_each_with_dtypes(*RMS_NORMS)
@by_width
def test_widths(kernel, device, operation, dtypes, width):
    inputs = operation.inputs((5, width), *dtypes, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs, epsilon=GRADIENT_EPSILON)


@for_each(*RMS_NORMS)
@by_input_dtype
@by_shape
def test_shapes(kernel, device, operation, dtype, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(*RMS_NORMS)
@by_input_dtype
@pytest.mark.parametrize("width", [7, 16, 37])
def test_inputs_in_poisoned_storage(kernel, device, operation, dtype, width):
    inputs = {
        name: poisoned(tensor) for name, tensor in operation.inputs((3, width), dtype, dtype, device=device).items()
    }
    check_forward(kernel, operation, inputs)
    for tensor in inputs.values():
        tensor.requires_grad_()
    check_gradients(kernel, operation, inputs)
    assert all(guards_intact(tensor) for tensor in inputs.values())


@pytest.mark.small
@for_each(*RMS_NORMS)
@by_input_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, device, operation, dtype, layout):
    inputs = {
        name: in_layout(tensor, layout)
        for name, tensor in operation.inputs((2, 3, 21), dtype, device=device, requires_grad=True).items()
    }
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@by_input_dtype
def test_zero_centered_gamma_is_an_offset_from_one(kernel, device, dtype):
    input = RMS_NORM.inputs((3, 40), dtype, device=device)["input"]
    gamma = torch.randint(-8, 8, (40,), device=device) / 4.0
    shifted = kernel.rms_norm(input, gamma, zero_centered=True)
    assert_bits_equal(shifted, kernel.rms_norm(input, 1 + gamma))


@pytest.mark.small
@by_input_dtype
def test_fused_sum_is_rounded_as_pytorch_does(kernel, device, dtype):
    inputs = FUSED_ADD_RMS_NORM.inputs((3, 40), dtype, device=device)
    normalised, total = kernel.fused_add_rms_norm(**inputs)
    assert_bits_equal(total, inputs["input"] + inputs["residual"])
    assert_bits_equal(normalised, kernel.rms_norm(total, inputs["gamma"]))


@pytest.mark.small
@for_each(RMS_NORM, RMS_NORM_GATED)
@by_dtypes
def test_one_rounding(kernel, device, operation, dtypes):
    """Element by element: half a unit in the last place, and one percent more for float32 arithmetic."""
    inputs = operation.inputs((7, 65), *dtypes, device=device)
    (output,) = operation.run(kernel, inputs)
    ((exact,), _) = operation.run_exact(kernel, inputs)
    limit = torch.finfo(dtypes[0]).eps / 2 * (8 if dtypes[0] == F32 else 1.01)
    normal = exact.abs() > torch.finfo(dtypes[0]).smallest_normal
    assert ((output.cpu().double() - exact).abs() <= limit * exact.abs())[normal].all()


OVERFLOWING = [
    pytest.param(F32, 1e20, id="f32_square_overflows"),
    pytest.param(F32, 3e18, id="f32_sum_overflows"),
    pytest.param(F32, 3e38, id="f32_near_maximum"),
    pytest.param(BF16, 1e20, id="bf16_square_overflows"),
    pytest.param(BF16, 3e38, id="bf16_near_maximum"),
    pytest.param(F16, 6e4, id="f16_near_maximum"),
]


def large_rows(operation, shape, dtype, scale, device):
    """Inputs whose rows have elements up to `scale`, the largest exactly that."""
    inputs = operation.inputs(shape, dtype, device=device)
    signs = torch.linspace(-1, 1, shape[-1], device=device)
    inputs["input"] = (signs.expand(shape) * scale).to(dtype)
    if "residual" in inputs:
        inputs["residual"] = torch.zeros_like(inputs["residual"])
    return inputs


@pytest.mark.small
@for_each(*RMS_NORMS)
@pytest.mark.parametrize("width", [3, 16, 100])
@pytest.mark.parametrize("dtype, scale", OVERFLOWING)
def test_rows_whose_squares_overflow(kernel, device, operation, dtype, scale, width):
    check_rows_of_any_scale(kernel, operation, large_rows(operation, (4, width), dtype, scale, device), scale)


@pytest.mark.small
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "scale, epsilon",
    [
        pytest.param(1e-30, 1e-30, id="epsilon_dominates"),
        pytest.param(1e-30, 1e-60, id="epsilon_below_float32"),
        pytest.param(1e-22, 1e-44, id="squares_are_subnormal"),
        pytest.param(1e-19, 1e-38, id="squares_are_at_the_smallest_normal"),
        pytest.param(1e-38, 1e-300, id="row_is_subnormal"),
        pytest.param(0.0, 1e-300, id="zero_row"),
        pytest.param(1.0, 1e-300, id="epsilon_vanishes"),
        pytest.param(1.0, 1e30, id="large_epsilon"),
        pytest.param(1e15, 1e40, id="epsilon_above_float32"),
        pytest.param(1e25, 1e50, id="epsilon_and_squares_above_float32"),
        pytest.param(1.0, 1e300, id="epsilon_wins"),
    ],
)
@pytest.mark.parametrize("width", [3, 50])
def test_extreme_rows_and_epsilons(kernel, device, dtype, scale, epsilon, width):
    inputs = RMS_NORM.inputs((2, width), dtype, device=device)
    inputs["input"] = inputs["input"] * scale
    (output,) = RMS_NORM.run(kernel, inputs, epsilon=epsilon)
    (exact,), _ = RMS_NORM.run_exact(kernel, inputs, epsilon=epsilon)
    assert_close_to_exact(output, exact)


@pytest.mark.small
@for_each(*RMS_NORMS)
@by_input_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus_inf"])
def test_a_row_that_is_not_finite_disturbs_no_other(kernel, device, operation, dtype, value):
    clean = operation.inputs((5, 21), dtype, device=device, requires_grad=True)
    dirty = {name: tensor.detach().clone() for name, tensor in clean.items()}
    dirty["input"][2, 4] = value
    for tensor in dirty.values():
        tensor.requires_grad_()
    outputs, clean_outputs = operation.run(kernel, dirty), operation.run(kernel, clean)
    exact, _ = operation.run_exact(kernel, dirty)
    others = [0, 1, 3, 4]
    for output, clean_output, exact_output in zip(outputs, clean_outputs, exact, strict=True):
        assert_bits_equal(output[others], clean_output[others])
        assert_close_to_exact(output[2], exact_output[2])
    grads = [torch.ones_like(output) for output in outputs]
    found, clean_found = gradients(outputs, dirty, grads), gradients(clean_outputs, clean, grads)
    for name in operation.rows:
        assert_bits_equal(found[name][others], clean_found[name][others])


# Every 16-bit pattern goes through the conversions: by way of gamma, of the input, and of the sum.
PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_every_16_bit_gamma_is_widened_and_rounded_exactly(kernel, device, dtype):
    """A row of ones has the norm 1 to the last bit, so the output is gamma."""
    gamma = PATTERNS.to(device).view(dtype)
    output = kernel.rms_norm(torch.ones_like(gamma), gamma, 1e-30)
    assert_same_numbers(output, gamma)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_every_16_bit_sum_is_rounded_to_nearest_even(kernel, device, dtype):
    """Each pattern plus zero, and plus one that makes the sum inexact; rows of odd width, so that tails take part."""
    patterns = torch.cat([PATTERNS, PATTERNS[:256]]).to(device).view(dtype).view(256, 257)
    gamma = torch.ones(257, device=device)
    for residual in (torch.zeros_like(patterns), patterns.roll(12345)):
        _, total = kernel.fused_add_rms_norm(patterns, residual, gamma)
        assert_same_numbers(total, patterns + residual)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_float32_is_rounded_to_nearest_even(kernel, device, dtype):
    """The output is gamma, here float32: half-way cases, subnormals and overflow to infinity."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).to(torch.int32).view(F32)
    patterns = PATTERNS.view(dtype).float()
    half_way = (patterns[:-1] + patterns[1:]) / 2
    gamma = torch.cat([random, half_way, half_way.nextafter(torch.tensor(torch.inf)), -half_way]).to(device)
    output = kernel.rms_norm(torch.ones(gamma.numel(), dtype=dtype, device=device), gamma, 1e-30)
    assert_same_numbers(output, gamma.to(dtype))


def assert_same_numbers(output, expected):
    """Equal dtype and values; any NaN will do for a NaN."""
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
