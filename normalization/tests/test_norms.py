"""All RMS and layer norms against the exact result, forward and backward."""

import pytest
import torch
from conftest import (
    LAYOUTS,
    assert_bits_equal,
    assert_close_to_exact,
    flushes_subnormals,
    guards_intact,
    in_layout,
    only_on_the_cpu,
    poisoned,
)
from operations import (
    BF16,
    F16,
    F32,
    FUSED_ADD_LAYER_NORM,
    FUSED_ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_WITHOUT_BETA,
    LAYER_NORMS,
    NORMS,
    OPERATIONS,
    RMS_NORM,
    RMS_NORM_GATED,
    RMS_NORM_ZERO_CENTERED,
    SOFTMAX_LAST_AXIS,
    by_input_dtype,
    by_shape,
    by_width,
    check_forward,
    check_gradients,
    check_rows_of_any_scale,
    for_each,
    for_each_with_dtypes,
    gradients,
    random_gradients,
)

pytestmark = pytest.mark.kernels_ci

# Rows of one or two elements have a gradient of the order of epsilon, far below the terms that cancel to give it: with
# a tiny epsilon the comparison would be one of noise with noise.
GRADIENT_EPSILON = 0.1


@for_each_with_dtypes(*NORMS)
@by_width
def test_widths(kernel, device, operation, dtypes, width):
    rows = 5 if width < 1000 else 2  # the bench takes long for long rows
    inputs = operation.inputs((rows, width), *dtypes, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs, epsilon=GRADIENT_EPSILON)


