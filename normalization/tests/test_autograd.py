"""How every function behaves under autograd, apart from the numbers: what is computed, what is refused."""

import itertools

import pytest
import torch
import torch.utils.checkpoint
from conftest import assert_bits_equal, in_layout
from operations import (
    BF16,
    F32,
    FUSED_ADD_LAYER_NORM,
    FUSED_ADD_RMS_NORM,
    LAYER_NORM,
    OPERATIONS,
    by_input_dtype,
    for_each,
    gradients,
    random_gradients,
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


def subsets(operation):
    names = operation.rows + operation.parameters
    for size in range(1, len(names) + 1):
        for subset in itertools.combinations(names, size):
            yield pytest.param(operation, subset, id=f"{operation}-{'-'.join(subset)}")


FUSED = (FUSED_ADD_RMS_NORM.name, FUSED_ADD_LAYER_NORM.name)


def arguments_of_all_operations():
    return [
        pytest.param(operation, argument, id=f"{operation}-{argument}")
        for operation in OPERATIONS
        for argument in operation.rows + operation.parameters
    ]


def without_grad(inputs, subset):
    return {name: tensor.detach().requires_grad_(name in subset) for name, tensor in inputs.items()}


@pytest.mark.parametrize("operation, subset", [case for operation in OPERATIONS for case in subsets(operation)])
def test_only_what_is_asked_for(kernel, ops, device, operation, subset):
    """Each subset of the inputs gets the same gradients as all together, and the backward op is asked for no other."""
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    grads = random_gradients(outputs)
    everything = gradients(outputs, inputs, grads)
    some = without_grad(inputs, subset)
    outputs = operation.run(kernel, some)
    with RecordedOps(ops) as recorded:
        found = gradients(outputs, some, grads)
    assert set(found) == set(subset)
    for name, grad in found.items():
        assert_bits_equal(grad, everything[name])
    ((_, arguments),) = recorded.calls
    asked = {name.removeprefix("need_"): value for name, value in arguments.items() if name.startswith("need_")}
    wanted = {"input" if name == "residual" else name for name in subset}
    assert {name for name, value in asked.items() if value} == (wanted if asked else set())


@for_each(*OPERATIONS)
def test_no_graph_without_a_gradient(kernel, ops, device, operation):
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    expected = operation.run(kernel, inputs)
    assert all(output.requires_grad and output.grad_fn is not None for output in expected)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = operation.run(kernel, inputs)
        for output, with_graph in zip(outputs, expected, strict=True):
            assert not output.requires_grad
            assert_bits_equal(output.clone(), with_graph.detach())
    for output in operation.run(kernel, without_grad(inputs, ())):
        assert not output.requires_grad


@for_each(*OPERATIONS)
@by_input_dtype
def test_gradients_keep_the_dtype_of_their_input(kernel, device, operation, dtype):
    for parameter_dtype in (F32, dtype):
        inputs = operation.inputs((4, 21), dtype, parameter_dtype, device=device, requires_grad=True)
        outputs = operation.run(kernel, inputs)
        for name, grad in gradients(outputs, inputs, random_gradients(outputs)).items():
            assert grad.dtype == inputs[name].dtype
            assert grad.shape == inputs[name].shape


@for_each(*OPERATIONS)
@by_input_dtype
def test_expanded_gradient(kernel, device, operation, dtype):
    """`out.sum().backward()` hands over one element with stride 0."""
    inputs = operation.inputs((2, 3, 21), dtype, device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    dense = gradients(outputs, inputs, [torch.ones_like(output) for output in outputs])
    outputs = operation.run(kernel, inputs)
    expanded = gradients(
        [sum(output.sum() for output in outputs)], inputs, [torch.ones((), dtype=dtype, device=device)]
    )
    for name in inputs:
        assert_bits_equal(expanded[name], dense[name])


@for_each(*OPERATIONS)
@pytest.mark.parametrize("layout", ["transposed", "every_second", "row_strided", "offset", "expanded_rows"])
def test_strided_gradient(kernel, device, operation, layout):
    inputs = operation.inputs((2, 3, 21), device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    strided = [in_layout(grad, layout) for grad in random_gradients(outputs)]
    found = gradients(outputs, inputs, strided)
    dense = gradients(operation.run(kernel, inputs), inputs, [grad.contiguous() for grad in strided])
    for name in inputs:
        assert_bits_equal(found[name], dense[name])


@for_each(FUSED_ADD_RMS_NORM, FUSED_ADD_LAYER_NORM)
@pytest.mark.parametrize("used", [0, 1], ids=["only_normalised", "only_sum"])
def test_one_output_unused(kernel, device, operation, used):
    """The gradients are those of a zero gradient for the other output, bit for bit."""
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    grad = random_gradients(outputs)[used]
    names = list(inputs)
    found = torch.autograd.grad(outputs[used], [inputs[name] for name in names], grad, materialize_grads=True)
    found = dict(zip(names, found, strict=True))
    outputs = operation.run(kernel, inputs)
    grads = [torch.zeros_like(output) for output in outputs]
    grads[used] = grad
    expected = gradients(outputs, inputs, grads)
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    if used == 1:
        assert_bits_equal(found["input"], grad)


@for_each(FUSED_ADD_RMS_NORM, FUSED_ADD_LAYER_NORM)
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=["inf", "nan"])
def test_a_loss_of_the_sum_alone_does_not_see_the_norm(kernel, device, operation, value):
    """The norm of a row that is not finite has no derivative, but here nobody asks for it."""
    inputs = operation.inputs((4, 21), device=device)
    inputs["input"][2, 5] = value
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    _, total = operation.run(kernel, inputs)
    found = dict(zip(inputs, torch.autograd.grad(total.sum(), leaves, materialize_grads=True), strict=True))
    for name, grad in found.items():
        expected = torch.ones_like(grad) if name in operation.rows else torch.zeros_like(grad)
        assert torch.equal(grad, expected), name


@for_each(FUSED_ADD_RMS_NORM, FUSED_ADD_LAYER_NORM)
def test_input_and_residual_have_gradients_of_their_own(kernel, device, operation):
    """They are equal, but changing one in place must not change the other."""
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    sum(output.sum() for output in operation.run(kernel, inputs)).backward()
    kept = inputs["residual"].grad.clone()
    inputs["input"].grad.zero_()
    assert_bits_equal(inputs["residual"].grad, kept)


@for_each(*OPERATIONS)
def test_gradients_accumulate(kernel, device, operation):
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    for _ in range(2):
        sum(output.square().sum() for output in operation.run(kernel, inputs)).backward()
    twice = {name: tensor.grad.clone() for name, tensor in inputs.items()}
    once = gradients(
        [sum(output.square().sum() for output in operation.run(kernel, inputs))],
        inputs,
        [torch.ones((), device=device)],
    )
    for name in inputs:
        assert_bits_equal(twice[name], 2 * once[name])


@for_each(*(operation for operation in OPERATIONS if len(operation.rows) == 2))
def test_the_same_tensor_twice(kernel, device, operation):
    """`input` may also be the gate or the residual; its gradient is then the sum of both."""
    second = operation.rows[1]
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    inputs[second] = inputs["input"].detach().clone().requires_grad_()
    outputs = operation.run(kernel, inputs)
    grads = random_gradients(outputs)
    apart = gradients(outputs, inputs, grads)
    shared = {**inputs, second: inputs["input"]}
    outputs = operation.run(kernel, shared)
    (found,) = torch.autograd.grad(outputs, inputs["input"], grads)
    assert_bits_equal(found, apart["input"] + apart[second])


LOSSES = {"constant_gradient": torch.Tensor.sum, "varying_gradient": lambda output: output.square().sum()}


@pytest.mark.parametrize("operation, argument", arguments_of_all_operations())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_second_derivative_raises(kernel, device, operation, argument, loss):
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    (grad,) = torch.autograd.grad(loss(outputs[0]), inputs[argument], create_graph=True)
    # The input itself takes part in the loss, so a gradient that is cut would go unnoticed.
    second = grad.square().sum() + inputs["input"].sum()
    with pytest.raises(RuntimeError, match="differentiated once only"):
        second.backward()


@pytest.mark.parametrize(
    "operation, argument", [case for case in arguments_of_all_operations() if case.values[1] != "beta"]
)
def test_changing_what_was_saved_before_the_backward_raises(kernel, device, operation, argument):
    """softmax saves its output, the fused functions save the sum, the others their inputs; nobody needs beta."""
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    outputs = operation.run(kernel, copies)
    saved = copies[argument]
    if argument in operation.rows and operation.name in ("softmax_last_axis", *FUSED):
        saved = outputs[-1]
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(output.sum() for output in outputs).backward()


@for_each(*OPERATIONS)
def test_backward_twice_needs_retain_graph(kernel, device, operation):
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    loss = sum(output.sum() for output in operation.run(kernel, inputs))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@for_each(*OPERATIONS)
def test_non_leaf_parameters_and_views(kernel, device, operation):
    """Inputs that are results of other operations, and parameters that are views into one buffer."""
    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    views = {name: (tensor * 1)[...] for name, tensor in inputs.items()}
    grads = random_gradients(operation.run(kernel, inputs))
    direct = gradients(operation.run(kernel, inputs), inputs, grads)
    through_views = gradients(operation.run(kernel, views), inputs, grads)
    for name in inputs:
        assert_bits_equal(through_views[name], direct[name])


@for_each(*OPERATIONS)
def test_parameters_and_dense_subclasses(kernel, device, operation):
    class Tagged(torch.Tensor):
        pass

    inputs = operation.inputs((4, 21), device=device)
    expected = operation.run(kernel, inputs)
    for wrap in (torch.nn.Parameter, lambda tensor: tensor.as_subclass(Tagged)):
        outputs = operation.run(kernel, {name: wrap(tensor) for name, tensor in inputs.items()})
        for output, plain in zip(outputs, expected, strict=True):
            assert_bits_equal(output.detach().as_subclass(torch.Tensor), plain)


@for_each(*OPERATIONS)
def test_negative_views(kernel, device, operation):
    """The imaginary part of a conjugate holds the values with the opposite sign in memory."""
    inputs = operation.inputs((4, 21), device=device)
    lazy = {name: torch.complex(torch.zeros_like(t), -t).conj().imag for name, t in inputs.items()}
    assert all(tensor.is_neg() for tensor in lazy.values())
    for output, expected in zip(operation.run(kernel, lazy), operation.run(kernel, inputs), strict=True):
        assert_bits_equal(output, expected)


@for_each(*OPERATIONS)
def test_derivatives_of_function_transforms_are_refused(kernel, device, operation):
    """`torch.func` and forward mode need what the functions do not have; a derivative is never silently zero."""
    inputs = operation.inputs((4, 21), device=device)
    leaf = inputs["input"]

    def run(input):
        return operation.run(kernel, {**inputs, "input": input})[0]

    with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
        torch.func.grad(lambda input: run(input).sum())(leaf)
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(run, (leaf,), (torch.ones_like(leaf),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf))
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            run(dual)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("recorder", ["export", "make_fx", "functionalize", "vmap"])
def test_recorded_calls_keep_their_gradients(kernel, device, operation, recorder):
    """Whoever calls or records the bare op, without a gradient in sight, gets the gradients later all the same."""
    plain = operation.inputs((4, 21), device=device)
    names = list(plain)

    def run(*tensors):
        return operation.run(kernel, dict(zip(names, tensors, strict=True)))[0]

    example = [tensor.detach() for tensor in plain.values()]
    if recorder == "export":
        module = type("Call", (torch.nn.Module,), {"forward": lambda self, *tensors: run(*tensors)})()
        call = torch.export.export(module, tuple(example)).module()
    elif recorder == "make_fx":
        call = make_fx(run)(*example)
    elif recorder == "functionalize":
        call = torch.func.functionalize(run)
    elif recorder == "vmap":

        def call(*tensors):
            over = tuple(0 if name in operation.rows else None for name in names)
            return torch.vmap(run, in_dims=over)(*tensors)

    inputs = operation.inputs((4, 21), device=device, requires_grad=True)
    tensors = list(inputs.values())
    grad = torch.randn_like(tensors[0])
    expected = torch.autograd.grad(run(*tensors), tensors, grad)
    found = torch.autograd.grad(call(*tensors), tensors, grad)
    for one, other in zip(found, expected, strict=True):
        if recorder == "vmap":
            torch.testing.assert_close(one, other)  # a row at a time, so parameters' gradients add up otherwise
        else:
            assert_bits_equal(one, other)


@for_each(*OPERATIONS)
def test_vmap_over_rows(kernel, device, operation):
    inputs = operation.inputs((4, 21), device=device)
    over = dict.fromkeys(inputs) | dict.fromkeys(operation.rows, 0)
    found = torch.vmap(lambda arguments: operation.run(kernel, arguments), in_dims=(over,))(inputs)
    for output, expected in zip(found, operation.run(kernel, inputs), strict=True):
        assert_bits_equal(output, expected)


@for_each(LAYER_NORM)
def test_anomaly_mode_and_checkpointing(kernel, device, operation):
    inputs = operation.inputs((4, 21), BF16, device=device, requires_grad=True)
    grads = random_gradients(operation.run(kernel, inputs))
    direct = gradients(operation.run(kernel, inputs), inputs, grads)

    def run(*tensors):
        return operation.run(kernel, dict(zip(inputs, tensors, strict=True)))[0]

    with torch.autograd.detect_anomaly(check_nan=False):
        output = torch.utils.checkpoint.checkpoint(run, *inputs.values(), use_reentrant=False)
        found = gradients([output], inputs, grads)
    for name in inputs:
        assert_bits_equal(found[name], direct[name])
