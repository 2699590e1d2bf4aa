"""The registered ops: schemas, fakes, and what the backward ops leave out."""

import itertools
import re

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, F16, F32, OPERATIONS, Shape, make_indices, normal, shares_storage, strategies

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]

_EXPERTS = "Tensor gate, Tensor? up, Tensor down"
SCHEMAS = {
    "route": "(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)",
    "route_sigmoid_grouped": "(Tensor logits, Tensor? bias, int top_k, int groups, int selected_groups, "
    "bool group_top_two, bool renormalize, float scale) -> (Tensor, Tensor)",
    "selected_router_weights": "(Tensor logits, Tensor indices, str scoring, bool renormalize, float scale) -> Tensor",
    "selected_router_backward": "(Tensor logits, Tensor indices, Tensor grad_weights, str scoring, bool renormalize, "
    "float scale) -> Tensor",
    "dispatch": "(Tensor input, Tensor indices, int experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "dispatch_backward": "(Tensor grad_values, Tensor slot_rows) -> Tensor",
    "combine": "(Tensor expert_output, Tensor weights, Tensor slot_rows) -> Tensor",
    "combine_backward": "(Tensor grad, Tensor expert_output, Tensor weights, Tensor row_slots, Tensor slot_rows, "
    "bool plane, bool need_expert_output, bool need_weights) -> (Tensor, Tensor)",
    "experts": f"(Tensor values, Tensor expert_offsets, {_EXPERTS}, bool tensor_core) -> Tensor",
    "experts_training": f"(Tensor values, Tensor expert_offsets, {_EXPERTS}, bool tensor_core) "
    "-> (Tensor, Tensor, Tensor)",
    "experts_backward": f"(Tensor grad, Tensor values, Tensor expert_offsets, {_EXPERTS}, Tensor gate_projection, "
    "Tensor up_projection, bool tensor_core, bool float32_weights, bool need_values, bool need_gate, bool need_up, "
    "bool need_down) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "fused_experts": f"(Tensor input, Tensor indices, Tensor weights, {_EXPERTS}, bool tensor_core) -> Tensor",
    "gated_activation": "(Tensor input, str activation) -> Tensor",
    "gated_activation_backward": "(Tensor grad, Tensor input, str activation) -> Tensor",
    "tensor_core_dtypes": "() -> str",
    "cpu_isa": "() -> str",
}
TENSOR_OPS = [name for name in SCHEMAS if name not in ("cpu_isa", "tensor_core_dtypes")]
BACKWARD_OPS = [name for name in TENSOR_OPS if name.endswith("_backward")]

NEEDS = ("need_expert_output", "need_weights", "need_values", "need_gate", "need_up", "need_down")

SHAPES = [Shape(5, 4, 2, 24, 12), Shape(0, 4, 2, 24, 12), Shape(1, 1, 1, 1, 1)]
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}


def arguments(name, shape, dtype, device, *, optional=True, need=True):
    """Arguments of an op in the order of its schema; `optional` and `need` set all of that kind."""
    tokens, experts, top_k = shape.tokens, shape.experts, shape.top_k
    rows, hidden, intermediate = tokens * top_k, shape.hidden, shape.intermediate
    indices = make_indices(shape)
    reference = _dispatch_maps(indices, experts)
    sizes = {
        "logits": (tokens, experts),
        "input": (tokens, 2 * intermediate) if "activation" in name else (tokens, hidden),
        "grad_values": (rows, hidden),
        "values": (rows, hidden),
        "expert_output": (rows, hidden),
        "weights": (tokens, top_k),
        "gate": (experts, intermediate if optional else 2 * intermediate, hidden),
        "up": (experts, intermediate, hidden),
        "down": (experts, hidden, intermediate),
        "gate_projection": (rows, intermediate),
        "up_projection": (rows, intermediate),
        "grad": {
            "combine_backward": (tokens, hidden),
            "experts_backward": (rows, hidden),
            "gated_activation_backward": (tokens, intermediate),
        }.get(name),
    }
    others = {
        "bias": normal((experts,), F32),
        "grad_weights": normal((tokens, top_k), F32),
        "indices": indices,
        **reference,
        "top_k": top_k,
        "experts": experts,
        "groups": 1,
        "selected_groups": 1,
        "group_top_two": False,
        "renormalize": optional,
        "scale": 2.5 if optional else 1.0,
        "scoring": "softmax" if optional else "sigmoid",
        "activation": "silu" if optional else "gelu",
        "plane": optional,
        "tensor_core": False,
        "float32_weights": optional,
        **dict.fromkeys(NEEDS, need),
    }
    result = []
    for position, argument in enumerate(SCHEMAS[name][1:].split(") ->")[0].split(", ")):
        kind, argument_name = argument.split()
        if kind == "Tensor?" and not optional:
            result.append(None)
        elif argument_name in others:
            value = others[argument_name]
            result.append(value.to(device) if isinstance(value, torch.Tensor) else value)
        else:
            result.append(normal(sizes[argument_name], dtype, device=device, seed=position))
    return result


