"""Cases from public bug reports on which libraries of this kind went wrong, with their right results."""

import pytest
import torch
from conftest import assert_bits_equal
from operations import F32, FORWARD, LAYERS, Shape, by_dtype, by_strategy, for_each, make_weights, normal

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]


def assert_near(output, expected):
    torch.testing.assert_close(output.cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


ROUTERS = {
    "softmax": lambda kernel, logits: kernel.route(logits, kernel.RoutingOptions(2, True)),
    "sigmoid": lambda kernel, logits: kernel.route_sigmoid_grouped(
        logits, None, kernel.GroupRoutingOptions(2, renormalize=True)
    ),
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_m1_nan_router_row(kernel, device, router):
    """vllm-project/vllm#39391: no comparison with NaN succeeds, so top-k gave one id k times, or -1, or E."""
    nan = torch.nan
    for rows in ([[nan, nan, nan, nan], [1, 2, 3, 4]], [[nan, 2, 3, 4]]):
        plan = router(kernel, torch.tensor(rows, device=device))
        for ids in plan.expert_indices.tolist():
            assert len(set(ids)) == 2
            assert all(0 <= expert < 4 for expert in ids)
        assert plan.weights[0].isnan().all()
        if len(rows) == 2:
            assert plan.expert_indices[1].tolist() == [3, 2]
    if router is ROUTERS["softmax"]:
        plan = router(kernel, torch.tensor([[1.0, 2, 3, 4]], device=device))
        assert_near(plan.weights, [[0.731059, 0.268941]])


@for_each(*LAYERS)
def test_m1_nan_router_row_in_the_layer(kernel, device, operation):
    """The other tokens' outputs are as they were."""
    inputs = operation.inputs(Shape(3, 4, 2, 16, 8), device=device)
    clean = operation.run(kernel, inputs)
    inputs["logits"][1, 2] = torch.nan
    output = operation.run(kernel, inputs)
    assert output[1].isnan().all()
    assert_bits_equal(output[[0, 2]], clean[[0, 2]])


def test_m2_dropped_groups_and_negative_bias(kernel, device):
    """huggingface/transformers#45440: dropped experts set to 0 beat kept ones whose biased score is negative."""
    bias = torch.tensor([-0.6, -0.7, -2, -2], device=device)
    options = kernel.GroupRoutingOptions(2, 2, 1, True, False, 1.0)
    plan = kernel.route_sigmoid_grouped(torch.zeros(1, 4, device=device), bias, options)
    assert plan.expert_indices.tolist() == [[0, 1]]
    assert_near(plan.weights, [[0.5, 0.5]])
    scaled = kernel.GroupRoutingOptions(2, 2, 1, True, False, 2.5)
    assert_near(kernel.route_sigmoid_grouped(torch.zeros(1, 4, device=device), bias, scaled).weights, [[1.25, 1.25]])


def test_m3_weights_from_unbiased_scores(kernel, device):
    """vllm-project/vllm#12002: the score recovered as biased minus bias is lost in float32."""
    logits = torch.tensor([[-18.0, -17, -30, -30]], device=device)
    bias = torch.tensor([12.0, 12, 0, 0], device=device)
    plan = kernel.route_sigmoid_grouped(logits, bias, kernel.GroupRoutingOptions(2, renormalize=True))
    weights = dict(zip(plan.expert_indices[0].tolist(), plan.weights[0].tolist()))
    assert weights.keys() == {0, 1}
    assert_near(torch.tensor([weights[0], weights[1]]), [0.268941, 0.731059])


@by_strategy
def test_m5_experts_without_tokens(kernel, device, dtype, strategy):
    """pytorch/pytorch#172439: the weight gradient of an idle expert was whatever lay in memory."""
    inputs = make_weights(Shape(3, 4, 1, 8, 6), dtype, device, 0)
    for tensor in inputs.values():
        tensor.requires_grad_()
    garbage = [torch.full_like(tensor, torch.nan) for tensor in inputs.values()]
    del garbage
    indices = torch.ones(3, 1, dtype=torch.int32, device=device)
    plan = kernel.RoutingPlan(indices, torch.ones(3, 1, dtype=dtype, device=device), 4)
    dispatched = plan.dispatch(normal((3, 8), dtype, device=device))
    kernel.SwiGluExperts(**inputs).forward_dispatched(dispatched, strategy).sum().backward()
    for name, tensor in inputs.items():
        assert not tensor.grad[[0, 2, 3]].any(), name
        assert tensor.grad[1].any(), name


@by_dtype
def test_m6_no_tokens_at_all(kernel, device, dtype):
    """NVIDIA/TransformerEngine#2134: T = 0 crashed in a reshape, or cut the graph."""
    inputs = FORWARD.inputs(Shape(0, 4, 2, 8, 6), dtype, device=device, requires_grad=True)
    experts = kernel.SwiGluExperts(inputs["gate"], inputs["up"], inputs["down"])
    output = experts.forward(inputs["input"], inputs["logits"], kernel.RoutingOptions(2))
    assert output.shape == (0, 8)
    assert output.grad_fn is not None
    output.sum().backward()
    assert inputs["input"].grad.shape == (0, 8)
    for name in ("gate", "up", "down"):
        assert inputs[name].grad.shape == inputs[name].shape
        assert not inputs[name].grad.any(), name
    plan = kernel.route(inputs["logits"], kernel.RoutingOptions(2))
    assert plan.weights.shape == plan.expert_indices.shape == (0, 2)
    dispatched = plan.dispatch(inputs["input"])
    rows = experts.forward_dispatched(dispatched)
    assert rows.shape == dispatched.values.shape == (0, 8)
    assert dispatched.combine(rows).shape == (0, 8)
    gradients = experts.forward_dispatched_training(dispatched).cache.backward(torch.zeros(0, 8).to(rows))
    assert gradients.values.shape == (0, 8)
    assert not any(gradient.any() for gradient in gradients[1:])


def test_m8_softmax_weights_without_renormalization(kernel, device):
    """sgl-project/sglang#35160: the weights returned were raw logits."""
    logits = torch.tensor([[2.0, 1, 0, -1]], device=device)
    assert_near(kernel.route(logits, kernel.RoutingOptions(2, False)).weights, [[0.643914, 0.236883]])
    assert_near(kernel.route(logits, kernel.RoutingOptions(2, True)).weights, [[0.731059, 0.268941]])


def test_m9_gradient_to_the_router(kernel, device):
    """jingyaogong/minimind#858: with k = 1 and renormalization the weight is constantly 1."""
    logits = torch.tensor([[0.3, 0.1, -0.2]], device=device, requires_grad=True)
    for renormalize, expected in ((True, [[0.0, 0, 0]]), (False, [[0.242313, -0.139195, -0.103118]])):
        weights = kernel.route(logits, kernel.RoutingOptions(1, renormalize)).weights
        (grad,) = torch.autograd.grad(weights.sum(), logits)
        if renormalize:
            assert grad.tolist() == expected
        else:
            assert_near(grad, expected)


def test_a_strided_gradient_is_not_read_as_dense(kernel, device):
    """Dao-AILab/flash-attention#355: `out.sum()` sends a scalar with stride 0."""
    inputs = FORWARD.inputs(device=device, requires_grad=True)
    output = FORWARD.run(kernel, inputs)
    dense = torch.autograd.grad(output, list(inputs.values()), torch.ones_like(output), retain_graph=True)
    expanded = torch.autograd.grad(output.sum(), list(inputs.values()))
    for one, other in zip(expanded, dense):
        assert_bits_equal(one, other)


@by_dtype
def test_whole_numbers_are_exact(kernel, device, dtype):
    """Products and sums of small whole numbers, in every dtype: up = 1, and silu(x) is x beyond 90 in float32."""
    gate = torch.full((2, 1, 2), 64, dtype=dtype, device=device)
    up = torch.tensor([[[1.0, 0]], [[0, 1]]], device=device).to(dtype)
    down = torch.tensor([[[1.0], [2]], [[2], [1]]], device=device).to(dtype)
    input = torch.tensor([[1.0, 1], [2, 1]], device=device).to(dtype)
    plan = kernel.RoutingPlan(
        torch.tensor([[0, 1], [1, 0]], device=device), torch.tensor([[1.0, 0.5], [0.5, 1]], device=device), 2
    )
    dispatched = plan.dispatch(input)
    output = dispatched.combine(kernel.SwiGluExperts(gate, up, down).forward_dispatched(dispatched))
    assert output.dtype == dtype
    # silu(128) = 128 and silu(192) = 192, times up, times down, times the weights.
    assert output.float().tolist() == [[256, 320], [576, 864]]
    assert output.dtype != F32 or (output == output.round()).all()
