"""The registered ops: schemas, fakes, and what the backward ops leave out."""

import re

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, F16, F32, OPERATIONS, shares_storage

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]

SCHEMAS = {
    "rms_norm": "(Tensor input, Tensor gamma, float epsilon, bool zero_centered) -> Tensor",
    "rms_norm_backward": "(Tensor grad, Tensor? grad_sum, Tensor input, Tensor gamma, float epsilon, "
    "bool zero_centered, bool need_input, bool need_gamma) -> (Tensor, Tensor)",
    "fused_add_rms_norm": "(Tensor input, Tensor residual, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    "rms_norm_gated": "(Tensor input, Tensor gate, Tensor gamma, float epsilon, str activation) -> Tensor",
    "rms_norm_gated_backward": "(Tensor grad, Tensor input, Tensor gate, Tensor gamma, float epsilon, "
    "str activation, bool need_input, bool need_gate, bool need_gamma) -> (Tensor, Tensor, Tensor)",
    "layer_norm": "(Tensor input, Tensor gamma, Tensor? beta, float epsilon) -> Tensor",
    "layer_norm_backward": "(Tensor grad, Tensor? grad_sum, Tensor input, Tensor gamma, float epsilon, "
    "bool need_input, bool need_gamma, bool need_beta) -> (Tensor, Tensor, Tensor)",
    "fused_add_layer_norm": "(Tensor input, Tensor residual, Tensor gamma, Tensor? beta, float epsilon) "
    "-> (Tensor, Tensor)",
    "softmax_last_axis": "(Tensor input) -> Tensor",
    "softmax_last_axis_backward": "(Tensor grad, Tensor output) -> Tensor",
    "cpu_isa": "() -> str",
}
TENSOR_OPS = [name for name in SCHEMAS if name != "cpu_isa"]

SHAPES = [(4, 21), (21,), (0, 21), (2, 3, 16), (1, 1)]
DTYPES = [(F32, F32), (BF16, F32), (F16, F16)]


