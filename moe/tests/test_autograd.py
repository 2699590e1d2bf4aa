"""How every operation behaves under autograd, apart from the numbers: what is computed, what is refused."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.utils.checkpoint
from conftest import assert_bits_equal, in_layout
from operations import (
    BF16,
    DISPATCH,
    F32,
    FORWARD,
    FORWARD_DISPATCHED,
    LAYERS,
    OPERATIONS,
    ROUTERS,
    SELECTED_ROUTERS,
    WITH_EXPERTS,
    by_dtype,
    differentiable,
    for_each,
    gradients,
    normal,
    plan_of,
    random_gradient,
    swiglu_experts,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]


class RecordedOps(TorchDispatchMode):
    """Keeps the name and the arguments of every op of the kernel that runs inside it."""

    def __init__(self, ops):
        super().__init__()
        self.namespace = ops.name
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == self.namespace:
            named = dict(zip((argument.name for argument in function._schema.arguments), args))
            self.calls.append((function._schema.name.split("::")[1], {**named, **kwargs}))
        return function(*args, **kwargs)

    def named(self, name):
        return [arguments for found, arguments in self.calls if found == name]


def without_grad(inputs, subset):
    return {
        name: tensor.detach().requires_grad_(name in subset) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def subsets():
    for operation in OPERATIONS:
        names = differentiable(operation.inputs())
        for size in range(1, len(names) + 1):
            for subset in itertools.combinations(names, size):
                yield pytest.param(operation, subset, id=f"{operation}-{'-'.join(subset)}")


WEIGHTS = {"gate", "up", "down"}


def assert_same(operation, output, expected):
    """Bits, but for the layer: without gradients it is one op, which does not round what it does not keep."""
    if operation in LAYERS:
        torch.testing.assert_close(output, expected)
    else:
        assert_bits_equal(output, expected)


@pytest.mark.parametrize("operation, subset", list(subsets()))
def test_only_what_is_asked_for(kernel, ops, device, operation, subset):
    """Each subset of the inputs gets the same gradients as all together, and no backward runs that nobody needs."""
    inputs = operation.inputs(device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    grad = random_gradient(output)
    everything = gradients(output, inputs, grad)
    some = without_grad(inputs, subset)
    output = operation.run(kernel, some)
    with RecordedOps(ops) as recorded:
        found = gradients(output, some, grad)
    assert set(found) == set(subset)
    for name, gradient in found.items():
        assert_bits_equal(gradient, everything[name])
    for arguments in recorded.named("experts_backward"):
        assert arguments["need_values"] == ("input" in subset)
        for name in WEIGHTS & inputs.keys():
            assert arguments[f"need_{name}"] == (name in subset)
    for arguments in recorded.named("combine_backward"):
        assert arguments["need_weights"] == bool({"weights", "logits"} & set(subset))
        assert arguments["need_expert_output"] == bool({"expert_output", "input", *WEIGHTS} & set(subset))
    if operation in WITH_EXPERTS:
        assert bool(recorded.named("experts_backward")) == bool({"input", *WEIGHTS} & set(subset))
        assert bool(recorded.named("selected_router_backward")) == ("logits" in subset)
        assert bool(recorded.named("dispatch_backward")) == ("input" in subset)


@for_each(*OPERATIONS)
def test_no_graph_without_a_gradient(kernel, device, operation):
    inputs = operation.inputs(device=device, requires_grad=True)
    expected = operation.run(kernel, inputs)
    assert expected.requires_grad
    assert expected.grad_fn is not None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            output = operation.run(kernel, inputs)
        assert not output.requires_grad
        assert_same(operation, output.clone(), expected.detach())
    assert not operation.run(kernel, without_grad(inputs, ())).requires_grad


@for_each(*OPERATIONS)
@by_dtype
def test_gradients_keep_the_dtype_of_their_input(kernel, device, operation, dtype):
    inputs = operation.inputs(dtype=dtype, device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    for name, gradient in gradients(output, inputs, random_gradient(output)).items():
        assert gradient.dtype == inputs[name].dtype
        assert gradient.shape == inputs[name].shape


@for_each(*OPERATIONS)
@by_dtype
def test_expanded_gradient(kernel, device, operation, dtype):
    """`out.sum().backward()` hands over one element with stride 0."""
    inputs = operation.inputs(dtype=dtype, device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    dense = gradients(output, inputs, torch.ones_like(output))
    output = operation.run(kernel, inputs)
    expanded = gradients(output.sum(), inputs, torch.ones((), dtype=output.dtype, device=device))
    for name, gradient in dense.items():
        assert_bits_equal(expanded[name], gradient)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("layout", ["transposed", "every_second", "row_strided", "offset", "expanded_rows"])
def test_strided_gradient(kernel, device, operation, layout):
    inputs = operation.inputs(device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    strided = in_layout(random_gradient(output), layout)
    found = gradients(output, inputs, strided)
    dense = gradients(operation.run(kernel, inputs), inputs, strided.contiguous())
    for name, gradient in dense.items():
        assert_bits_equal(found[name], gradient)


@for_each(*OPERATIONS)
def test_gradients_accumulate(kernel, device, operation):
    inputs = operation.inputs(device=device, requires_grad=True)
    for _ in range(2):
        operation.run(kernel, inputs).square().sum().backward()
    once = gradients(operation.run(kernel, inputs).square().sum(), inputs, torch.ones((), device=device))
    for name, gradient in once.items():
        assert_bits_equal(inputs[name].grad, 2 * gradient)


def arguments_of_all_operations():
    return [
        pytest.param(operation, argument, id=f"{operation}-{argument}")
        for operation in OPERATIONS
        for argument in differentiable(operation.inputs())
    ]


LOSSES = {"constant_gradient": torch.Tensor.sum, "varying_gradient": lambda output: output.square().sum()}


@pytest.mark.parametrize("operation, argument", arguments_of_all_operations())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_second_derivative_raises(kernel, device, operation, argument, loss):
    if operation is DISPATCH and loss is LOSSES["constant_gradient"]:
        pytest.skip("a copy has none")
    inputs = operation.inputs(device=device, requires_grad=True)
    output = operation.run(kernel, inputs)
    (grad,) = torch.autograd.grad(loss(output), inputs[argument], create_graph=True)
    # The input itself takes part in the loss, so a gradient that is cut would go unnoticed.
    second = grad.square().sum() + inputs[argument].sum()
    with pytest.raises(RuntimeError, match="differentiated once only"):
        second.backward()


def test_the_gradients_called_by_hand_are_the_last(kernel, device):
    """They are differentiable in nothing, which a backward through them says."""
    inputs = FORWARD.inputs(device=device, requires_grad=True)
    logits = inputs["logits"]
    plan = kernel.route(logits, kernel.RoutingOptions(2))
    dispatched = plan.dispatch(inputs["input"])
    rows = swiglu_experts(kernel, inputs).forward_dispatched_training(dispatched)
    grad = torch.ones_like(inputs["input"])
    options = kernel.RouterWeightOptions()
    combine = dispatched.combine_backward(rows.output, grad)
    experts = rows.cache.backward(combine.expert_output)
    training = plan.into_training(logits, options)
    results = [*combine, *experts, dispatched.dispatch_backward(experts.values), training.backward(combine.weights)]
    for result in results:
        with pytest.raises(RuntimeError, match="differentiated once only"):
            torch.autograd.grad(result.sum(), list(inputs.values()), retain_graph=True)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_copies_have_gradients_and_notice_changes(kernel, device, copied):
    logits = normal((5, 4), F32, device=device)
    options = kernel.RoutingOptions(2)
    training = kernel.route(logits, options).into_training(logits, kernel.RouterWeightOptions())
    dispatched = training.routing.dispatch(normal((5, 6), F32, device=device))
    grad = normal((5, 6), F32, device=device, seed=1)
    expected = dispatched.combine_backward(dispatched.values, grad)
    other, other_training = copied(dispatched), copied(training)
    for found, wanted in zip(other.combine_backward(other.values, grad), expected):
        assert_bits_equal(found, wanted)
    assert_bits_equal(other_training.backward(expected.weights), training.backward(expected.weights))
    other.routing.weights.add_(1)
    with pytest.raises(RuntimeError, match="weights has been modified by an inplace operation"):
        other.combine_backward(other.values, grad)
    with pytest.raises(RuntimeError, match="copy: weights has been modified by an inplace operation"):
        copied(other)


def test_the_output_of_the_training_forward_has_a_gradient_too(kernel, device):
    """Whoever goes on with autograd instead of the cache loses nothing."""
    inputs = FORWARD_DISPATCHED.inputs(device=device, requires_grad=True)
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    rows = swiglu_experts(kernel, inputs).forward_dispatched_training(dispatched)
    grad = random_gradient(rows.output)
    found = gradients(rows.output, inputs, grad)
    expected = rows.cache.backward(grad)
    for name in ("gate", "up", "down"):
        assert_bits_equal(found[name], getattr(expected, name).detach())


SAVED = {
    "logits": {*ROUTERS, *SELECTED_ROUTERS, *LAYERS},
    "gate": set(WITH_EXPERTS),
    "up": set(WITH_EXPERTS),
    "down": set(WITH_EXPERTS),
    "expert_output": {operation for operation in OPERATIONS if operation.id == "combine"},
    "weights": {operation for operation in OPERATIONS if operation.id == "combine"},
}


@pytest.mark.parametrize(
    "operation, argument",
    [
        case
        for case in arguments_of_all_operations()
        if case.values[0] in SAVED.get(case.values[1], ()) or case.values[0].id.endswith("and_mul")
    ],
)
def test_changing_what_was_saved_before_the_backward_raises(kernel, device, operation, argument):
    inputs = operation.inputs(device=device, requires_grad=True)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    output = operation.run(kernel, copies)
    with torch.no_grad():
        copies[argument].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@for_each(*OPERATIONS)
def test_backward_twice_needs_retain_graph(kernel, device, operation):
    loss = operation.run(kernel, operation.inputs(device=device, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@for_each(*OPERATIONS)
def test_non_leaf_arguments_and_views(kernel, device, operation):
    """Arguments that are results of other operations."""
    inputs = operation.inputs(device=device, requires_grad=True)
    views = {name: (tensor * 1)[...] for name, tensor in inputs.items()}
    grad = random_gradient(operation.run(kernel, inputs))
    direct = gradients(operation.run(kernel, inputs), inputs, grad)
    through_views = gradients(operation.run(kernel, views), inputs, grad)
    for name, gradient in direct.items():
        assert_bits_equal(through_views[name], gradient)


@for_each(*OPERATIONS)
def test_parameters_and_dense_subclasses(kernel, device, operation):
    class Tagged(torch.Tensor):
        pass

    inputs = operation.inputs(device=device)
    expected = operation.run(kernel, inputs)
    for wrap in (torch.nn.Parameter, lambda tensor: tensor.as_subclass(Tagged)):
        wrapped = {name: wrap(tensor) for name, tensor in differentiable(inputs).items()}
        output = operation.run(kernel, {**inputs, **wrapped})
        assert_same(operation, output.detach().as_subclass(torch.Tensor), expected)


@for_each(*OPERATIONS)
def test_negative_views(kernel, device, operation):
    """The imaginary part of a conjugate holds the values with the opposite sign in memory."""
    inputs = operation.inputs(device=device)
    lazy = {
        name: torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        for name, tensor in differentiable(inputs).items()
    }
    assert all(tensor.is_neg() for tensor in lazy.values())
    assert_bits_equal(operation.run(kernel, {**inputs, **lazy}), operation.run(kernel, inputs))


@for_each(*OPERATIONS)
def test_derivatives_of_function_transforms_are_refused(kernel, device, operation):
    """`torch.func` and forward mode need what the functions do not have; a derivative is never silently zero."""
    inputs = operation.inputs(device=device)
    name, leaf = next(iter(differentiable(inputs).items()))

    def run(leaf):
        return operation.run(kernel, {**inputs, name: leaf})

    with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
        torch.func.grad(lambda leaf: run(leaf).sum())(leaf)
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(run, (leaf,), (torch.ones_like(leaf),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf))
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            run(dual)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("recorder", ["export", "make_fx", "functionalize"])
def test_recorded_calls_keep_their_gradients(kernel, device, operation, recorder):
    """Whoever records the bare op, without a gradient in sight, gets the gradients later all the same."""
    plain = operation.inputs(device=device)
    names = list(differentiable(plain))

    def run(*tensors):
        return operation.run(kernel, {**plain, **dict(zip(names, tensors, strict=True))})

    example = tuple(plain[name] for name in names)
    if recorder == "export":
        module = type("Call", (torch.nn.Module,), {"forward": lambda self, *tensors: run(*tensors)})()
        call = torch.export.export(module, example).module()
    elif recorder == "make_fx":
        call = make_fx(run)(*example)
    else:
        call = torch.func.functionalize(run)
    leaves = [plain[name].clone().requires_grad_() for name in names]
    output = run(*leaves)
    grad = random_gradient(output)
    expected = torch.autograd.grad(output, leaves, grad)
    found = torch.autograd.grad(call(*leaves), leaves, grad)
    for one, other in zip(found, expected, strict=True):
        assert_same(operation, one, other)


@for_each(*(operation for operation in OPERATIONS if operation.per_token))
def test_vmap_over_batches(kernel, device, operation):
    """One call for each sample."""
    inputs = operation.inputs(device=device)
    over = {name: 0 if name in operation.per_token else None for name in inputs}
    stacked = {
        name: torch.stack([tensor, tensor.flip(0)]) if over[name] == 0 else tensor for name, tensor in inputs.items()
    }
    found = torch.vmap(lambda arguments: operation.run(kernel, arguments), in_dims=(over,))(stacked)
    for sample in range(2):
        one = {name: tensor[sample] if over[name] == 0 else tensor for name, tensor in stacked.items()}
        torch.testing.assert_close(found[sample], operation.run(kernel, one))


def test_anomaly_mode_and_checkpointing(kernel, device):
    inputs = FORWARD.inputs(dtype=BF16, device=device, requires_grad=True)
    grad = random_gradient(FORWARD.run(kernel, inputs))
    direct = gradients(FORWARD.run(kernel, inputs), inputs, grad)

    def run(*tensors):
        return FORWARD.run(kernel, dict(zip(inputs, tensors, strict=True)))

    with torch.autograd.detect_anomaly(check_nan=False):
        output = torch.utils.checkpoint.checkpoint(run, *inputs.values(), use_reentrant=False)
        found = gradients(output, inputs, grad)
    for name in inputs:
        assert_bits_equal(found[name], direct[name])


@pytest.mark.parametrize("name", ["experts", "experts_training", "fused_experts"])
@pytest.mark.parametrize("fused_gate", [False, True], ids=["gate_and_up", "fused_gate"])
def test_direct_calls_of_ops_have_gradients(kernel, ops, device, name, fused_gate):
    """An op called by itself computes again what it did not keep."""
    inputs = FORWARD_DISPATCHED.inputs(device=device, requires_grad=True)
    matrices = [inputs["gate"], inputs["up"], inputs["down"]]
    expected_output = FORWARD_DISPATCHED.run(kernel, inputs)
    if fused_gate:
        matrices[:2] = [torch.cat(matrices[:2], 1), None]
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    if name == "fused_experts":
        factors = torch.ones(inputs["indices"].shape, device=device, requires_grad=True)
        output = ops.fused_experts(inputs["input"], inputs["indices"], factors, *matrices, False)
        expected_output = dispatched.combine(expected_output)
    else:
        results = getattr(ops, name)(dispatched.values, dispatched.expert_offsets, *matrices, False)
        output = results if name == "experts" else results[0]
        if name == "experts_training":
            assert [result.requires_grad for result in results] == [True, False, False]
    grad = random_gradient(output)
    expected = gradients(expected_output, inputs, grad)
    for argument, gradient in gradients(output, inputs, grad).items():
        torch.testing.assert_close(gradient, expected[argument])
        assert gradient.dtype == F32


def test_frozen_experts_keep_no_projections(kernel, ops, device):
    """Where only the router learns, nothing is kept of the experts but their output."""
    inputs = without_grad(FORWARD.inputs(device=device), {"logits"})
    with RecordedOps(ops) as recorded:
        FORWARD.run(kernel, inputs)
    assert recorded.named("experts")
    assert not recorded.named("experts_training")


def test_nothing_is_launched_for_what_will_be_refused(kernel, ops, device):
    inputs = FORWARD.inputs(device=device)
    for name, wrong in (("input", inputs["input"].half()), ("logits", inputs["logits"][:, :-1])):
        with RecordedOps(ops) as recorded, pytest.raises(kernel.MoeError):
            FORWARD.run(kernel, {**inputs, name: wrong})
        assert not recorded.calls


@pytest.mark.parametrize("renormalize", [False, True])
def test_more_choices_than_the_backward_op_takes(kernel, device, renormalize):
    """`route` has no bound on top_k; the gradient is then computed in plain PyTorch."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    weights = kernel.route(logits, kernel.RoutingOptions(80, renormalize)).weights
    leaf = logits.detach().cpu().double().requires_grad_()
    _, exact = kernel.reference.route(leaf, kernel.RoutingOptions(80, renormalize), compute_dtype=torch.float64)
    grad = random_gradient(weights)
    (found,) = torch.autograd.grad(weights, logits, grad)
    (expected,) = torch.autograd.grad(exact, leaf, grad.cpu().double())
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-4, atol=1e-7)