def _dispatch_maps(indices, experts):
    """What `dispatch` would make of the indices."""
    slots = indices.flatten().long().sort(stable=True).indices
    counts = torch.bincount(indices.flatten().long(), minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    slot_rows = torch.empty_like(slots).scatter(0, slots, torch.arange(len(slots)))
    return {
        "expert_offsets": offsets.int(),
        "row_slots": slots.int(),
        "slot_rows": slot_rows.view(indices.shape).int(),
    }


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def is_cpu_build(ops):
    """Whether the kernels are the CPU's own, not a GPU's, on it or on the bench."""
    return ops.name.startswith("_rudnn_moe_cpu_")


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
    assert found == set(SCHEMAS) - (set() if is_cpu_build(ops) else {"cpu_isa"})


def test_the_strategies_that_tests_run_are_those_of_the_hardware(ops):
    names = set(filter(None, ops.tensor_core_dtypes().split(",")))
    assert names <= {"float16", "bfloat16"}
    tested = {case.values[0] for case in strategies() if case.values[1] == "tensor_core"}
    assert tested == {getattr(torch, name) for name in names}


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("optional", [True, False], ids=["with_optionals", "without_optionals"])
def test_opcheck(ops, device, name, dtype, optional):
    for shape in SHAPES if dtype == F32 else SHAPES[:1]:
        values = arguments(name, shape, dtype, device, optional=optional, need=optional)
        torch.library.opcheck(getattr(ops, name).default, tuple(values))


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_the_fake_agrees_with_the_op(ops, device, name):
    """Shape, dtype and strides, also of inputs that are not contiguous."""
    op = getattr(ops, name).default
    for shape in SHAPES:
        for dtype in DTYPES.values():
            for choice in (True, False):
                values = arguments(name, shape, dtype, device, optional=choice, need=choice)
                values = [value.mT.contiguous().mT if is_matrix(value) else value for value in values]
                real = as_tuple(op(*values))
                fake = as_tuple(op(*[v.to("meta") if isinstance(v, torch.Tensor) else v for v in values]))
                for one, other in zip(real, fake, strict=True):
                    assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def is_matrix(value):
    return isinstance(value, torch.Tensor) and value.dim() >= 2


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_meta_tensors_in_meta_tensors_out(kernel, operation):
    inputs = {name: tensor.to("meta") for name, tensor in operation.inputs(dtype=BF16).items()}
    output = operation.run(kernel, inputs)
    expected = operation.run(kernel, operation.inputs(dtype=BF16))
    assert (output.shape, output.dtype, output.device.type) == (expected.shape, expected.dtype, "meta")


@pytest.mark.parametrize(
    "dtype", [pytest.param(F32, marks=pytest.mark.simt_checked), F16, BF16], ids=["f32", "f16", "bf16"]
)
@pytest.mark.parametrize("optional", [True, False], ids=["gate_and_up", "fused_gate"])
def test_a_gradient_that_is_not_needed_is_empty(ops, device, dtype, optional):
    """Every combination of need_* gives the same gradients as all together."""
    op = ops.experts_backward.default
    values = arguments("experts_backward", SHAPES[0], dtype, device, optional=optional)
    everything = op(*values)
    for need in itertools.product((True, False), repeat=4):
        need_values, need_gate, need_up, need_down = need
        found = op(*values[:-4], *need)
        needed = need_values, need_gate, need_up and optional, need_down
        for wanted, all_wanted, one in zip(needed, everything, found):
            assert one.dtype == all_wanted.dtype
            if wanted:
                assert_bits_equal(one, all_wanted)
            else:
                assert one.shape == (0,)


@pytest.mark.simt_checked
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("plane", [False, True], ids=["serial", "plane"])
def test_a_gradient_of_combine_that_is_not_needed_is_empty(ops, device, dtype, plane):
    op = ops.combine_backward.default
    values = arguments("combine_backward", SHAPES[0], dtype, device, optional=plane)
    everything = op(*values)
    for need in itertools.product((True, False), repeat=2):
        for wanted, all_wanted, one in zip(need, everything, op(*values[:-2], *need)):
            assert one.dtype == all_wanted.dtype
            if wanted:
                assert_bits_equal(one, all_wanted)
            else:
                assert one.shape == (0,)


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_no_output_aliases_an_input(ops, device, name):
    """Not even where nothing has to be computed."""
    for optional in (True, False):
        values = arguments(name, SHAPES[0], F32, device, optional=optional)
        outputs = as_tuple(getattr(ops, name).default(*values))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for i, output in enumerate(outputs):
            assert not any(shares_storage(output, other) for other in [*tensors, *outputs[i + 1 :]])


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_outputs_are_allocated_where_poison_reaches_them(ops, device, name):
    """PyTorch fills fresh tensors with NaN in `aten::empty` and its kin; other allocations would go unpoisoned."""
    values = arguments(name, SHAPES[0], F32, device)
    op = getattr(ops, name).default
    count = len(op._schema.returns)
    with torch.autograd.profiler.profile() as profile:
        op(*values)
    names = [event.name for event in profile.function_events]
    assert sum(name.startswith(("aten::empty", "aten::new_empty")) for name in names) >= count
    assert names.count("aten::fill_") >= count


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_storage_that_has_been_freed_is_refused(ops, device, name):
    """As sharding and offloading leave it behind: the tensor keeps its shape."""
    given = arguments(name, SHAPES[0], F32, device)
    for position, argument in enumerate(given):
        if not isinstance(argument, torch.Tensor) or argument.numel() == 0:
            continue
        for left in (0, argument.nbytes - 1):
            freed = argument.clone()
            freed.untyped_storage().resize_(left)
            with pytest.raises(RuntimeError, match="must have memory for all its elements"):
                getattr(ops, name)(*given[:position], freed, *given[position + 1 :])
