"""The rows of tokens grouped by expert: the maps, choices that are left out, and the way back."""

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact, in_layout
from operations import F32, Shape, by_dtype, make_indices, normal

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

SHAPES = [
    pytest.param(Shape(1, 1, 1, 1, 1), id="single_row"),
    pytest.param(Shape(5, 4, 2, 19, 1), id="odd_sizes", marks=pytest.mark.simt_checked),
    pytest.param(Shape(3, 40, 2, 16, 1), id="more_experts_than_rows"),
    pytest.param(Shape(70, 7, 3, 33, 1), id="many_tokens", marks=pytest.mark.simt_checked),
    pytest.param(Shape(9, 300, 9, 8, 1), id="many_experts"),
    pytest.param(Shape(130, 2, 2, 4, 1), id="long_experts"),
    pytest.param(Shape(900, 2100, 3, 4, 1), id="more_experts_than_a_warp_counts"),
]
MAPS = ("expert_offsets", "row_experts", "row_tokens", "row_slots", "slot_rows")


def plan_with(kernel, indices, experts, dtype=F32):
    return kernel.RoutingPlan(indices, torch.ones(indices.shape, dtype=dtype, device=indices.device), experts)


def assert_dispatched(kernel, dispatched, input, indices, experts):
    values, *maps = kernel.reference.dispatch(input.cpu(), indices.cpu(), experts)
    assert_bits_equal(dispatched.values.cpu(), values)
    for name, expected in zip(MAPS, maps):
        found = getattr(dispatched, name)
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), expected), name


@by_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_and_maps(kernel, device, dtype, shape, kind):
    input = normal((shape.tokens, shape.hidden), dtype, device=device)
    indices = make_indices(shape, device=device).to(kind)
    dispatched = plan_with(kernel, indices, shape.experts).dispatch(input)
    assert_dispatched(kernel, dispatched, input, indices, shape.experts)


@by_dtype
def test_repeated_experts_of_a_token(kernel, device, dtype):
    input = normal((4, 5), dtype, device=device)
    indices = torch.tensor([[1, 1], [0, 1], [2, 2], [1, 0]], dtype=torch.int32, device=device)
    dispatched = plan_with(kernel, indices, 3).dispatch(input)
    assert_dispatched(kernel, dispatched, input, indices, 3)


LEFT_OUT = {
    "one_past_the_last": 5,
    "minus_one": -1,
    "far": 2**31 - 1,
    "far_below": -(2**31),
    "past_32_bits": 2**32 + 1,
}