def arguments(name, shape, dtype, parameter_dtype, device, *, optional=True, need=True):
    """Arguments of an op in the order of its schema; `optional` and `need` set all of that kind."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    values = {
        "float epsilon": 1e-5,
        "bool zero_centered": optional,
        "str activation": "silu" if optional else "sigmoid",
    }
    result = []
    for argument in SCHEMAS[name][1:].split(")")[0].split(", "):
        kind, argument_name = argument.split()
        if argument_name.startswith("need_"):
            result.append(need)
        elif kind == "Tensor?" and not optional:
            result.append(None)
        elif kind.startswith("Tensor"):
            parameter = argument_name in ("gamma", "beta")
            result.append(normal(shape[-1:], parameter_dtype) if parameter else normal(shape, dtype))
        else:
            result.append(values[argument])
    return result


def is_cpu_build(ops):
    """Whether the kernels are the CPU's own, not a GPU's, on it or on the bench."""
    return ops.name.startswith("_rudnn_normalization_cpu_")


def test_schemas(ops):
    for name, schema in SCHEMAS.items():
        if name == "cpu_isa" and not is_cpu_build(ops):
            continue
        found = str(getattr(ops, name).default._schema)
        without_result_names = re.sub(r"(?<=-> ).*", lambda results: re.sub(r"Tensor \w+", "Tensor", results[0]), found)
        assert without_result_names.split("::")[1] == f"{name}{schema}"


def test_no_other_op_is_registered(ops):
    registered = torch._C._dispatch_get_all_op_names()
    found = {name.split("::")[1].split(".")[0] for name in registered if name.startswith(f"{ops.name}::")}
    assert found == set(SCHEMAS if is_cpu_build(ops) else TENSOR_OPS)


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("optional", [True, False], ids=["with_optionals", "without_optionals"])
def test_opcheck(ops, device, name, dtypes, optional):
    for shape in ((4, 21), (0, 21)) if dtypes == (F32, F32) else ((2, 3, 16),):
        torch.library.opcheck(
            getattr(ops, name).default, arguments(name, shape, *dtypes, device, optional=optional, need=optional)
        )


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_the_fake_agrees_with_the_op(ops, device, name):
    """Shape, dtype and strides, also of inputs that are not contiguous."""
    for shape in SHAPES:
        for dtypes in DTYPES:
            for need in (True, False):
                values = arguments(name, shape, *dtypes, device, need=need)
                values = [value.mT.contiguous().mT if is_matrix(value) else value for value in values]
                op = getattr(ops, name).default
                real = op(*values)
                fake = op(*[value.to("meta") if isinstance(value, torch.Tensor) else value for value in values])
                real, fake = ((out,) if isinstance(out, torch.Tensor) else out for out in (real, fake))
                for one, other in zip(real, fake, strict=True):
                    assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def is_matrix(value):
    return isinstance(value, torch.Tensor) and value.dim() >= 2


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_meta_tensors_in_meta_tensors_out(kernel, operation):
    inputs = operation.inputs((2, 3, 21), BF16, device="meta")
    for output in operation.run(kernel, inputs):
        assert (output.shape, output.dtype, output.device.type) == ((2, 3, 21), BF16, "meta")


BACKWARD_OPS = {
    "rms_norm_backward": ("input", "gamma"),
    "rms_norm_gated_backward": ("input", "gate", "gamma"),
    "layer_norm_backward": ("input", "gamma", "beta"),
}


@pytest.mark.simt_checked
@pytest.mark.parametrize("name", BACKWARD_OPS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "f16"])
def test_a_gradient_that_is_not_needed_is_empty(ops, device, name, dtypes):
    """Every combination of need_* gives the same gradients as all together; parameters' are float32."""
    op = getattr(ops, name).default
    outputs = BACKWARD_OPS[name]
    values = arguments(name, (4, 21), *dtypes, device)
    everything = op(*values)
    for bits in range(2 ** len(outputs)):
        need = [bool(bits >> i & 1) for i in range(len(outputs))]
        for output, wanted, all_wanted, found in zip(
            outputs, need, everything, op(*values[: -len(need)], *need), strict=True
        ):
            assert found.dtype == (F32 if output in ("gamma", "beta") else dtypes[0])
            if wanted:
                assert_bits_equal(found, all_wanted)
            else:
                assert found.shape == (0,)


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_no_output_aliases_an_input(ops, device, name):
    """Not even where nothing has to be computed."""
    for optional in (True, False):
        values = arguments(name, (4, 21), F32, F32, device, optional=optional)
        outputs = getattr(ops, name).default(*values)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for i, output in enumerate(outputs):
            assert not any(shares_storage(output, other) for other in [*tensors, *outputs[i + 1 :]])


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_outputs_are_allocated_where_poison_reaches_them(ops, device, name):
    """PyTorch fills fresh tensors with NaN in `aten::empty` and its kin; other allocations would go unpoisoned."""
    values = arguments(name, (4, 21), F32, F32, device)
    op = getattr(ops, name).default
    count = len(op._schema.returns)
    with torch.autograd.profiler.profile() as profile:
        op(*values)
    allocations = [
        event.name for event in profile.function_events if event.name.startswith(("aten::empty", "aten::new_empty"))
    ]
    fills = [event.name for event in profile.function_events if event.name == "aten::fill_"]
    assert len(allocations) >= count
    assert len(fills) >= count


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_storage_that_has_been_freed_is_refused(ops, device, name):
    """As sharding and offloading leave it behind: the tensor keeps its shape."""
    given = arguments(name, SHAPES[0], F32, F32, device)
    for position, argument in enumerate(given):
        if not isinstance(argument, torch.Tensor) or argument.numel() == 0:
            continue
        for left in (0, argument.nbytes - 1):
            freed = argument.clone()
            freed.untyped_storage().resize_(left)
            with pytest.raises(RuntimeError, match="must have memory for all its elements"):
                getattr(ops, name)(*given[:position], freed, *given[position + 1 :])
