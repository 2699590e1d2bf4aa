"""SwiGluExperts: what the tests of numbers do not say."""

import re

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact
from operations import (
    BF16,
    F32,
    FORWARD,
    FORWARD_DISPATCHED,
    Shape,
    by_dtype,
    by_shape,
    by_strategy,
    gradients,
    make_weights,
    normal,
    plan_of,
    random_gradient,
    swiglu_experts,
    top_k_of,
)

RAGGED = Shape(21, 3, 2, 40, 24)


def chain(kernel, inputs, strategy, backward_strategy=None, combine_strategy="serial", weights_of_route=False):
    """The whole layer by hand: the output, and the gradients of all that can have one."""
    plan = kernel.route(inputs["logits"], kernel.RoutingOptions(top_k_of(inputs["logits"]), True))
    training = plan.into_training(inputs["logits"], kernel.RouterWeightOptions("softmax", True))
    dispatched = (plan if weights_of_route else training.routing).dispatch(inputs["input"])
    rows = swiglu_experts(kernel, inputs).forward_dispatched_training(dispatched, strategy)
    output = dispatched.combine(rows.output)
    grad = random_gradient(output)
    combine = dispatched.combine_backward_with_strategy(rows.output, grad, combine_strategy)
    if backward_strategy is None:
        experts = rows.cache.backward(combine.expert_output)
    else:
        experts = rows.cache.backward_with_strategy(combine.expert_output, backward_strategy)
    found = {
        "input": dispatched.dispatch_backward(experts.values),
        "logits": training.backward(combine.weights),
        "gate": experts.gate,
        "up": experts.up,
        "down": experts.down,
    }
    return output, found, grad


@by_strategy
@by_shape
def test_the_explicit_chain(kernel, device, dtype, strategy, shape):
    inputs = FORWARD.inputs(shape, dtype, device=device, requires_grad=True)
    output, found, grad = chain(kernel, {name: tensor.detach() for name, tensor in inputs.items()}, strategy)
    exact_output, leaves = FORWARD.run_exact(kernel, inputs)
    plain_output = FORWARD.plain(inputs)
    assert_close_to_exact(output, exact_output, plain_output)
    exact = gradients(exact_output, leaves, grad.cpu().double())
    plain = gradients(plain_output, inputs, grad)
    for name, gradient in found.items():
        assert gradient.dtype == (F32 if name in ("gate", "up", "down") else dtype), name
        # What reaches the weights' gradients has the inputs' dtype, so no more than that can be expected of them.
        assert_close_to_exact(gradient.to(dtype), exact[name], plain[name])


@pytest.mark.small
@pytest.mark.parametrize("fused", [False, True], ids=["gate_and_up", "fused_gate"])
def test_the_chain_and_autograd_have_the_same_bits(kernel, device, fused):
    """In float32, with the weights that `route` gives; those computed again may differ in the last bit."""
    inputs = FORWARD.inputs(device=device, requires_grad=True)
    if fused:
        inputs["gate"] = torch.cat([inputs["gate"], inputs.pop("up")], 1).detach().requires_grad_()
    detached = {name: tensor.detach() for name, tensor in inputs.items()}
    output, found, grad = chain(kernel, detached, "scalar", weights_of_route=True)
    if fused:
        assert found.pop("up") is None
    by_autograd = FORWARD.run(kernel, inputs, strategy="scalar")
    assert_bits_equal(by_autograd.detach(), output)
    for name, gradient in gradients(by_autograd, inputs, grad).items():
        assert_bits_equal(gradient, found[name])


@pytest.mark.small
@by_strategy
def test_the_forward_does_not_bind_the_backward(kernel, device, dtype, strategy):
    inputs = FORWARD.inputs(RAGGED, dtype, device=device, requires_grad=True)
    detached = {name: tensor.detach() for name, tensor in inputs.items()}
    _, found, grad = chain(kernel, detached, "scalar", backward_strategy=strategy, combine_strategy="plane")
    exact_output, leaves = FORWARD.run_exact(kernel, inputs)
    exact = gradients(exact_output, leaves, grad.cpu().double())
    plain = gradients(FORWARD.plain(inputs), inputs, grad)
    for name, gradient in found.items():
        assert_close_to_exact(gradient.to(dtype), exact[name], plain[name])


@pytest.mark.small
@by_strategy
def test_the_training_forward_gives_the_same_bits(kernel, device, dtype, strategy):
    inputs = FORWARD_DISPATCHED.inputs(RAGGED, dtype, device=device)
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    experts = swiglu_experts(kernel, inputs)
    training = experts.forward_dispatched_training(dispatched, strategy)
    assert_bits_equal(training.output, experts.forward_dispatched(dispatched, strategy))
    assert not training.output.requires_grad


