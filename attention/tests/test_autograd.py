"""How attention behaves under autograd, apart from the numbers: what is computed, what is refused."""

import itertools

import pytest
import torch
import torch.utils.checkpoint
from conftest import assert_bits_equal, in_layout
from operations import (
    BF16,
    CAUSAL,
    EVERYTHING,
    F32,
    PLAIN,
    by_strategy,
    differentiable,
    for_each,
    gradients,
    random_gradient,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]

by_kind = pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
"""What is the same for both flash strategies."""

NAMES = ("query", "key", "value", "attn_bias", "sinks")


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


SUBSETS = [subset for size in range(1, 6) for subset in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
@by_strategy
def test_only_what_is_asked_for(kernel, ops, device, dtype, strategy, subset):
    """Each subset of the inputs gets the same gradients as all together, and no other is computed."""
    inputs = EVERYTHING.inputs(dtype=dtype, device=device, requires_grad=True)
    output, _ = EVERYTHING.run(kernel, inputs, strategy)
    grad = random_gradient(output)
    everything = gradients(output, inputs, grad)
    some = without_grad(inputs, subset)
    output, _ = EVERYTHING.run(kernel, some, strategy)
    with RecordedOps(ops) as recorded:
        found = gradients(output, some, grad)
    assert set(found) == set(subset)
    for name, gradient in found.items():
        assert_bits_equal(gradient, everything[name])
    op = "attention_fallback_backward" if strategy == "fallback" else "attention_backward"
    (arguments,) = recorded.named(op)
    for name in NAMES:
        assert arguments[f"need_{name.removeprefix('attn_')}"] == (name in subset)


@by_kind
@for_each(PLAIN, EVERYTHING)
def test_no_graph_without_a_gradient(kernel, device, variant, strategy):
    inputs = variant.inputs(device=device, requires_grad=True)
    expected, _ = variant.run(kernel, inputs, strategy)
    assert expected.grad_fn is not None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            output, lse = variant.run(kernel, inputs, strategy)
        assert not output.requires_grad
        assert not lse.requires_grad
        assert_bits_equal(output.clone(), expected.detach())
    assert not variant.run(kernel, without_grad(inputs, ()), strategy)[0].requires_grad


@by_kind
def test_the_log_sum_exp_has_no_gradient(kernel, device, strategy):
    """Asking for one raises, alone and beside the output; the sinks' gradient comes through the output."""
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    output, lse = EVERYTHING.run(kernel, inputs, strategy)
    for loss in (lse.sum(), output.sum() + lse.sum()):
        with pytest.raises(RuntimeError, match="log-sum-exp carries no gradient"):
            loss.backward(retain_graph=True)
    output.sum().backward()
    assert inputs["sinks"].grad.abs().sum() > 0


@by_strategy
def test_expanded_gradient(kernel, device, dtype, strategy):
    """`out.sum().backward()` hands over one element with stride 0."""
    inputs = EVERYTHING.inputs(dtype=dtype, device=device, requires_grad=True)
    output, _ = EVERYTHING.run(kernel, inputs, strategy)
    dense = gradients(output, inputs, torch.ones_like(output))
    output, _ = EVERYTHING.run(kernel, inputs, strategy)
    expanded = gradients(output.sum(), inputs, torch.ones((), dtype=dtype, device=device))
    for name, gradient in dense.items():
        assert_bits_equal(expanded[name], gradient)


@by_strategy
@pytest.mark.parametrize("layout", ["transposed", "every_second", "row_strided", "offset", "expanded_rows"])
def test_strided_gradient(kernel, device, dtype, strategy, layout):
    inputs = EVERYTHING.inputs(dtype=dtype, device=device, requires_grad=True)
    output, _ = EVERYTHING.run(kernel, inputs, strategy)
    strided = in_layout(random_gradient(output), layout)
    found = gradients(output, inputs, strided)
    dense = gradients(EVERYTHING.run(kernel, inputs, strategy)[0], inputs, strided.contiguous())
    for name, gradient in dense.items():
        assert_bits_equal(found[name], gradient)


@by_kind
def test_gradients_accumulate(kernel, device, strategy):
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    for _ in range(2):
        EVERYTHING.run(kernel, inputs, strategy)[0].square().sum().backward()
    loss = EVERYTHING.run(kernel, inputs, strategy)[0].square().sum()
    for name, gradient in gradients(loss, inputs, torch.ones((), device=device)).items():
        assert_bits_equal(inputs[name].grad, 2 * gradient)


LOSSES = {"constant_gradient": torch.Tensor.sum, "varying_gradient": lambda output: output.square().sum()}


@by_kind
@pytest.mark.parametrize("argument", NAMES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_second_derivative_raises(kernel, device, strategy, argument, loss):
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    output, _ = EVERYTHING.run(kernel, inputs, strategy)
    (grad,) = torch.autograd.grad(loss(output), inputs[argument], create_graph=True)
    # The input itself takes part in the loss, so a gradient that is cut would go unnoticed.
    second = grad.square().sum() + inputs[argument].sum()
    with pytest.raises(RuntimeError, match="differentiated once only"):
        second.backward()


@by_kind
@pytest.mark.parametrize("argument", [*NAMES, "mask"])
def test_changing_what_was_saved_before_the_backward_raises(kernel, device, strategy, argument):
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    output, _ = EVERYTHING.run(kernel, copies, strategy)
    with torch.no_grad():
        copies[argument].fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@by_kind
@pytest.mark.parametrize("argument", [*NAMES, "mask"])
def test_freeing_what_was_saved_before_the_backward_raises(kernel, device, strategy, argument):
    """As sharding does with parameters, if it does it too early."""
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    output, _ = EVERYTHING.run(kernel, copies, strategy)
    copies[argument].untyped_storage().resize_(0)
    name = argument.removeprefix("attn_")
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{name} must have memory for all its elements"):
        output.sum().backward()


@by_kind
def test_changing_the_output_before_the_backward(kernel, device, strategy):
    """The flash strategies read it, and say so; the fallback does not."""
    inputs = PLAIN.inputs(device=device, requires_grad=True)
    output, _ = PLAIN.run(kernel, inputs, strategy)
    loss = output.sum()
    with torch.no_grad():
        output.add_(1)
    if strategy == "fallback":
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_kind
def test_backward_twice_needs_retain_graph(kernel, device, strategy):
    loss = EVERYTHING.run(kernel, EVERYTHING.inputs(device=device, requires_grad=True), strategy)[0].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@by_kind
def test_non_leaf_arguments_and_views(kernel, device, strategy):
    """Arguments that are results of other operations."""
    inputs = EVERYTHING.inputs(device=device, requires_grad=True)
    views = {name: (t * 1)[...] if t.is_floating_point() else t for name, t in inputs.items()}
    grad = random_gradient(EVERYTHING.run(kernel, inputs, strategy)[0])
    direct = gradients(EVERYTHING.run(kernel, inputs, strategy)[0], inputs, grad)
    through_views = gradients(EVERYTHING.run(kernel, views, strategy)[0], inputs, grad)
    for name, gradient in direct.items():
        assert_bits_equal(through_views[name], gradient)


@by_kind
def test_parameters_and_dense_subclasses(kernel, device, strategy):
    class Tagged(torch.Tensor):
        pass

    inputs = EVERYTHING.inputs(device=device)
    expected, _ = EVERYTHING.run(kernel, inputs, strategy)
    for wrap in (torch.nn.Parameter, lambda tensor: tensor.as_subclass(Tagged)):
        wrapped = {name: wrap(tensor) for name, tensor in differentiable(inputs).items()}
        output, _ = EVERYTHING.run(kernel, {**inputs, **wrapped}, strategy)
        assert_bits_equal(output.detach().as_subclass(torch.Tensor), expected)


@by_kind
def test_negative_views(kernel, device, strategy):
    """The imaginary part of a conjugate holds the values with the opposite sign in memory."""
    inputs = EVERYTHING.inputs(device=device)
    lazy = {
        name: torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        for name, tensor in differentiable(inputs).items()
    }
    assert all(tensor.is_neg() for tensor in lazy.values())
    expected, _ = EVERYTHING.run(kernel, inputs, strategy)
    assert_bits_equal(EVERYTHING.run(kernel, {**inputs, **lazy}, strategy)[0], expected)


@by_kind
def test_derivatives_of_function_transforms_are_refused(kernel, device, strategy):
    """`torch.func` and forward mode need what the function does not have; a derivative is never silently zero."""
    inputs = EVERYTHING.inputs(device=device)
    leaf = inputs["query"]

    def run(leaf):
        return EVERYTHING.run(kernel, {**inputs, "query": leaf}, strategy)[0]

    with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
        torch.func.grad(lambda leaf: run(leaf).sum())(leaf)
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(run, (leaf,), (torch.ones_like(leaf),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf))
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            run(dual)


@by_kind
@pytest.mark.parametrize("recorder", ["export", "make_fx", "functionalize"])
def test_recorded_calls_keep_their_gradients(kernel, device, strategy, recorder):
    """Whoever records the bare op, without a gradient in sight, gets the gradients later all the same."""
    plain = EVERYTHING.inputs(device=device)

    def run(*tensors):
        return EVERYTHING.run(kernel, {**plain, **dict(zip(NAMES, tensors, strict=True))}, strategy)[0]

    example = tuple(plain[name] for name in NAMES)
    if recorder == "export":
        module = type("Call", (torch.nn.Module,), {"forward": lambda self, *tensors: run(*tensors)})()
        call = torch.export.export(module, example).module()
    elif recorder == "make_fx":
        call = make_fx(run)(*example)
    else:
        call = torch.func.functionalize(run)
    leaves = [plain[name].clone().requires_grad_() for name in NAMES]
    output = run(*leaves)
    grad = random_gradient(output)
    expected = torch.autograd.grad(output, leaves, grad)
    found = torch.autograd.grad(call(*leaves), leaves, grad)
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other)


@by_strategy
def test_anomaly_mode_and_checkpointing(kernel, device, dtype, strategy):
    inputs = CAUSAL.inputs(dtype=dtype, device=device, requires_grad=True)
    grad = random_gradient(CAUSAL.run(kernel, inputs, strategy)[0])
    direct = gradients(CAUSAL.run(kernel, inputs, strategy)[0], inputs, grad)

    def run(*tensors):
        return CAUSAL.run(kernel, dict(zip(inputs, tensors, strict=True)), strategy)[0]

    with torch.autograd.detect_anomaly(check_nan=False):
        output = torch.utils.checkpoint.checkpoint(run, *inputs.values(), use_reentrant=False)
        found = gradients(output, inputs, grad)
    for name in inputs:
        assert_bits_equal(found[name], direct[name])


@by_kind
def test_autocast_changes_nothing(kernel, device, strategy):
    """The arithmetic is float32 whatever the dtype of the inputs."""
    inputs = EVERYTHING.inputs(dtype=F32, device=device, requires_grad=True)
    expected, expected_lse = EVERYTHING.run(kernel, inputs, strategy)
    grad = random_gradient(expected)
    expected_gradients = gradients(expected, inputs, grad)
    with torch.autocast(device, dtype=BF16):
        output, lse = EVERYTHING.run(kernel, inputs, strategy)
        found = gradients(output, inputs, grad)
    assert_bits_equal(output.detach(), expected.detach())
    assert_bits_equal(lse.detach(), expected_lse.detach())
    for name, gradient in found.items():
        assert_bits_equal(gradient, expected_gradients[name])


def test_nothing_is_launched_for_what_will_be_refused(kernel, ops, device):
    inputs = EVERYTHING.inputs(device=device)
    for name, wrong in (("key", inputs["key"].half()), ("mask", inputs["mask"][..., :-1]), ("sinks", inputs["value"])):
        for strategy in ("fallback", "autotune"):
            with RecordedOps(ops) as recorded, pytest.raises(kernel.AttentionSetupError):
                EVERYTHING.run(kernel, {**inputs, name: wrong}, strategy)
            assert not [call for call in recorded.calls if call[0] == "attention_fallback"]
