"""Invalid arguments: the functions answer with NormalizationError, the registered ops with an exception."""

import math

import numpy
import pytest
import torch
from conftest import WITHOUT_MEMORY, assert_bits_equal, assert_refused, not_on_the_cpu
from operations import BF16, F16, OPERATIONS, RMS_NORM_GATED

pytestmark = [pytest.mark.small, pytest.mark.isa_independent, pytest.mark.kernels_ci]

FUNCTIONS = [operation for operation in OPERATIONS if operation.id == operation.name]
SHAPE = (3, 8)


def nested(tensor):
    return torch.nested.nested_tensor([tensor[:1], tensor[1:]])


def jagged(tensor):
    return torch.nested.nested_tensor([tensor[:1], tensor[1:]], layout=torch.jagged)


def quantised(tensor):
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


NOT_TENSORS = {
    "none": lambda tensor: None,
    "list": lambda tensor: tensor.tolist(),
    "number": lambda tensor: 1.0,
    "numpy": lambda tensor: numpy.ones(tuple(tensor.shape), numpy.float32),
    "string": lambda tensor: "tensor",
}
WRONG_KINDS = {
    "float64": torch.Tensor.double,
    "int32": torch.Tensor.int,
    "int64": torch.Tensor.long,
    "uint8": lambda tensor: tensor.to(torch.uint8),
    "bool": torch.Tensor.bool,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "sparse_coo": torch.Tensor.to_sparse,
    "quantised": quantised,
    **WITHOUT_MEMORY,
}
MATRIX_KINDS = {"sparse_csr": torch.Tensor.to_sparse_csr, "nested": nested, "jagged": jagged}

BAD_INPUTS = {
    **NOT_TENSORS,
    **WRONG_KINDS,
    **MATRIX_KINDS,
    "no_axes": lambda tensor: tensor[0, 0],
    "empty_last_axis": lambda tensor: tensor[:, :0],
    "empty_last_axis_and_no_rows": lambda tensor: tensor[:0, :0],
}
BAD_ROWS = {  # arguments that go with the input element by element
    **NOT_TENSORS,
    **WRONG_KINDS,
    **MATRIX_KINDS,
    "wrong_width": lambda tensor: tensor[:, :-1],
    "wrong_rows": lambda tensor: tensor[:-1],
    "broadcast_rows": lambda tensor: tensor[:1],
    "broadcast_columns": lambda tensor: tensor[:, :1],
    "missing_axis": lambda tensor: tensor[0],
    "extra_axis": lambda tensor: tensor[None],
    "transposed": lambda tensor: tensor.T,
    "other_float_dtype": lambda tensor: tensor.to(F16 if tensor.dtype != F16 else BF16),
    "other_device": lambda tensor: tensor.to("meta"),
}
BAD_PARAMETERS = {
    **NOT_TENSORS,
    **WRONG_KINDS,
    "no_axes": lambda tensor: tensor[0],
    "two_axes": lambda tensor: tensor[None],
    "column": lambda tensor: tensor[:, None],
    "one_too_few": lambda tensor: tensor[:-1],
    "one_too_many": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "one_element": lambda tensor: tensor[:1],
    "empty": lambda tensor: tensor[:0],
    "nested_scalars": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "half_beside_float32": torch.Tensor.half,
    "bfloat16_beside_float32": torch.Tensor.bfloat16,
    "other_device": lambda tensor: tensor.to("meta"),
}
BAD_EPSILONS = {
    "zero": 0.0,
    "integer_zero": 0,
    "negative": -1e-6,
    "minus_zero": -0.0,
    "nan": math.nan,
    "inf": math.inf,
    "minus_inf": -math.inf,
    "string": "1e-6",
    "none": None,
    "false": False,
    "true": True,
    "complex": 1e-6 + 0j,
    "tensor": torch.tensor(1e-6),
    "list": [1e-6],
    "too_large_for_a_float": 10**400,
}
OPTIONAL = {"beta"}


def bad_tensors(operation):
    for argument in operation.rows + operation.parameters:
        table = BAD_PARAMETERS if argument in operation.parameters else BAD_ROWS
        if argument == "input":
            table = BAD_INPUTS
        for id, change in table.items():
            if not (id == "none" and argument in OPTIONAL):
                yield pytest.param(operation, argument, change, id=f"{operation}-{argument}-{id}")