@pytest.mark.small
@by_strategy
def test_an_enumeration_and_its_string_mean_the_same(kernel, device, dtype, strategy):
    inputs = FORWARD.inputs(dtype=dtype, device=device)
    member = kernel.GroupedStrategy(strategy)
    assert_bits_equal(FORWARD.run(kernel, inputs, strategy=member), FORWARD.run(kernel, inputs, strategy=strategy))


@pytest.mark.small
@by_dtype
def test_auto_is_what_the_plan_says(kernel, device, dtype):
    plan = kernel.experts_plan(dtype, device)
    inputs = FORWARD.inputs(RAGGED, dtype, device=device)
    expected = FORWARD.run(kernel, inputs, strategy=plan.strategy)
    assert_bits_equal(FORWARD.run(kernel, inputs, strategy="auto"), expected)
    (other,) = plan.reasons
    assert other != plan.strategy
    assert plan.reasons[other]
    scalar = kernel.experts_plan(dtype, torch.device(device), "scalar")
    assert scalar.strategy == "scalar"
    assert set(scalar.reasons) == {"tensor_core"}


def test_float32_has_no_tensor_core(kernel, device):
    """A strategy that was asked for is never replaced; the error says what is missing."""
    inputs = FORWARD.inputs(device=device)
    why = kernel.experts_plan(F32, device).reasons["tensor_core"]
    assert re.fullmatch("the matrix units here multiply .*, not float32|.* no matrix units.*", why)
    with pytest.raises(kernel.MoeError, match=f"strategy must be scalar or auto, for {re.escape(why)}, got "):
        FORWARD.run(kernel, inputs, strategy="tensor_core")
    with pytest.raises(kernel.MoeError, match=f"experts_plan: strategy must .* {re.escape(why)}"):
        kernel.experts_plan(F32, device, "tensor_core")


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_rows_that_are_nobodys_give_zeros(kernel, device, dtype, strategy, training):
    inputs = FORWARD_DISPATCHED.inputs(Shape(6, 3, 2, 24, 12), dtype, device=device, requires_grad=training)
    inputs["indices"][2] = 3
    inputs["indices"][4, 1] = -1
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    output = swiglu_experts(kernel, inputs).forward_dispatched(dispatched, strategy)
    assert not output[-3:].any()
    assert output[:-3].any(1).all()
    if training:
        grad = random_gradient(output)
        grad[-3:] = torch.nan
        found = gradients(output, inputs, grad)
        assert all(gradient.isfinite().all() for gradient in found.values())
        assert not found["input"][2].any()


