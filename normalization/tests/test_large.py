"""Inputs of more elements than 32 bits count."""

import pytest
from conftest import assert_bits_equal, needs_free_memory
from operations import BF16, RMS_NORM


@pytest.mark.isa_independent
def test_more_than_2_to_the_31_elements(kernel, device):
    """Offsets need more than 32 bits. The rows repeat with an odd period, so that a wrapped one is another row."""
    needs_free_memory(device, 12 << 30)
    inputs = RMS_NORM.inputs((1021, 4096), BF16, device=device)
    block = inputs["input"]
    rows = block.repeat(514, 1)
    assert rows.numel() > 2**31
    output = kernel.rms_norm(rows, inputs["gamma"])
    expected = kernel.rms_norm(block, inputs["gamma"])
    for row in (0, len(rows) // 2, 2**31 // 4096, len(rows) - 1):
        assert_bits_equal(output[row], expected[row % len(block)])