@pytest.mark.parametrize(
    "operation, argument, change", [case for operation in FUNCTIONS for case in bad_tensors(operation)]
)
def test_tensors(kernel, device, operation, argument, change):
    inputs = operation.inputs(SHAPE, device=device)
    inputs[argument] = change(inputs[argument])
    assert_refused(kernel.NormalizationError, argument, getattr(kernel, operation.name), **inputs)


@pytest.mark.parametrize("operation", FUNCTIONS, ids=str)
def test_a_tensor_left_on_the_cpu(kernel, device, operation):
    """Its address means nothing to a GPU."""
    not_on_the_cpu(device)
    inputs = operation.inputs(SHAPE, device=device)
    for argument, value in inputs.items():
        function = getattr(kernel, operation.name)
        assert_refused(kernel.NormalizationError, argument, function, **{**inputs, argument: value.cpu()})


@pytest.mark.parametrize("operation", [op for op in FUNCTIONS if op.parameters], ids=str)
@pytest.mark.parametrize("epsilon", BAD_EPSILONS.values(), ids=BAD_EPSILONS)
def test_epsilon(kernel, device, operation, epsilon):
    inputs = operation.inputs(SHAPE, device=device)
    assert_refused(kernel.NormalizationError, "epsilon", getattr(kernel, operation.name), **inputs, epsilon=epsilon)


@pytest.mark.parametrize("operation", [op for op in FUNCTIONS if op.parameters], ids=str)
@pytest.mark.parametrize("epsilon", [1, numpy.float64(1), numpy.float32(1)], ids=["int", "numpy_f64", "numpy_f32"])
def test_any_real_number_is_an_epsilon(kernel, device, operation, epsilon):
    inputs = operation.inputs(SHAPE, device=device, requires_grad=True)
    for output, expected in zip(
        operation.run(kernel, inputs, epsilon=epsilon), operation.run(kernel, inputs, epsilon=1.0), strict=True
    ):
        assert_bits_equal(output.detach(), expected.detach())


@pytest.mark.parametrize("value", [None, 0, 1, "yes", torch.tensor(True)], ids=["none", "0", "1", "string", "tensor"])
def test_zero_centered(kernel, device, value):
    input, gamma = torch.ones(SHAPE, device=device), torch.ones(8, device=device)
    assert_refused(kernel.NormalizationError, "zero_centered", kernel.rms_norm, input, gamma, zero_centered=value)


@pytest.mark.parametrize(
    "value",
    [None, 0, "", "SiLU", "gelu", b"silu", torch.nn.functional.silu, ["silu"], numpy.array(["silu"])],
    ids=repr,
)
def test_activation(kernel, device, value):
    inputs = RMS_NORM_GATED.inputs(SHAPE, device=device)
    assert_refused(kernel.NormalizationError, "activation", kernel.rms_norm_gated, **inputs, activation=value)


@pytest.mark.parametrize("activation", ["", "gelu", "silu\0"])
def test_registered_op_raises_for_an_activation(ops, device, activation):
    inputs = RMS_NORM_GATED.inputs(SHAPE, device=device)
    with pytest.raises(RuntimeError, match="activation"):
        ops.rms_norm_gated(**inputs, epsilon=1e-6, activation=activation)


@pytest.mark.parametrize("dtype, other", [(F16, BF16), (BF16, F16)], ids=["f16", "bf16"])
@pytest.mark.parametrize("operation", [op for op in FUNCTIONS if op.parameters], ids=str)
def test_parameters_of_the_other_half(kernel, device, operation, dtype, other):
    for argument in operation.parameters:
        inputs = operation.inputs(SHAPE, dtype, device=device)
        inputs[argument] = inputs[argument].to(other)
        assert_refused(kernel.NormalizationError, argument, getattr(kernel, operation.name), **inputs)


def test_the_message_says_op_requirement_and_what_came(kernel, device):
    with pytest.raises(kernel.NormalizationError) as caught:
        kernel.rms_norm(torch.ones(3, 576, device=device), torch.ones(577, device=device))
    message = str(caught.value)
    assert message.startswith("rms_norm: gamma must have shape (576,), got ")
    assert "(577,)" in message


def test_the_error_is_a_value_error(kernel):
    assert issubclass(kernel.NormalizationError, ValueError)
    assert kernel.NormalizationError.__doc__