@by_dtype
@pytest.mark.parametrize("index", LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("tokens", [3, 40])
def test_choices_that_are_left_out(kernel, device, dtype, index, tokens):
    """No row, and the rows at the end are zeros that are nobody's."""
    input = normal((tokens, 6), dtype, device=device)
    indices = make_indices(Shape(tokens, 5, 3, 6, 1), device=device).long()
    indices[1, 2] = index
    indices[2] = index
    dispatched = plan_with(kernel, indices, 5).dispatch(input)
    assert_dispatched(kernel, dispatched, input, indices, 5)
    assert dispatched.expert_offsets[-1] == 3 * tokens - 4
    assert not dispatched.values[-4:].any()
    assert (dispatched.slot_rows == -1).sum() == 4


def test_everything_left_out(kernel, device):
    indices = torch.full((3, 2), 9, device=device)
    dispatched = plan_with(kernel, indices, 4).dispatch(normal((3, 5), F32, device=device))
    assert not dispatched.values.any()
    assert dispatched.expert_offsets.tolist() == [0] * 5
    for name in MAPS[1:]:
        assert (getattr(dispatched, name) == -1).all()


def test_no_tokens(kernel, device):
    indices = torch.zeros(0, 2, dtype=torch.int32, device=device)
    dispatched = plan_with(kernel, indices, 3).dispatch(torch.ones(0, 7, device=device))
    assert dispatched.values.shape == (0, 7)
    assert dispatched.expert_offsets.tolist() == [0, 0, 0, 0]
    assert dispatched.slot_rows.shape == (0, 2)
    assert dispatched.dispatch_backward(torch.ones(0, 7, device=device)).shape == (0, 7)
    assert dispatched.combine(torch.ones(0, 7, device=device)).shape == (0, 7)


def test_rows_of_no_elements(kernel, device):
    dispatched = plan_with(kernel, torch.tensor([[1], [0]], device=device), 2).dispatch(torch.ones(2, 0, device=device))
    assert dispatched.values.shape == (2, 0)
    assert dispatched.row_tokens.tolist() == [1, 0]


def test_what_an_input_holds_is_copied(kernel, device):
    """NaN and infinity too, and a zero's sign."""
    input = torch.tensor([[torch.nan, -0.0], [torch.inf, 1e-42]], device=device)
    dispatched = plan_with(kernel, torch.tensor([[1, 0], [0, 1]], device=device), 2).dispatch(input)
    assert_bits_equal(dispatched.values, input[dispatched.row_tokens.long()])


@by_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_dispatch_backward(kernel, device, dtype, shape):
    """Each token's rows are added up, and no weight is applied again."""
    indices = make_indices(shape, device=device)
    rows = shape.tokens * shape.top_k
    grad = normal((rows, shape.hidden), dtype, device=device)
    input = normal((shape.tokens, shape.hidden), dtype, device=device).requires_grad_()
    dispatched = kernel.RoutingPlan(indices, torch.full(indices.shape, 0.5, device=device), shape.experts).dispatch(
        input
    )
    found = dispatched.dispatch_backward(grad)
    chosen = grad[dispatched.slot_rows.long()]
    assert_close_to_exact(found, chosen.cpu().double().sum(1), chosen.sum(1))
    (by_autograd,) = torch.autograd.grad(dispatched.values, input, grad)
    assert_bits_equal(by_autograd, found)


def test_dispatch_backward_of_choices_that_are_left_out(kernel, device):
    indices = torch.tensor([[0, 7], [7, 7]], device=device)
    dispatched = plan_with(kernel, indices, 2).dispatch(torch.ones(2, 3, device=device))
    grad = torch.full((4, 3), torch.nan, device=device)
    grad[0] = 2
    assert dispatched.dispatch_backward(grad).tolist() == [[2, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("layout", ["transposed", "every_second", "offset", "expanded_rows"])
def test_dispatch_backward_of_another_layout(kernel, device, layout):
    dispatched = plan_with(kernel, make_indices(Shape(5, 4, 2, 6, 1), device=device), 4).dispatch(
        torch.ones(5, 6, device=device)
    )
    grad = in_layout(normal((10, 6), F32, device=device), layout)
    assert_bits_equal(dispatched.dispatch_backward(grad), dispatched.dispatch_backward(grad.contiguous()))


@pytest.mark.parametrize("value", [-2, -1, 10, 2**31 - 1, -(2**31)])
def test_ops_do_not_trust_the_maps(ops, device, value):
    """An entry out of range adds nothing, and nothing is read or written out of bounds."""
    slot_rows = torch.tensor([[0, 1], [2, value]], dtype=torch.int32, device=device)
    row_slots = torch.tensor([0, 1, 2, value], dtype=torch.int32, device=device)
    rows, weights = normal((4, 5), F32, device=device), normal((2, 2), F32, device=device, seed=1)
    grad = normal((2, 5), F32, device=device, seed=2)
    combined = ops.combine(rows, weights, slot_rows)
    torch.testing.assert_close(combined[1], weights[1, 0] * rows[2])
    assert_bits_equal(ops.dispatch_backward(rows, slot_rows)[1], rows[2])
    grad_rows, grad_weights = ops.combine_backward(grad, rows, weights, row_slots, slot_rows, False, True, True)
    assert not grad_rows[3].any()
    assert grad_weights[1, 1] == 0