@pytest.mark.small
@by_strategy
def test_choices_that_are_left_out_of_the_layer(kernel, device, dtype, strategy):
    """As under expert parallelism: they add nothing, and their weight's gradient is 0."""
    weights = make_weights(RAGGED, dtype, device, 1)
    input = normal((4, 40), dtype, device=device)
    indices = torch.tensor([[0, 3], [3, 3], [2, 1], [-5, 2]], device=device)
    factors = normal((4, 2), dtype, device=device, seed=3).requires_grad_()
    matrices = weights["gate"], weights["up"], weights["down"]
    plan = kernel.RoutingPlan(indices, factors, 3)
    dispatched = plan.dispatch(input)
    output = dispatched.combine(kernel.SwiGluExperts(*matrices).forward_dispatched(dispatched, strategy))
    exact = kernel.reference.mixture(
        input.cpu().double(),
        indices.cpu(),
        factors.detach().cpu().double(),
        *(matrix.cpu().double() for matrix in matrices),
        compute_dtype=torch.float64,
    )
    assert_close_to_exact(output, exact, exact.to(dtype))
    assert not output[1].any()
    (grad,) = torch.autograd.grad(output, factors, torch.ones_like(output))
    assert (grad != 0).tolist() == [[True, False], [False, False], [True, True], [False, True]]


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param([0, 2, 4, 6], id="right"),
        pytest.param([-5, 2, 4, 6], id="negative"),
        pytest.param([0, 2, 4, 2**31 - 1], id="past_the_end"),
        pytest.param([0, 4, 2, 6], id="descending"),
        pytest.param([6, 6, 6, 6], id="nobodys"),
        pytest.param([2**31 - 1, -(2**31), 2**31 - 1, -1], id="nonsense"),
    ],
)
def test_ops_do_not_trust_the_offsets(ops, device, dtype, strategy, offsets):
    """Nothing is read or written out of bounds; what is in no range may be anything that was computed."""
    weights = make_weights(Shape(6, 3, 1, 24, 12), dtype, device, 1)
    matrices = weights["gate"], weights["up"], weights["down"]
    values = normal((6, 24), dtype, device=device)
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    tensor_core = strategy == "tensor_core"
    output, *projections = ops.experts_training(values, offsets, *matrices, tensor_core)
    assert output.shape == values.shape
    assert ops.experts(values, offsets, *matrices, tensor_core).shape == values.shape
    grad_values, *_ = ops.experts_backward(
        values, values, offsets, *matrices, *projections, tensor_core, True, True, True, True, True
    )
    assert grad_values.shape == values.shape


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("shape", [RAGGED, Shape(140, 2, 1, 136, 72)], ids=["ragged", "several_tiles"])
def test_gradients_of_weights_are_rounded_from_float32(ops, device, dtype, strategy, shape):
    """Autograd asks for gradients in the weights' dtype, the explicit chain for the sums themselves."""
    weights = make_weights(shape, dtype, device, 1)
    matrices = weights["gate"], weights["up"], weights["down"]
    values, grad = (normal((shape.tokens, shape.hidden), dtype, device=device, seed=seed) for seed in (2, 3))
    offsets = torch.linspace(0, shape.tokens, shape.experts + 1).int().to(device)
    tensor_core = strategy == "tensor_core"
    _, *projections = ops.experts_training(values, offsets, *matrices, tensor_core)
    arguments = grad, values, offsets, *matrices, *projections, tensor_core
    _, *sums = ops.experts_backward(*arguments, True, True, True, True, True)
    _, *rounded = ops.experts_backward(*arguments, False, True, True, True, True)
    for wide, narrow in zip(sums, rounded, strict=True):
        assert wide.dtype == F32
        assert_bits_equal(narrow, wide.to(dtype))


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("intermediate", [pytest.param(12, id="ragged"), pytest.param(48, id="half_a_step")])
def test_an_infinite_token_stays_infinite(ops, device, dtype, strategy, intermediate):
    """What pads the sizes to those of tiles must not meet infinity with 0, which would be NaN."""
    values = torch.ones(3, 40, dtype=dtype, device=device)
    values[1] = torch.inf
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=device)
    gate = torch.full((1, intermediate, 40), 0.25, dtype=dtype, device=device)
    down = torch.full((1, 40, intermediate), 0.25, dtype=dtype, device=device)
    output = ops.experts(values, offsets, gate, gate, down, strategy == "tensor_core")
    assert output[1].isposinf().all()
    assert output[[0, 2]].isfinite().all()


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("gap", [1, 3, 16], ids=lambda gap: f"{gap}_elements_between_experts")
def test_packed_matrices_at_any_distance(kernel, device, dtype, strategy, gap):
    """Each expert's matrix is dense, but where the next one begins is not aligned."""
    inputs = FORWARD.inputs(RAGGED, dtype, device=device, requires_grad=True)

    def apart(weight):
        experts, rows, columns = weight.shape
        storage = torch.full((experts, rows * columns + gap), torch.nan, dtype=dtype, device=device)
        view = storage[:, : rows * columns].unflatten(1, (rows, columns))
        return view.copy_(weight.detach()).requires_grad_()

    spread = {name: apart(tensor) if tensor.dim() == 3 else tensor for name, tensor in inputs.items()}
    output, expected = (FORWARD.run(kernel, each, strategy=strategy) for each in (spread, inputs))
    assert_bits_equal(output.detach(), expected.detach())
    grad = random_gradient(output)
    found = gradients(output, spread, grad)
    for name, gradient in gradients(expected, inputs, grad).items():
        assert_bits_equal(found[name], gradient)


@pytest.mark.small
@by_strategy
def test_one_matrix_for_all_experts(kernel, device, dtype, strategy):
    """Expanded weights, with a stride of 0 from expert to expert."""
    inputs = FORWARD.inputs(RAGGED, dtype, device=device)
    same = {name: t[:1].expand(t.shape) if t.dim() == 3 else t for name, t in inputs.items()}
    dense = {name: tensor.contiguous() for name, tensor in same.items()}
    assert_bits_equal(FORWARD.run(kernel, same, strategy=strategy), FORWARD.run(kernel, dense, strategy=strategy))


@pytest.mark.small
@by_strategy
def test_gate_and_up_may_be_halves_of_one_tensor(kernel, device, dtype, strategy):
    """Views into a fused weight give the bits of the fused weight, and of copies."""
    inputs = FORWARD.inputs(RAGGED, dtype, device=device)
    both = torch.cat([inputs["gate"], inputs["up"]], 1)
    gate, up = both.chunk(2, 1)
    expected = FORWARD.run(kernel, inputs, strategy=strategy)
    halves = FORWARD.run(kernel, {**inputs, "gate": gate, "up": up}, strategy=strategy)
    fused = {name: tensor for name, tensor in inputs.items() if name != "up"} | {"gate": both}
    assert_bits_equal(halves, expected)
    assert_bits_equal(FORWARD.run(kernel, fused, strategy=strategy), expected)


