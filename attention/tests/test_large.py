"""Tensors of more elements than 32 bits count."""

import pytest
import torch
import torch.utils.deterministic
from conftest import assert_bits_equal, needs_free_memory
from operations import BF16, normal

pytestmark = pytest.mark.isa_independent


@pytest.mark.parametrize("strategy", ["flash_accelerated", "flash_unit"])
def test_keys_beyond_2_to_the_31_elements(kernel, device, monkeypatch, strategy):
    """Of a cache, of which the mask leaves the last keys: on a CPU the pages of the others are hardly touched."""
    if BF16 not in kernel._strategies.ACCELERATED_DTYPES and strategy == "flash_accelerated":
        pytest.skip("there are no matrix units here")
    keys, width = 2**24 + 64, 128
    if device != "cpu":
        needs_free_memory(device, 3 * keys * width * 2)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    cache = torch.empty(1, 1, keys, width, dtype=BF16, device=device)
    assert cache.numel() > 2**31
    cache[:, :, -64:] = normal((64, width), BF16, device=device)
    query = normal((1, 2, 1, width), BF16, device=device, seed=1)
    options = kernel.AttentionOptions(window=(63, 0))
    output = kernel.attention(query, cache, cache, options=options, strategy=strategy)
    some = cache[:, :, -64:]
    expected = kernel.attention(query, some, some, options=options, strategy=strategy)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    assert_bits_equal(output, kernel.attention(query, cache, cache, options=options, strategy=strategy))
