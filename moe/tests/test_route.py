"""Which experts `route` chooses; the numbers are in test_numbers.py."""

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact
from operations import BF16, F32, by_dtype, gradients, normal, random_gradient, softmax_router, spread_logits

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

by_experts = pytest.mark.parametrize(
    "experts, top_k",
    [
        pytest.param(1, 1, id="single_expert"),
        pytest.param(3, 3, id="all_experts"),
        pytest.param(8, 2, id="few"),
        pytest.param(17, 5, id="one_past_a_vector"),
        pytest.param(60, 4, id="not_a_power_of_two", marks=pytest.mark.simt_checked),
        pytest.param(128, 8, id="many", marks=pytest.mark.simt_checked),
        pytest.param(512, 10, id="more_than_a_warp_holds"),
        pytest.param(500, 70, id="more_chosen_than_a_warp_has_threads"),
    ],
)


@by_experts
@by_dtype
@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalized"])
def test_choice_weights_and_gradient(kernel, device, experts, top_k, dtype, renormalize):
    options = kernel.RoutingOptions(top_k, renormalize)
    logits = spread_logits(5, experts, dtype, device=device).requires_grad_()
    plan = kernel.route(logits, options)
    exact_logits = logits.detach().cpu().double().requires_grad_()
    exact_indices, exact = kernel.reference.route(exact_logits, options, compute_dtype=torch.float64)
    indices, plain = softmax_router(logits, top_k, renormalize)
    assert plan.expert_indices.dtype == torch.int32
    assert plan.experts == experts
    assert torch.equal(plan.expert_indices.cpu(), exact_indices)
    assert torch.equal(plan.expert_indices.long(), indices)
    assert plan.weights.dtype == dtype
    assert_close_to_exact(plan.weights, exact, plain)
    grad = random_gradient(plan.weights)
    (found,) = torch.autograd.grad(plan.weights, logits, grad)
    (exact_found,) = torch.autograd.grad(exact, exact_logits, grad.cpu().double())
    (plain_found,) = torch.autograd.grad(plain, logits, grad)
    assert found.dtype == dtype
    assert_close_to_exact(found, exact_found, plain_found)


@by_dtype
@pytest.mark.parametrize("experts", [5, 16, 37, 200, 1500])
def test_equal_scores_favour_the_lower_expert(kernel, device, dtype, experts):
    logits = torch.zeros(3, experts, dtype=dtype, device=device)
    logits[1, experts - 1] = 1
    logits[2, 1::2] = 1
    plan = kernel.route(logits, kernel.RoutingOptions(4))
    odd = list(range(1, experts, 2))
    even = list(range(0, experts, 2))
    assert plan.expert_indices.tolist() == [[0, 1, 2, 3], [experts - 1, 0, 1, 2], (odd + even)[:4]]


def test_scores_that_vanish_are_equal(kernel, device):
    """Far below the largest, all scores are 0 in float32, so the lower expert comes first."""
    logits = torch.tensor([[-400.0, 0.0, -200.0, -300.0]], device=device)
    plan = kernel.route(logits, kernel.RoutingOptions(3))
    assert plan.expert_indices.tolist() == [[1, 0, 2]]
    assert plan.weights.tolist() == [[1, 0, 0]]


@by_dtype
@pytest.mark.parametrize("experts", [4, 19, 130, 1500])
@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalized"])
def test_rows_that_are_not_finite(kernel, device, dtype, experts, renormalize):
    """NaN weights, valid and distinct experts, and no other row is disturbed."""
    clean = spread_logits(7, experts, dtype, device=device)
    logits = clean.clone()
    logits[1, 2] = torch.nan
    logits[2] = torch.nan
    logits[3, experts - 1] = torch.inf
    logits[4] = -torch.inf
    logits[5, 0] = -torch.inf
    options = kernel.RoutingOptions(3, renormalize)
    plan = kernel.route(logits, options)
    assert plan.weights[1:5].isnan().all()
    assert plan.expert_indices[1:5].tolist() == [[0, 1, 2]] * 4
    expected = kernel.route(clean, options)
    for row in (0, 6):
        assert torch.equal(plan.expert_indices[row], expected.expert_indices[row])
        assert_bits_equal(plan.weights[row], expected.weights[row])
    exact = kernel.reference.route(logits.cpu(), options, compute_dtype=torch.float64)
    assert torch.equal(plan.expert_indices.cpu(), exact[0])
    assert_close_to_exact(plan.weights, exact[1])


@by_dtype
def test_one_masked_expert_is_chosen_last(kernel, device, dtype):
    logits = torch.zeros(1, 5, dtype=dtype, device=device)
    logits[0, 0] = -torch.inf
    plan = kernel.route(logits, kernel.RoutingOptions(5))
    assert plan.expert_indices.tolist() == [[1, 2, 3, 4, 0]]
    assert plan.weights.tolist() == [[0.25, 0.25, 0.25, 0.25, 0]]


def test_a_large_common_offset_changes_nothing(kernel, device):
    logits = spread_logits(4, 16, F32, device=device)
    options = kernel.RoutingOptions(4, True)
    plan, shifted = kernel.route(logits, options), kernel.route(logits + 1024, options)
    assert torch.equal(plan.expert_indices, shifted.expert_indices)
    assert_bits_equal(plan.weights, shifted.weights)


def test_logits_near_the_largest_number(kernel, device):
    logits = (torch.linspace(-1, 1, 9, device=device) * 3e38).view(1, 9)
    plan = kernel.route(logits, kernel.RoutingOptions(2))
    assert plan.expert_indices.tolist() == [[8, 0]]
    assert plan.weights.tolist() == [[1, 0]]


def test_unit_weights_of_one_expert_have_no_gradient(kernel, device):
    """With top_k 1 a renormalized weight is 1 whatever the logits are."""
    logits = normal((6, 9), BF16, device=device).requires_grad_()
    plan = kernel.route(logits, kernel.RoutingOptions(1, True))
    assert (plan.weights == 1).all()
    assert not gradients(plan.weights, {"logits": logits}, torch.ones_like(plan.weights))["logits"].any()
