"""Tensors of more elements than 32 bits count."""

import pytest
import torch
import torch.utils.deterministic
from conftest import assert_bits_equal, needs_free_memory
from operations import BF16, F32, by_strategy, normal

pytestmark = pytest.mark.isa_independent


@by_strategy
def test_weights_of_more_than_2_to_the_32_elements(kernel, device, monkeypatch, dtype, strategy):
    """The last expert's rows lie beyond. On a CPU the pages of experts that no token chooses are never touched."""
    experts, hidden, intermediate = 2**16 + 2, 256, 128
    if device != "cpu":
        needs_free_memory(device, 3 * (experts + 4096) * hidden * intermediate * dtype.itemsize)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=dtype, device=device)
    down = torch.empty(experts, hidden, intermediate, dtype=dtype, device=device)
    assert gate_up.numel() > 2**32
    assert down.numel() > 2**31
    chosen = [0, experts // 2, experts - 1]
    for expert in chosen:
        gate_up[expert] = normal(gate_up.shape[1:], dtype, device=device, seed=expert) / 16
        down[expert] = normal(down.shape[1:], dtype, device=device, seed=expert + 1) / 11
    input, weights = normal((3, hidden), dtype, device=device), torch.ones(3, 1, device=device)

    def run(gate_up, down, indices):
        plan = kernel.RoutingPlan(torch.tensor(indices, device=device).view(3, 1), weights, down.shape[0])
        dispatched = plan.dispatch(input)
        return dispatched.combine(kernel.SwiGluExperts(gate_up, None, down).forward_dispatched(dispatched, strategy))

    assert_bits_equal(run(gate_up, down, chosen), run(gate_up[chosen], down[chosen], [0, 1, 2]))


def test_rows_of_more_than_2_to_the_31_elements(kernel, device):
    """Rows repeat with an odd period, so that a wrapped one is another row."""
    needs_free_memory(device, 18 << 30)
    block = normal((1021, 4096), BF16, device=device)
    input = block.repeat(514, 1)
    assert input.numel() > 2**31
    indices = torch.arange(len(input), device=device).view(-1, 1) % 3
    plan = kernel.RoutingPlan(indices, torch.ones(indices.shape, dtype=F32, device=device), 3)
    dispatched = plan.dispatch(input)
    for row in (0, len(input) // 2, 2**31 // 4096, len(input) - 1):
        assert_bits_equal(dispatched.values[row], block[dispatched.row_tokens[row] % 1021])
    output = dispatched.combine(dispatched.values)
    for token in (0, len(input) // 2, 2**31 // 4096, len(input) - 1):
        assert_bits_equal(output[token], block[token % 1021])
