"""The registered ops: schemas, fakes, and what the backward ops leave out."""

import itertools
import re

import pytest
import torch
from conftest import WITHOUT_MEMORY, assert_bits_equal
from operations import BF16, F16, F32, SMALL, VARIANTS, Shape, for_each, normal, shares_storage

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks"
_NUMBERS = "float scale, float softcap, bool is_causal, int window_left, int window_right"
_NEEDS = "bool need_query, bool need_key, bool need_value, bool need_bias, bool need_sinks"
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    "attention": f"({_TENSORS}, {_NUMBERS}, bool accelerated) -> (Tensor, Tensor)",
    "attention_backward": f"(Tensor grad, {_TENSORS}, Tensor output, Tensor lse, {_NUMBERS}, bool accelerated, "
    f"{_NEEDS}) -> {_GRADIENTS}",
    "attention_fallback": f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    "attention_fallback_backward": f"(Tensor grad, {_TENSORS}, Tensor lse, {_NUMBERS}, {_NEEDS}) -> {_GRADIENTS}",
    "append_to_cache": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? block_table) -> ()",
    "accelerated_dtypes": "() -> str",
    "cpu_isa": "() -> str",
}
TENSOR_OPS = [name for name in SCHEMAS if name.startswith("attention")]
BACKWARD_OPS = [name for name in TENSOR_OPS if name.endswith("_backward")]
NEEDS = ("need_query", "need_key", "need_value", "need_bias", "need_sinks")

SHAPES = [SMALL, Shape(0, 4, 2, 5, 7, 16, 24), Shape(2, 4, 2, 5, 0, 16, 24), Shape(1, 1, 1, 1, 1, 1, 1)]
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}


def arguments(name, shape, dtype, device, *, optional=True, need=True, accelerated=False):
    """Arguments of an op in the order of its schema; `optional` and `need` set all of that kind."""
    batch, heads, queries, keys = shape.scores
    sizes = {
        "query": (batch, heads, queries, shape.width),
        "key": (batch, shape.key_heads, keys, shape.width),
        "value": (batch, shape.key_heads, keys, shape.value_width),
        "bias": (1, heads, queries, keys),
        "sinks": (heads,),
        "grad": (batch, heads, queries, shape.value_width),
        "output": (batch, heads, queries, shape.value_width),
    }
    others = {
        "mask": normal((batch, 1, 1, keys), F32) > -1,
        "lse": normal((batch, heads, queries), F32).abs() + 3,
        "scale": 0.25,
        "softcap": 2.0 if optional else 0.0,
        "is_causal": optional,
        "window_left": 3 if optional else -1,
        "window_right": -1,
        "accelerated": accelerated,
        **dict.fromkeys(NEEDS, need),
    }
    if not optional:
        others |= dict.fromkeys(("need_bias", "need_sinks"), False)
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


def append_arguments(dtype, device, *, paged):
    new = normal((2, 3, 2, 4), dtype, device=device), normal((2, 3, 2, 5), dtype, device=device, seed=1)
    sizes = (6, 4) if paged else (2, 9)
    caches = (torch.zeros(*sizes, 2, width, dtype=dtype, device=device) for width in (4, 5))
    lengths = torch.tensor([2, 5], device=device)
    table = torch.tensor([[3, 0, -1], [5, 2, -1]], device=device)
    return (*caches, *new, lengths, table if paged else None)


def is_cpu_build(ops):
    """Whether the kernels are the CPU's own, not a GPU's, on it or on the bench."""
    return ops.name.startswith("_rudnn_attention_cpu_")


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


def test_the_strategies_are_those_of_the_hardware(kernel, ops):
    names = set(filter(None, ops.accelerated_dtypes().split(",")))
    assert names <= {"float16", "bfloat16"}
    assert set(kernel._strategies.ACCELERATED_DTYPES) == {getattr(torch, name) for name in names}


