"""The weights of experts that have been chosen already, and their gradient."""

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact
from operations import F32, by_dtype, normal, random_gradient, weights_of_selected

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

by_options = pytest.mark.parametrize(
    "scoring, renormalize, scale",
    [("softmax", False, 1.0), ("softmax", True, 2.5), ("sigmoid", False, 2.5), ("sigmoid", True, 1.0)],
)
by_sizes = pytest.mark.parametrize(
    "experts, top_k",
    [
        pytest.param(1, 1, id="single_expert"),
        pytest.param(3, 3, id="all_experts"),
        pytest.param(17, 5, id="one_past_a_vector"),
        pytest.param(60, 4, id="not_a_power_of_two", marks=pytest.mark.simt_checked),
        pytest.param(128, 8, id="many", marks=pytest.mark.simt_checked),
        pytest.param(1000, 64, id="the_most_chosen"),
    ],
)


def run(kernel, device, logits, indices, options, plain_options):
    weights = kernel.selected_router_weights(logits, indices, options)
    assert weights.dtype == F32
    exact_logits = logits.detach().cpu().double().requires_grad_()
    exact = kernel.reference.selected_router_weights(exact_logits, indices.cpu(), options, compute_dtype=torch.float64)
    plain_logits = logits.detach().requires_grad_()
    plain = weights_of_selected(plain_logits, indices, *plain_options)
    assert_close_to_exact(weights, exact, plain)
    grad = random_gradient(weights)
    found = kernel.selected_router_backward(logits, indices, grad, options)
    (exact_found,) = torch.autograd.grad(exact, exact_logits, grad.cpu().double())
    (plain_found,) = torch.autograd.grad(plain, plain_logits, grad)
    assert found.dtype == logits.dtype
    assert_close_to_exact(found, exact_found, plain_found)
    closed = kernel.reference.selected_router_backward(
        logits.detach().cpu(), indices.cpu(), grad.cpu(), options, compute_dtype=torch.float64
    )
    torch.testing.assert_close(closed, exact_found, rtol=1e-9, atol=1e-12)


@by_options
@by_sizes
@by_dtype
def test_weights_and_gradient(kernel, device, scoring, renormalize, scale, experts, top_k, dtype):
    options = kernel.RouterWeightOptions(scoring, renormalize, scale)
    logits = normal((5, experts), dtype, device=device)
    indices = normal((5, experts), F32, seed=1).argsort(1)[:, :top_k].int().contiguous().to(device)
    run(kernel, device, logits, indices, options, (scoring, renormalize, scale))


@by_options
@by_dtype
def test_repeated_indices_count_each_time(kernel, device, scoring, renormalize, scale, dtype):
    options = kernel.RouterWeightOptions(scoring, renormalize, scale)
    indices = torch.tensor([[2, 2, 0, 2], [1, 1, 1, 1], [0, 3, 0, 3]], dtype=torch.int32, device=device)
    run(kernel, device, normal((3, 6), dtype, device=device), indices, options, (scoring, renormalize, scale))


@by_options
@by_dtype
@pytest.mark.parametrize("index", [-1, 6, 2**31 - 1, -(2**31)])
def test_an_invalid_index_makes_its_row_nan(kernel, device, scoring, renormalize, scale, dtype, index):
    options = kernel.RouterWeightOptions(scoring, renormalize, scale)
    logits = normal((3, 6), dtype, device=device)
    valid = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32, device=device)
    indices = valid.clone()
    indices[1, 1] = index
    grad = normal((3, 2), F32, device=device, seed=1)
    for result, expected in [
        (
            kernel.selected_router_weights(logits, indices, options),
            kernel.selected_router_weights(logits, valid, options),
        ),
        (
            kernel.selected_router_backward(logits, indices, grad, options),
            kernel.selected_router_backward(logits, valid, grad, options),
        ),
    ]:
        assert result[1].isnan().all()
        assert_bits_equal(result[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("index", [2**40, -(2**40), 2**32, 2**32 + 1])
def test_an_invalid_64_bit_index_is_not_cut_to_32(kernel, device, index):
    logits = normal((2, 6), F32, device=device)
    indices = torch.tensor([[0, 1], [2, index]], device=device)
    options = kernel.RouterWeightOptions()
    weights = kernel.selected_router_weights(logits, indices, options)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()


def test_unsigned_indices(kernel, device):
    logits = normal((2, 6), F32, device=device)
    indices = torch.tensor([[0, 1], [2, 5]], dtype=torch.int32, device=device)
    options = kernel.RouterWeightOptions("sigmoid", True)
    unsigned = indices.view(torch.uint32)
    assert_bits_equal(
        kernel.selected_router_weights(logits, unsigned, options),
        kernel.selected_router_weights(logits, indices, options),
    )
    too_large = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32, device=device).view(torch.uint32)
    assert kernel.selected_router_weights(logits, too_large, options)[1].isnan().all()


def test_no_score_left(kernel, device):
    """0 / 0 is 0, in the gradient too."""
    logits = torch.full((1, 4), -torch.inf, device=device)
    indices = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    options = kernel.RouterWeightOptions("sigmoid", True)
    assert kernel.selected_router_weights(logits, indices, options).tolist() == [[0, 0]]
    grad = torch.ones(1, 2, device=device)
    assert not kernel.selected_router_backward(logits, indices, grad, options).any()


@by_dtype
def test_nan_stays_in_its_row(kernel, device, dtype):
    clean = normal((3, 6), dtype, device=device)
    logits = clean.clone()
    logits[1, 4] = torch.nan
    indices = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32, device=device)
    options = kernel.RouterWeightOptions("softmax", True)
    grad = normal((3, 2), F32, device=device, seed=1)
    weights = kernel.selected_router_weights(logits, indices, options)
    found = kernel.selected_router_backward(logits, indices, grad, options)
    assert weights[1].isnan().all()
    assert found[1].isnan().all()
    assert_bits_equal(weights[[0, 2]], kernel.selected_router_weights(clean, indices, options)[[0, 2]])
    assert_bits_equal(found[[0, 2]], kernel.selected_router_backward(clean, indices, grad, options)[[0, 2]])


def test_gradient_of_another_layout(kernel, device):
    logits, indices = normal((3, 6), F32, device=device), torch.tensor([[0, 1, 2]] * 3, device=device)
    options = kernel.RouterWeightOptions()
    grad = normal((3, 3), F32, device=device).T
    assert_bits_equal(
        kernel.selected_router_backward(logits.T.contiguous().T, indices, grad, options),
        kernel.selected_router_backward(logits, indices, grad.contiguous(), options),
    )
