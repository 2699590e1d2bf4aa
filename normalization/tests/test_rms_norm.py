"""What rms_norm and its variants have of their own; what all norms share is in test_norms.py."""

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, F16, F32, RMS_NORM, RMS_NORM_GATED, by_dtypes, by_input_dtype, for_each

pytestmark = pytest.mark.kernels_ci


@pytest.mark.small
@by_input_dtype
def test_zero_centered_gamma_is_an_offset_from_one(kernel, device, dtype):
    input = RMS_NORM.inputs((3, 40), dtype, device=device)["input"]
    gamma = torch.randint(-8, 8, (40,), device=device) / 4.0
    shifted = kernel.rms_norm(input, gamma, zero_centered=True)
    assert_bits_equal(shifted, kernel.rms_norm(input, 1 + gamma))


@pytest.mark.small
@for_each(RMS_NORM, RMS_NORM_GATED)
@by_dtypes
def test_one_rounding(kernel, device, operation, dtypes):
    """Element by element: half a unit in the last place and one percent more, in float32 four units."""
    inputs = operation.inputs((7, 65), *dtypes, device=device)
    (output,) = operation.run(kernel, inputs)
    ((exact,), _) = operation.run_exact(kernel, inputs)
    limit = torch.finfo(dtypes[0]).eps * (4 if dtypes[0] == F32 else 0.505)
    normal = exact.abs() > torch.finfo(dtypes[0]).smallest_normal
    assert ((output.cpu().double() - exact).abs() <= limit * exact.abs())[normal].all()


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