@for_each(*NORMS)
@by_input_dtype
@by_shape
def test_shapes(kernel, device, operation, dtype, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(RMS_NORM, LAYER_NORM, SOFTMAX_LAST_AXIS)
@pytest.mark.parametrize("shape", [(16400, 3), (4100, 257)], ids=["warps", "blocks"])
def test_more_rows_than_a_grid_has_room_for(kernel, device, operation, shape):
    inputs = operation.inputs(shape, device=device, requires_grad=True)
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(*NORMS)
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
@for_each(*OPERATIONS)
@by_input_dtype
@pytest.mark.parametrize(
    "width",
    [
        pytest.param(12, id="vectors_of_four", marks=pytest.mark.simt_checked),
        pytest.param(72, id="warp_of_vectors"),
        pytest.param(2056, id="block_of_vectors"),
    ],
)
def test_an_offset_changes_no_bit(kernel, device, operation, dtype, width):
    """Neither in results nor in gradients, though vectors of elements need an address to match."""
    inputs = operation.inputs((3, width), dtype, device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    grads = random_gradients(outputs)
    shifted = {name: poisoned(tensor) for name, tensor in inputs.items()}
    shifted_outputs = operation.run(kernel, shifted)
    found, expected = gradients(shifted_outputs, shifted, grads), gradients(outputs, inputs, grads)
    for output, other in zip(shifted_outputs, outputs, strict=True):
        assert_bits_equal(output, other)
    for name, grad in found.items():
        assert_bits_equal(grad, expected[name])


LAYOUT_CASES = [
    pytest.param(operation, layout, id=f"{operation}-{layout}")
    for operation in NORMS
    for layout in LAYOUTS
    # A layer norm of equal elements is test_constant_rows.
    if not (operation in LAYER_NORMS and layout == "expanded_columns")
]


@pytest.mark.small
@pytest.mark.parametrize("operation, layout", LAYOUT_CASES)
@by_input_dtype
def test_layouts(kernel, device, operation, dtype, layout):
    inputs = {
        name: in_layout(tensor, layout)
        for name, tensor in operation.inputs((2, 3, 21), dtype, device=device, requires_grad=True).items()
    }
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(*NORMS)
@pytest.mark.parametrize("row", ["one_magnitude", "equal", "one_outlier"])
@pytest.mark.parametrize("width", [257, 1025, 2047, 4097, 8191])
@pytest.mark.parametrize("magnitude", [0.3, 6e4])
def test_rows_that_are_rounded_to_one_side(kernel, device, operation, row, width, magnitude):
    """Where roundings of equal terms add up, or each addition to the square of an outlier rounds."""
    if row == "equal" and operation in LAYER_NORMS:
        pytest.skip("a layer norm of equal elements is test_constant_rows")
    inputs = operation.inputs((1, width), device=device)
    values = torch.full((1, width), magnitude)
    if row == "one_magnitude":
        values = values.copysign(inputs["input"].cpu())
    elif row == "one_outlier":
        values[0, width // 2] *= 100
    inputs["input"] = values.to(device)
    if "residual" in inputs:
        inputs["residual"] = torch.zeros_like(inputs["input"])
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    check_forward(kernel, operation, inputs)
    check_gradients(kernel, operation, inputs)


@pytest.mark.small
@for_each(FUSED_ADD_RMS_NORM, FUSED_ADD_LAYER_NORM)
@by_input_dtype
def test_fused_sum_is_rounded_as_pytorch_does(kernel, device, operation, dtype):
    inputs = operation.inputs((3, 40), dtype, device=device)
    normalised, total = operation.run(kernel, inputs)
    assert_bits_equal(total, inputs.pop("input") + inputs.pop("residual"))
    norm = getattr(kernel, operation.name.removeprefix("fused_add_"))
    assert_bits_equal(normalised, norm(total, **inputs))


OVERFLOWING = [
    pytest.param(F32, 1e20, id="f32_square_overflows"),
    pytest.param(F32, 3e18, id="f32_sum_overflows"),
    pytest.param(F32, 3e38, id="f32_near_maximum"),
    pytest.param(BF16, 1e20, id="bf16_square_overflows"),
    pytest.param(BF16, 3e38, id="bf16_near_maximum"),
    pytest.param(F16, 6e4, id="f16_near_maximum"),
]


def large_rows(operation, shape, dtype, scale, device):
    """Rows with elements up to `scale`, most of them negative, so that the centred ones pass the largest number."""
    inputs = operation.inputs(shape, dtype, device=device)
    ramp = 1 - 2 * torch.linspace(0, 1, shape[-1], device=device) ** 0.25
    inputs["input"] = (ramp.expand(shape) * scale).to(dtype)
    if "residual" in inputs:
        inputs["residual"] = torch.zeros_like(inputs["residual"])
    return inputs


@pytest.mark.small
@pytest.mark.simt_checked
@for_each(*NORMS)
@pytest.mark.parametrize("width", [3, 16, 100])
@pytest.mark.parametrize("dtype, scale", OVERFLOWING)
def test_rows_whose_squares_overflow(kernel, device, operation, dtype, scale, width):
    inputs = large_rows(operation, (4, width), dtype, scale, device)
    # The incoming gradient grows along, or the input's would leave the normal numbers.
    check_rows_of_any_scale(kernel, operation, inputs, scale, gradient_scale=min(scale, 1e3 if dtype is F16 else 1e9))


WIDE = [257, 2056, 4103, 16400]  # a block of threads has the row, and holds all of it or a part


@pytest.mark.small
@pytest.mark.simt_checked
@for_each(RMS_NORM, RMS_NORM_GATED, LAYER_NORM)
@pytest.mark.parametrize("width", WIDE)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_wide_rows_whose_squares_overflow(kernel, device, operation, dtype, width):
    inputs = large_rows(operation, (2, width), dtype, 1e30, device)
    check_rows_of_any_scale(kernel, operation, inputs, 1e30, gradient_scale=1e3)


@pytest.mark.small
@pytest.mark.simt_checked
@for_each(RMS_NORM, LAYER_NORM)
@pytest.mark.parametrize("width", [16, *WIDE])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_rows_that_are_not_finite_keep_to_themselves(kernel, device, operation, width, value):
    """Their gradients too, and the other rows have the bits that they have without them."""
    clean = operation.inputs((3, width), device=device, requires_grad=True)
    dirty = {name: tensor.detach().clone().requires_grad_() for name, tensor in clean.items()}
    with torch.no_grad():
        dirty["input"][1, width // 2] = value
    outputs, clean_outputs = operation.run(kernel, dirty), operation.run(kernel, clean)
    grads = random_gradients(clean_outputs)
    found = gradients(outputs, dirty, grads)["input"]
    expected = gradients(clean_outputs, clean, grads)["input"]
    for row in (0, 2):
        assert_bits_equal(outputs[0][row], clean_outputs[0][row])
        assert_bits_equal(found[row], expected[row])
    assert not outputs[0][1].isfinite().all()
    assert not found[1].isfinite().all()


@pytest.mark.small
@for_each(*NORMS)
@pytest.mark.parametrize("width", [4, 16, 257])
def test_gradients_whose_sum_overflows(kernel, device, operation, width):
    """Sums over a row of the gradient leave float32's range, their means do not."""
    inputs = operation.inputs((3, width), device=device)
    inputs["gamma"] = torch.ones_like(inputs["gamma"]) - (1 if operation is RMS_NORM_ZERO_CENTERED else 0)
    inputs = {name: tensor.requires_grad_(name == "input") for name, tensor in inputs.items()}
    outputs = operation.run(kernel, inputs)
    first, *others = random_gradients(outputs)
    grads = [first.abs() * 5e37, *(torch.zeros_like(other) for other in others)]
    found = gradients(outputs, inputs, grads)["input"]
    exact_outputs, leaves = operation.run_exact(kernel, inputs)
    exact = gradients(exact_outputs, leaves, [grad.cpu().double() for grad in grads])["input"]
    usual = gradients(operation.run(kernel, inputs), inputs, [grad / 2.0**40 for grad in grads])["input"]
    assert_close_to_exact(found, exact, (usual.double() * 2.0**40).to(F32))


@pytest.mark.small
@for_each(*NORMS)
@pytest.mark.parametrize("width", [16, 257])
def test_an_infinite_gradient_leaves_its_row_no_finite_gradient(kernel, device, operation, width):
    inputs = operation.inputs((3, width), device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    grads = random_gradients(outputs)
    grads[0][1, 3] = torch.inf
    found = gradients(outputs, inputs, grads)["input"]
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


@pytest.mark.small
@for_each(*NORMS)
@pytest.mark.parametrize("width", [3, 16, 100])
def test_large_gradients_of_large_rows(kernel, device, operation, width):
    """The product of the two overflows float32; the gradients themselves do not."""
    inputs = large_rows(operation, (4, width), F32, 1e18, device)
    check_rows_of_any_scale(kernel, operation, inputs, 1e18, gradient_scale=1e20)


@pytest.fixture
def flushed_subnormals(device):
    """Makes this thread read and write zero for subnormal numbers, as inference servers do."""
    only_on_the_cpu(device, "what its threads flush is no matter to kernels elsewhere")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.small
@for_each(RMS_NORM, LAYER_NORM)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_large_rows_where_subnormals_are_flushed(kernel, device, operation, dtype, flushed_subnormals):
    """The inverse of a number near the largest one is subnormal."""
    inputs = large_rows(operation, (4, 100), dtype, 3e38, device)
    check_rows_of_any_scale(kernel, operation, inputs, 3e38, gradient_scale=1e3)


@pytest.mark.small
@for_each(RMS_NORM, LAYER_NORM_WITHOUT_BETA)  # a beta would hide small results
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
def test_extreme_rows_and_epsilons(kernel, device, operation, dtype, scale, epsilon, width):
    if scale == 1e-38 and flushes_subnormals(device):
        pytest.skip("the kernels take such a row for one of zeros")
    inputs = operation.inputs((2, width), dtype, device=device)
    inputs["input"] = inputs["input"] * scale
    (output,) = operation.run(kernel, inputs, epsilon=epsilon)
    (exact,), _ = operation.run_exact(kernel, inputs, epsilon=epsilon)
    assert_close_to_exact(output, exact)


@pytest.mark.small
@for_each(*NORMS)
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
