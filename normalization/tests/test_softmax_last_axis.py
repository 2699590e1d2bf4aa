"""softmax_last_axis against the exact result, forward and backward."""

import pytest
import torch
from conftest import (
    LAYOUTS,
    assert_bits_equal,
    assert_close_to_exact,
    guards_intact,
    in_layout,
    poisoned,
)
from operations import (
    BF16,
    F32,
    SOFTMAX_LAST_AXIS,
    by_input_dtype,
    by_shape,
    by_width,
    check_forward,
    check_gradients,
    gradients,
)

pytestmark = pytest.mark.kernels_ci


@by_input_dtype
@by_width
def test_widths(kernel, device, dtype, width):
    rows = 5 if width < 1000 else 2  # the bench takes long for long rows
    inputs = SOFTMAX_LAST_AXIS.inputs((rows, width), dtype, device=device, requires_grad=True)
    check_forward(kernel, SOFTMAX_LAST_AXIS, inputs)
    check_gradients(kernel, SOFTMAX_LAST_AXIS, inputs)


@by_input_dtype
@by_shape
def test_shapes(kernel, device, dtype, shape):
    inputs = SOFTMAX_LAST_AXIS.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, SOFTMAX_LAST_AXIS, inputs)
    check_gradients(kernel, SOFTMAX_LAST_AXIS, inputs)


@pytest.mark.small
@by_input_dtype
@pytest.mark.parametrize("width", [7, 16, 37])
def test_input_in_poisoned_storage(kernel, device, dtype, width):
    inputs = SOFTMAX_LAST_AXIS.inputs((3, width), dtype, device=device, requires_grad=True)
    inputs["input"] = poisoned(inputs["input"])
    check_forward(kernel, SOFTMAX_LAST_AXIS, inputs)
    check_gradients(kernel, SOFTMAX_LAST_AXIS, inputs)
    assert guards_intact(inputs["input"])


@pytest.mark.small
@by_input_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, device, dtype, layout):
    inputs = SOFTMAX_LAST_AXIS.inputs((2, 3, 21), dtype, device=device, requires_grad=True)
    inputs["input"] = in_layout(inputs["input"], layout)
    check_forward(kernel, SOFTMAX_LAST_AXIS, inputs)
    check_gradients(kernel, SOFTMAX_LAST_AXIS, inputs)


@by_input_dtype
@pytest.mark.parametrize("spread", [0.01, 10.0, 100.0, 1e4])
@pytest.mark.parametrize("width", [3, 100, 5000])
def test_spread_of_the_scores(kernel, device, dtype, spread, width):
    inputs = SOFTMAX_LAST_AXIS.inputs((3, width), dtype, device=device)
    inputs["input"] = inputs["input"] * spread
    check_forward(kernel, SOFTMAX_LAST_AXIS, inputs)


@pytest.mark.small
@by_input_dtype
def test_elements_are_relatively_right(kernel, device, dtype):
    """Small probabilities too, where the tolerance rule looks at the largest: every score down to -80."""
    scores = torch.linspace(-80, 0, 321, device=device).to(dtype)
    output = kernel.softmax_last_axis(scores).cpu().double()
    exact = kernel.reference.softmax_last_axis(scores.cpu(), compute_dtype=torch.float64)
    eps = max(torch.finfo(dtype).eps, 100 * torch.finfo(F32).eps)
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((output - exact).abs() <= eps * exact + spacing).all()


@pytest.mark.small
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [2, 16, 100])
def test_scores_near_the_largest_number(kernel, device, dtype, width):
    """The difference from the maximum overflows to -inf, whose exponential is 0."""
    scores = (torch.linspace(-1, 1, width, device=device) * 3e38).to(dtype)
    assert scores.isfinite().all()
    expected = torch.zeros_like(scores)
    expected[-1] = 1
    assert_bits_equal(kernel.softmax_last_axis(scores), expected)


@pytest.mark.small
@by_input_dtype
@pytest.mark.parametrize("width", [3, 16, 100])
def test_rows_that_are_not_finite(kernel, device, dtype, width):
    """NaN, +inf or only -inf gives NaN; -inf beside a number is 0; no other row is disturbed."""
    clean = SOFTMAX_LAST_AXIS.inputs((6, width), dtype, device=device)["input"]
    scores = clean.clone()
    scores[1, -1] = torch.nan
    scores[2, 0] = torch.inf
    scores[3] = -torch.inf
    scores[4, 1] = -torch.inf
    output = kernel.softmax_last_axis(scores)
    assert output[1:4].isnan().all()
    assert output[4, 1] == 0
    assert_close_to_exact(output, kernel.reference.softmax_last_axis(scores.cpu(), compute_dtype=torch.float64))
    others = [0, 5]
    assert_bits_equal(output[others], kernel.softmax_last_axis(clean)[others])


@pytest.mark.small
@by_input_dtype
def test_gradient_of_rows_that_are_not_finite_disturbs_no_other(kernel, device, dtype):
    clean = SOFTMAX_LAST_AXIS.inputs((5, 21), dtype, device=device, requires_grad=True)
    dirty = {"input": clean["input"].detach().clone()}
    dirty["input"][2, 4] = torch.nan
    dirty["input"].requires_grad_()
    grad = torch.randn(5, 21, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    found = gradients(SOFTMAX_LAST_AXIS.run(kernel, dirty), dirty, [grad])["input"]
    clean_found = gradients(SOFTMAX_LAST_AXIS.run(kernel, clean), clean, [grad])["input"]
    others = [0, 1, 3, 4]
    assert_bits_equal(found[others], clean_found[others])


@pytest.mark.small
@by_input_dtype
def test_a_masked_score_has_no_gradient(kernel, device, dtype):
    scores = torch.zeros(1, 20, dtype=dtype, device=device)
    scores[0, 7] = -torch.inf
    scores.requires_grad_()
    grad = torch.arange(20.0, device=device).to(dtype).view(1, 20)
    kernel.softmax_last_axis(scores).backward(grad)
    assert scores.grad[0, 7] == 0
    assert scores.grad.isfinite().all()
