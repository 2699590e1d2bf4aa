"""Which experts `route_sigmoid_grouped` chooses, and with which weights."""

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact
from operations import by_dtype, normal, random_gradient, spread_logits, weights_of_selected

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

# experts, groups, selected_groups, top_k
by_sizes = pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 1, 1, 1), id="single_expert"),
        pytest.param((8, 1, 1, 3), id="one_group"),
        pytest.param((8, 8, 3, 3), id="groups_of_one"),
        pytest.param((12, 3, 2, 5), id="groups_of_four", marks=pytest.mark.simt_checked),
        pytest.param((30, 5, 2, 12), id="every_expert_of_the_selected_groups"),
        pytest.param((64, 8, 4, 6), id="deepseek_small", marks=pytest.mark.simt_checked),
        pytest.param((256, 8, 4, 8), id="deepseek_v3"),
        pytest.param((128, 128, 128, 64), id="the_most_groups"),
        pytest.param((1024, 16, 3, 64), id="the_most_experts"),
        pytest.param((66, 33, 7, 9), id="odd_number_of_groups"),
    ],
)


def chosen_apart(logits, bias, options):
    """The rows in which no decision is a matter of rounding, of scores in float64."""
    corrected = torch.sigmoid(logits.double()) + (0 if bias is None else bias.double())
    grouped = corrected.unflatten(1, (options.groups, -1))
    group_scores = grouped.topk(2 if options.group_top_two else 1, -1).values.sum(-1)
    order = group_scores.sort(-1, descending=True)
    kept = torch.zeros_like(group_scores).scatter(1, order.indices[:, : options.selected_groups], 1).bool()
    eligible = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts = eligible.sort(-1, descending=True).values[:, : options.top_k + 1]
    gaps = [order.values.diff(dim=-1)[:, options.selected_groups - 1 : options.selected_groups], experts.diff(dim=-1)]
    return (torch.cat(gaps, -1).abs() > 1e-5).all(-1)


def separated(sizes, options, dtype, with_bias, device, tokens=5):
    """Logits `[tokens, E]` and a bias, for which the choice is the same however it is computed."""
    experts = sizes[0]
    logits = normal((20 * tokens, experts), dtype, seed=experts)
    bias = normal((experts,), torch.float32, seed=1) if with_bias else None
    logits = logits[chosen_apart(logits, bias, options)][:tokens]
    assert len(logits) == tokens
    return logits.to(device), None if bias is None else bias.to(device)


@by_sizes
@by_dtype
@pytest.mark.parametrize("top_two", [False, True], ids=["best_of_group", "two_best_of_group"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["without_bias", "with_bias"])
def test_choice_weights_and_gradient(kernel, device, sizes, dtype, top_two, with_bias):
    experts, groups, selected_groups, top_k = sizes
    if top_two and experts // groups < 2:
        pytest.skip("a group has one expert")
    if dtype != torch.float32 and top_k == 64:
        pytest.skip("this many half-precision scores are not apart")
    renormalize = top_two
    options = kernel.GroupRoutingOptions(top_k, groups, selected_groups, top_two, renormalize, 2.5)
    logits, bias = separated(sizes, options, dtype, with_bias, device)
    logits.requires_grad_()
    plan = kernel.route_sigmoid_grouped(logits, bias, options)
    exact_logits = logits.detach().cpu().double().requires_grad_()
    exact_indices, exact = kernel.reference.route_sigmoid_grouped(
        exact_logits, None if bias is None else bias.cpu(), options, compute_dtype=torch.float64
    )
    assert plan.expert_indices.dtype == torch.int32
    assert torch.equal(plan.expert_indices.cpu(), exact_indices)
    plain = weights_of_selected(logits, plan.expert_indices, "sigmoid", renormalize, 2.5).to(dtype)
    assert plan.weights.dtype == dtype
    assert_close_to_exact(plan.weights, exact, plain)
    grad = random_gradient(plan.weights)
    (found,) = torch.autograd.grad(plan.weights, logits, grad)
    (exact_found,) = torch.autograd.grad(exact, exact_logits, grad.cpu().double())
    (plain_found,) = torch.autograd.grad(plain, logits, grad)
    assert_close_to_exact(found, exact_found, plain_found)


@by_dtype
def test_equal_scores_favour_the_lower_id(kernel, device, dtype):
    """For groups and for experts."""
    logits = torch.zeros(2, 12, dtype=dtype, device=device)
    logits[1, 9:] = 1
    options = kernel.GroupRoutingOptions(4, 4, 2, True)
    plan = kernel.route_sigmoid_grouped(logits, None, options)
    assert plan.expert_indices.tolist() == [[0, 1, 2, 3], [9, 10, 11, 0]]


@by_dtype
@pytest.mark.parametrize("sizes", [(12, 3, 2, 5), (64, 8, 4, 6)], ids=["few", "more"])
def test_rows_with_nan(kernel, device, dtype, sizes):
    """NaN weights, valid and distinct experts, and no other row is disturbed."""
    experts, groups, selected_groups, top_k = sizes
    options = kernel.GroupRoutingOptions(top_k, groups, selected_groups, True, True)
    clean = spread_logits(5, experts, dtype, device=device)
    logits = clean.clone()
    logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3, : experts // 2] = torch.nan
    bias = torch.linspace(-1, 1, experts, device=device)
    plan = kernel.route_sigmoid_grouped(logits, bias, options)
    assert plan.weights[1:4].isnan().all()
    for row in plan.expert_indices.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= expert < experts for expert in row)
    expected = kernel.route_sigmoid_grouped(clean, bias, options)
    for row in (0, 4):
        assert torch.equal(plan.expert_indices[row], expected.expert_indices[row])
        assert_bits_equal(plan.weights[row], expected.weights[row])


@by_dtype
def test_infinite_logits(kernel, device, dtype):
    """A sigmoid takes them: scores of 1 and 0."""
    logits = torch.tensor([[torch.inf, 0, -torch.inf, -1]], dtype=dtype, device=device)
    plan = kernel.route_sigmoid_grouped(logits, None, kernel.GroupRoutingOptions(4))
    assert plan.expert_indices.tolist() == [[0, 1, 3, 2]]
    assert plan.weights[0, [0, 1, 3]].tolist() == [1, 0.5, 0]


def test_no_score_left(kernel, device):
    """0 / 0 is 0, in the gradient too."""
    logits = torch.full((1, 4), -torch.inf, device=device, requires_grad=True)
    plan = kernel.route_sigmoid_grouped(logits, None, kernel.GroupRoutingOptions(2, renormalize=True))
    assert plan.expert_indices.tolist() == [[0, 1]]
    assert plan.weights.tolist() == [[0, 0]]
    (grad,) = torch.autograd.grad(plan.weights, logits, torch.ones_like(plan.weights))
    assert not grad.any()


def test_the_bias_has_no_gradient(kernel, device):
    """It takes part in the selection only, which is fixed."""
    logits = spread_logits(3, 8, torch.float32, device=device).requires_grad_()
    bias = torch.zeros(8, device=device, requires_grad=True)
    plan = kernel.route_sigmoid_grouped(logits, bias, kernel.GroupRoutingOptions(2, 4, 2))
    plan.weights.sum().backward()
    assert logits.grad.any()
    assert bias.grad is None
    assert not kernel.route_sigmoid_grouped(logits.detach(), bias, kernel.GroupRoutingOptions(2)).weights.requires_grad