def accelerations(ops, name, dtype):
    """The values of `accelerated` that an op takes."""
    supported = str(dtype).removeprefix("torch.") in ops.accelerated_dtypes().split(",")
    return (False, True) if supported and "accelerated" in SCHEMAS[name] else (False,)


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("optional", [True, False], ids=["with_optionals", "without_optionals"])
def test_opcheck(ops, device, name, dtype, optional):
    for shape in SHAPES if dtype == F32 else SHAPES[:1]:
        for accelerated in accelerations(ops, name, dtype):
            values = arguments(name, shape, dtype, device, optional=optional, need=optional, accelerated=accelerated)
            torch.library.opcheck(getattr(ops, name).default, tuple(values))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_opcheck_of_appending(ops, device, dtype, paged):
    torch.library.opcheck(ops.append_to_cache.default, append_arguments(dtype, device, paged=paged))


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_the_fake_agrees_with_the_op(ops, device, name):
    """Shape, dtype and strides, also of inputs that are not contiguous."""
    op = getattr(ops, name).default
    for shape, dtype, choice in itertools.product(SHAPES, DTYPES.values(), (True, False)):
        for accelerated in accelerations(ops, name, dtype):
            values = arguments(name, shape, dtype, device, optional=choice, need=choice, accelerated=accelerated)
            values = [value.mT.contiguous().mT if is_matrix(value) else value for value in values]
            real = op(*values)
            fake = op(*[v.to("meta") if isinstance(v, torch.Tensor) else v for v in values])
            for one, other in zip(real, fake, strict=True):
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def is_matrix(value):
    return isinstance(value, torch.Tensor) and value.dim() >= 2


@for_each(*VARIANTS)
@pytest.mark.parametrize("strategy", ["autotune", "flash_unit", "fallback"])
def test_meta_tensors_in_meta_tensors_out(kernel, variant, strategy):
    inputs = {name: tensor.to("meta") for name, tensor in variant.inputs(dtype=BF16).items()}
    output, lse = variant.run(kernel, inputs, strategy)
    assert (output.shape, output.dtype, output.device.type) == ((2, 4, 5, 24), BF16, "meta")
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 5), F32, "meta")


@pytest.mark.parametrize("name", BACKWARD_OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("optional", [True, False], ids=["with_optionals", "without_optionals"])
def test_a_gradient_that_is_not_needed_is_empty(ops, device, name, dtype, optional):
    """Every combination of need_* gives the same gradients as all together."""
    op = getattr(ops, name).default
    for accelerated in accelerations(ops, name, dtype):
        values = arguments(name, SMALL, dtype, device, optional=optional, accelerated=accelerated)
        everything = op(*values)
        for need in itertools.product((True, False), repeat=5):
            if not optional and (need[3] or need[4]):
                continue
            for wanted, all_wanted, one in zip(need, everything, op(*values[:-5], *need)):
                if wanted:
                    assert_bits_equal(one, all_wanted)
                else:
                    assert one.shape == (0,)


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_no_output_aliases_an_input(ops, device, name):
    """Not even where nothing has to be computed."""
    for optional, shape in itertools.product((True, False), SHAPES):
        values = arguments(name, shape, F32, device, optional=optional)
        outputs = getattr(ops, name).default(*values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for i, output in enumerate(outputs):
            assert not any(shares_storage(output, other) for other in [*tensors, *outputs[i + 1 :]])


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_outputs_are_allocated_where_poison_reaches_them(ops, device, name):
    """PyTorch fills fresh tensors with NaN in `aten::empty` and its kin; other allocations would go unpoisoned."""
    values = arguments(name, SMALL, F32, device)
    op = getattr(ops, name).default
    count = len(op._schema.returns)
    with torch.autograd.profiler.profile() as profile:
        op(*values)
    names = [event.name for event in profile.function_events]
    assert sum(name.startswith(("aten::empty", "aten::new_empty")) for name in names) >= count
    assert names.count("aten::fill_") >= count


@pytest.mark.parametrize("name", [*TENSOR_OPS, "append_to_cache"])
def test_storage_that_has_been_freed_is_refused(ops, device, name):
    """As sharding and offloading leave it behind: the tensor keeps its shape."""
    append = name == "append_to_cache"
    given = append_arguments(F32, device, paged=True) if append else arguments(name, SMALL, F32, device)
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    for position, argument in enumerate(given):
        if not isinstance(argument, torch.Tensor):
            continue
        for cut in WITHOUT_MEMORY.values():
            message = f"{names[position]} must have memory for all its elements"
            with pytest.raises((RuntimeError, ValueError), match=message):
                getattr(ops, name)(*given[:position], cut(argument), *given[position + 1 :])