SAVED = ("gate", "up", "down", "values", "expert_offsets")


@pytest.mark.small
@pytest.mark.parametrize("name", SAVED)
def test_changing_what_the_cache_holds_raises(kernel, device, name):
    inputs = FORWARD_DISPATCHED.inputs(device=device)
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    training = swiglu_experts(kernel, inputs).forward_dispatched_training(dispatched)
    grad = torch.ones_like(training.output)
    training.cache.backward(grad)
    (inputs[name] if name in inputs else getattr(dispatched, name)).add_(1)
    with pytest.raises(RuntimeError, match=f"ExpertsCache.backward: {name} has been modified by an inplace"):
        training.cache.backward(grad)


@pytest.mark.small
def test_changing_the_logits_before_the_routers_backward_raises(kernel, device):
    logits = normal((3, 4), F32, device=device)
    plan = kernel.route(logits, kernel.RoutingOptions(2))
    training = plan.into_training(logits, kernel.RouterWeightOptions())
    assert torch.equal(training.routing.expert_indices, plan.expert_indices)
    grad = torch.ones(3, 2, device=device)
    assert training.backward(grad).shape == (3, 4)
    logits.add_(1)
    with pytest.raises(RuntimeError, match=r"RouterTrainingPlan.backward: logits has been modified"):
        training.backward(grad)


@pytest.mark.small
def test_the_chain_works_in_inference_mode(kernel, device):
    with torch.inference_mode():
        inputs = FORWARD.inputs(device=device)
        output, found, _ = chain(kernel, inputs, "auto")
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.small
def test_weights_may_change_between_calls(kernel, device):
    """An optimizer's step in place is seen: the object holds the tensors, not copies."""
    inputs = FORWARD.inputs(device=device)
    experts = swiglu_experts(kernel, inputs)
    options = kernel.RoutingOptions(2, True)
    before = experts.forward(inputs["input"], inputs["logits"], options)
    inputs["down"].mul_(2)
    assert_bits_equal(experts.forward(inputs["input"], inputs["logits"], options), before * 2)


@pytest.mark.small
@by_strategy
def test_what_one_token_holds_does_not_reach_another(kernel, device, dtype, strategy):
    """A token of NaN beside others of the same expert."""
    inputs = FORWARD.inputs(RAGGED, dtype, device=device, requires_grad=True)
    clean = FORWARD.run(kernel, inputs, strategy=strategy)
    dirty = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    with torch.no_grad():
        dirty["input"][7] = torch.nan
    output = FORWARD.run(kernel, dirty, strategy=strategy)
    others = [row for row in range(21) if row != 7]
    assert output[7].isnan().all()
    assert_bits_equal(output[others].detach(), clean[others].detach())
    grad = random_gradient(output)
    found = torch.autograd.grad(output, dirty["input"], grad)[0]
    expected = torch.autograd.grad(clean, inputs["input"], grad)[0]
    assert_bits_equal(found[others], expected[others])


@pytest.mark.small
@by_strategy
def test_large_products(kernel, device, dtype, strategy):
    """silu of very large and very small numbers, on both sides of zero."""
    scales = torch.tensor([1e-3, 1.0, 30.0, 100.0], device=device).to(dtype)
    inputs = FORWARD_DISPATCHED.inputs(Shape(4, 2, 1, 24, 12), dtype, device=device)
    inputs["input"] = inputs["input"] * scales[:, None]
    inputs["up"] = inputs["up"] / 64
    output = FORWARD_DISPATCHED.run(kernel, inputs, strategy=strategy)
    exact, _ = FORWARD_DISPATCHED.run_exact(kernel, inputs)
    plain = FORWARD_DISPATCHED.plain(inputs)
    order = inputs["indices"].flatten().sort(stable=True).indices.tolist()
    for row in range(4):
        assert_close_to_exact(output[row], exact[row], plain[row])
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.isa_independent
def test_inference_is_two_ops(kernel, device):
    """The router and the fused layer: dispatched rows and the experts' results are no tensors of PyTorch."""
    inputs = FORWARD.inputs(Shape(64, 8, 4, 128, 64), BF16, device=device)
    FORWARD.run(kernel, inputs)
    with torch.autograd.profiler.profile() as profile:
        FORWARD.run(kernel, inputs)
    names = [event.name for event in profile.function_events if "::" in event.name]
    ours = [name.split("::")[1] for name in names if name.startswith("_rudnn_moe")]
    assert ours == ["route", "fused_experts"]
