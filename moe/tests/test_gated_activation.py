"""What the gated activations have of their own; shapes and layouts are in test_numbers.py."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_bits_equal, assert_close_to_exact
from operations import ACTIVATIONS, F32, by_dtype, check_forward, check_gradients, for_each

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]


@for_each(*ACTIVATIONS)
@by_dtype
@pytest.mark.parametrize("shape", [(2,), (6,), (2, 3, 10), (2, 1, 2, 34), (0, 4), (3, 0, 4)])
def test_ranks(kernel, device, operation, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()
    check_forward(kernel, operation, {"input": input})
    check_gradients(kernel, operation, {"input": input})


@for_each(*ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 17, 33, 130, 1000])
def test_widths(kernel, device, operation, width):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn((3, 2 * width), generator=generator).to(device).requires_grad_()
    check_forward(kernel, operation, {"input": input})
    check_gradients(kernel, operation, {"input": input})


@for_each(*ACTIVATIONS)
@by_dtype
def test_every_magnitude(kernel, device, operation, dtype):
    """Element by element in the places where exponentials overflow and vanish; neither NaN nor infinity appears."""
    values = torch.cat([torch.linspace(-120, 120, 241), torch.tensor([-1e4, 1e4, -1e-4, 1e-4, 0.0])])
    input = torch.stack([values, torch.ones_like(values)], -1).to(dtype).to(device).requires_grad_()
    output = operation.run(kernel, {"input": input})
    exact, leaves = operation.run_exact(kernel, {"input": input})
    (grad,) = torch.autograd.grad(output, input, torch.ones_like(output))
    (exact_grad,) = torch.autograd.grad(exact, leaves["input"], torch.ones_like(exact))
    assert output.isfinite().all()
    assert grad.isfinite().all()
    assert_close_to_exact(output, exact)
    assert_close_to_exact(grad, exact_grad)


@pytest.mark.parametrize(
    "operation, least",
    [(operation, -9 if operation.id == "silu_and_mul" else -3) for operation in ACTIVATIONS],
    ids=str,
)
def test_small_values_are_relatively_right(kernel, device, operation, least):
    """Where the tolerance rule looks at the largest only: a tail, and small numbers."""
    values = torch.cat([torch.linspace(least, -1, 65), torch.logspace(-6, 0, 25)])
    input = torch.stack([values, torch.ones_like(values)], -1).to(device)
    output = operation.run(kernel, {"input": input}).cpu().double()
    exact, _ = operation.run_exact(kernel, {"input": input})
    plain = operation.plain({"input": input}).cpu().double()
    loss = ((plain - exact) / exact).abs()
    assert (((output - exact) / exact).abs() <= 2 * loss.max() + 4 * torch.finfo(F32).eps).all()


@for_each(*ACTIVATIONS)
@by_dtype
def test_rows_that_are_not_finite_disturb_no_other(kernel, device, operation, dtype):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn((4, 14), generator=generator).to(dtype).to(device)
    dirty = clean.clone()
    dirty[1, 3] = torch.nan
    dirty[2, 9] = torch.inf
    output, expected = (operation.run(kernel, {"input": each}) for each in (dirty, clean))
    assert output[1, 3].isnan()
    assert output[2, 2].isinf()
    others = torch.ones_like(output, dtype=torch.bool)
    others[1, 3] = others[2, 2] = False
    assert_bits_equal(output[others], expected[others])


@by_dtype
def test_the_halves_are_not_exchanged(kernel, device, dtype):
    input = torch.tensor([[2.0, 3.0, 5.0, 7.0]], dtype=dtype, device=device)
    expected = F.silu(input[:, :2].float()) * input[:, 2:].float()
    torch.testing.assert_close(kernel.silu_and_mul(input), expected.to(dtype))