@pytest.mark.parametrize("operation", FUNCTIONS, ids=str)
def test_wrong_calls_are_type_errors(kernel, device, operation):
    inputs = operation.inputs(SHAPE, device=device)
    function = getattr(kernel, operation.name)
    with pytest.raises(TypeError):
        function()
    with pytest.raises(TypeError):
        function(**inputs, nonsense=1)


@pytest.mark.parametrize("operation", FUNCTIONS, ids=str)
def test_no_rows_are_checked_like_others(kernel, device, operation):
    """An empty batch is legal, and no reason to accept what is not."""
    for argument in operation.parameters:
        inputs = operation.inputs((0, 8), device=device)
        inputs[argument] = inputs[argument][:-1]
        assert_refused(kernel.NormalizationError, argument, getattr(kernel, operation.name), **inputs)


def op_arguments(ops, name, device, shape=SHAPE):
    """Valid arguments of a registered op by name, for calls that change one of them."""
    rows = torch.randn(shape, device=device)
    values = {
        "gamma": torch.randn(shape[-1], device=device),
        "beta": torch.randn(shape[-1], device=device),
        "epsilon": 1e-5,
        "zero_centered": False,
        "activation": "silu",
    }
    arguments = {}
    for argument in getattr(ops, name).default._schema.arguments:
        needed = True if argument.name.startswith("need_") else rows.clone()
        arguments[argument.name] = values.get(argument.name, needed)
    return arguments


OP_NAMES = sorted(
    {
        f"{operation.name.removeprefix('fused_add_') if backward else operation.name}{backward}"
        for operation in FUNCTIONS
        for backward in ("", "_backward")
    }
)
OP_CHANGES = {
    "one_column_less": lambda tensor: tensor[..., :-1],
    "one_column_more": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "one_row_less": lambda tensor: tensor[:-1],
    "no_rows": lambda tensor: tensor[:0],
    "empty": lambda tensor: tensor[..., :0],
    "no_axes": lambda tensor: tensor.flatten()[0],
    "extra_axis": lambda tensor: tensor[None],
    "float64": torch.Tensor.double,
    "half": torch.Tensor.half,
    "int32": torch.Tensor.int,
    "bool": torch.Tensor.bool,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "quantised": quantised,
    "meta": lambda tensor: tensor.to("meta"),
}


# What the first tensor may be where it alone has the rows: any number of them, in any dtype of the three.
ONE_ROW_TENSOR = {"rms_norm", "layer_norm", "softmax_last_axis"}
LEGAL_ROWS = {"one_row_less", "no_rows", "extra_axis", "half"}
LEGAL_ALONE = {"one_column_less", "one_column_more", "meta"}


def bad_op_calls():
    for name in OP_NAMES:
        for id, change in OP_CHANGES.items():
            legal = name in ONE_ROW_TENSOR and id in LEGAL_ROWS
            legal |= name == "softmax_last_axis" and id in LEGAL_ALONE
            yield pytest.param(name, change, legal, id=f"{name}-{id}")


@pytest.mark.parametrize("name, change, legal_input", list(bad_op_calls()))
def test_registered_ops_raise(ops, device, name, change, legal_input):
    """Called directly, with one tensor that does not fit the others."""
    op = getattr(ops, name).default
    valid = op_arguments(ops, name, device)
    op(**valid)
    for argument, value in valid.items():
        if isinstance(value, torch.Tensor) and not (legal_input and argument == "input"):
            with pytest.raises((RuntimeError, NotImplementedError, ValueError, TypeError)):
                op(**{**valid, argument: change(value)})


@pytest.mark.parametrize("name", OP_NAMES)
def test_registered_ops_refuse_a_tensor_left_on_the_cpu(ops, device, name):
    not_on_the_cpu(device)
    op = getattr(ops, name).default
    valid = op_arguments(ops, name, device)
    for argument, value in valid.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(RuntimeError):
                op(**{**valid, argument: value.cpu()})


@pytest.mark.parametrize("name", OP_NAMES)
def test_registered_ops_take_any_strides(ops, device, name):
    """A strided tensor is never read as dense, in a direct call neither."""
    op = getattr(ops, name).default
    valid = op_arguments(ops, name, device)
    expected = op(**valid)
    for argument, value in valid.items():
        if isinstance(value, torch.Tensor):
            strided = torch.stack([value, torch.full_like(value, torch.nan)], -1)[..., 0]
            found = op(**{**valid, argument: strided})
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
