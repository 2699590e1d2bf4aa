"""Invalid arguments: the functions answer with AttentionSetupError, the registered ops with an exception."""

import math
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import WITHOUT_MEMORY, in_layout, not_on_the_cpu, only_on_the_cpu, with_storage_of
from operations import EVERYTHING, F32, SMALL, normal
from test_ops import TENSOR_OPS, arguments

pytestmark = [pytest.mark.small, pytest.mark.isa_independent, pytest.mark.kernels_ci]


def nested(tensor):
    return torch.nested.nested_tensor([tensor[:1], tensor[1:]])


NOT_TENSORS = {
    "list": lambda tensor: tensor.tolist(),
    "number": lambda tensor: 1.0,
    "numpy": lambda tensor: numpy.ones(tuple(tensor.shape), numpy.float32),
    "string": lambda tensor: "tensor",
}
NONE = {"none": lambda tensor: None}
NO_FLOATS = {
    **NOT_TENSORS,
    "float64": torch.Tensor.double,
    "int32": torch.Tensor.int,
    "uint8": lambda tensor: tensor.to(torch.uint8),
    "bool": torch.Tensor.bool,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "sparse_coo": torch.Tensor.to_sparse,
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    **WITHOUT_MEMORY,
}
OTHER_FLOAT = {"float16": torch.Tensor.half, "bfloat16": torch.Tensor.bfloat16}
ELSEWHERE = {"other_device": lambda tensor: tensor.to("meta")}
WRONG_AXES = {
    "no_axes": lambda tensor: tensor.flatten()[0],
    "missing_axis": lambda tensor: tensor[0],
    "extra_axis": lambda tensor: tensor[None],
}


def less(axis):
    return lambda tensor: tensor.narrow(axis, 0, tensor.shape[axis] - 1)


def more(axis):
    return lambda tensor: torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)


def without(ids, table):
    return {id: change for id, change in table.items() if id not in ids}


def none_of(axis):
    return lambda tensor: tensor.narrow(axis, 0, 0)


def sizes(*axes):
    names = {"less": less, "more": more}
    return {f"axis_{axis}_{name}": make(axis) for axis in axes for name, make in names.items()}


TOO_WIDE = {"too_wide": lambda tensor: normal((*tensor.shape[:-1], 1025), F32)}
TENSOR = {**NONE, **NO_FLOATS, **WRONG_AXES, "nested": nested}
NO_MASKS = {
    **NOT_TENSORS,
    "float32": torch.Tensor.float,
    "uint8": lambda tensor: tensor.to(torch.uint8),
    "int64": torch.Tensor.long,
    "sparse_coo": torch.Tensor.to_sparse,
    "masked": lambda tensor: torch.masked.masked_tensor(tensor, tensor),
    **WITHOUT_MEMORY,
}
NO_INTEGERS = {
    "list": lambda tensor: tensor.tolist(),
    "float32": torch.Tensor.float,
    "int16": torch.Tensor.short,
    "uint8": lambda tensor: tensor.to(torch.uint8),
    "bool": torch.Tensor.bool,
    "sparse_coo": torch.Tensor.to_sparse,
    "masked": lambda tensor: torch.masked.masked_tensor(tensor, tensor == tensor),
    "extra_axis": lambda tensor: tensor[None],
    **WITHOUT_MEMORY,
}

ATTENTION = {
    "query": TENSOR | TOO_WIDE | {"no_width": none_of(3)},
    "key": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 3) | {"axis_1_more": more(1), "no_heads": none_of(1)},
    "value": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 1, 2) | TOO_WIDE | {"no_width": none_of(3)},
    "mask": NO_MASKS
    | ELSEWHERE
    | sizes(3)
    | {"extra_axis": WRONG_AXES["extra_axis"], "batch": more(0), "queries": more(2)},
    "attn_bias": NO_FLOATS | OTHER_FLOAT | ELSEWHERE | sizes(1, 2, 3) | {"extra_axis": WRONG_AXES["extra_axis"]},
    "sinks": NO_FLOATS | OTHER_FLOAT | ELSEWHERE | sizes(0) | {"extra_axis": WRONG_AXES["extra_axis"]},
}
FLASH = {
    "q": TENSOR | TOO_WIDE,
    "k": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 3) | {"axis_2_more": more(2)},
    "v": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 1, 2) | TOO_WIDE,
    "s_aux": NO_FLOATS | OTHER_FLOAT | ELSEWHERE | sizes(0),
}
STARTS = NONE | NO_INTEGERS | ELSEWHERE | {"one_more": more(0), "empty": none_of(0)}
STARTS_VALUES = {
    "not_from_0": lambda tensor: tensor + 1,
    "falling": lambda tensor: tensor.flip(0),
    "past_the_end": lambda tensor: tensor * 7,
}
WIDTHS = {"width_less": lambda tensor: tensor[..., :-1], "width_more": lambda tensor: torch.cat([tensor, tensor], -1)}
VARLEN = {
    "q": TENSOR | {"too_wide": TOO_WIDE["too_wide"]},
    "k": TENSOR | OTHER_FLOAT | ELSEWHERE | WIDTHS,
    "v": TENSOR | OTHER_FLOAT | ELSEWHERE | {"row_less": less(0), "head_less": less(1)},
    "cu_seqlens_q": STARTS | STARTS_VALUES,
    "cu_seqlens_k": STARTS | STARTS_VALUES,
    "s_aux": FLASH["s_aux"],
}
PAGED = {
    "v": WITHOUT_MEMORY,
    "k": WITHOUT_MEMORY | {"unpaged": lambda tensor: tensor[0], "no_pages": none_of(0), "no_room": none_of(1)},
    "block_table": NO_INTEGERS
    | ELSEWHERE
    | sizes(0)
    | {"unknown_page": lambda tensor: tensor + 9, "no_page": lambda tensor: tensor - 9, "short": none_of(1)},
}
SHARED = {
    "expanded_batch": lambda tensor: tensor[:1].expand_as(tensor),
    "expanded_heads": lambda tensor: tensor[:, :, :1].expand_as(tensor),
    "sliding_windows": lambda tensor: tensor.flatten().as_strided(tensor.shape, (2, 1, 4, 8)),
}
CACHE = {
    "q": TENSOR | TOO_WIDE | sizes(0),
    "k_cache": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 1, 3) | SHARED,
    "v_cache": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 1, 2) | SHARED,
    "k": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 2, 3),
    "v": TENSOR | OTHER_FLOAT | ELSEWHERE | sizes(0, 1, 2, 3),
    "cache_seqlens": NONE | NO_INTEGERS | ELSEWHERE | sizes(0) | {"too_long": lambda tensor: tensor + 5},
}


def good_arguments(function, device):
    everything = EVERYTHING.inputs(device=device)
    if function == "attention_of_all":
        return everything
    batch = {
        "q": normal((2, 5, 4, 16), F32, device=device),
        "k": normal((2, 7, 2, 16), F32, device=device, seed=1),
        "v": normal((2, 7, 2, 24), F32, device=device, seed=2),
        "s_aux": everything["sinks"],
    }
    if function == "flash_attn_func":
        return batch
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 2, 5], device=device),
        "cu_seqlens_k": torch.tensor([0, 3, 7], device=device),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    if function == "flash_attn_varlen_func":
        return {name: tensor[0] if tensor.dim() == 4 else tensor for name, tensor in batch.items()} | lengths
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    if function == "paged_varlen":
        pages = {"k": normal((4, 2, 2, 16), F32, device=device), "v": normal((4, 2, 2, 24), F32, device=device)}
        return {"q": batch["q"][0], **pages, **lengths, "block_table": table}
    caches = {
        "k_cache": normal((2, 9, 2, 16), F32, device=device),
        "v_cache": normal((2, 9, 2, 24), F32, device=device),
    }
    new = {"k": batch["k"][:, :3].clone(), "v": batch["v"][:, :3].clone()}
    return {"q": batch["q"], **caches, **new, "cache_seqlens": torch.tensor([6, 2], device=device)}


# By case: the function's name, and tables of changes to its good arguments.
FUNCTIONS = {
    "attention_of_all": ("attention", ATTENTION),
    "flash_attn_func": ("flash_attn_func", FLASH),
    "flash_attn_varlen_func": ("flash_attn_varlen_func", VARLEN),
    "paged_varlen": ("flash_attn_varlen_func", PAGED),
    "flash_attn_with_kvcache": ("flash_attn_with_kvcache", CACHE),
}


def assert_refused(kernel, function, argument, call, arguments):
    """The message says the function, the argument, what it must be, and what came."""
    with pytest.raises(kernel.AttentionSetupError) as caught:
        call(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{function}: "), message
    assert re.search(rf"\b{argument}\b", message), f"the message must name {argument}: {message}"
    assert re.search(r"\bgot \S", message), f"the message must say what came: {message}"


def bad_arguments():
    for case, (_, tables) in FUNCTIONS.items():
        for argument, table in tables.items():
            for id, change in table.items():
                yield pytest.param(case, argument, change, id=f"{case}-{argument}-{id}")


@pytest.mark.parametrize("case, argument, change", list(bad_arguments()))
def test_tensors(kernel, device, case, argument, change):
    name, _ = FUNCTIONS[case]
    values = good_arguments(case, device)
    values[argument] = change(values[argument])
    assert_refused(kernel, name, argument, getattr(kernel, name), values)


@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
@pytest.mark.parametrize("argument", ATTENTION)
def test_tensors_of_each_strategy(kernel, device, argument, strategy):
    for change in ATTENTION[argument].values():
        values = good_arguments("attention_of_all", device)
        values[argument] = change(values[argument])
        assert_refused(kernel, "attention", argument, kernel.attention, {**values, "strategy": strategy})
        assert_refused(kernel, "attention_plan", argument, kernel.attention_plan, {**values, "strategy": strategy})


@pytest.mark.parametrize("layout", ["transposed", "every_second", "row_strided", "offset", "expanded_rows"])
@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
def test_storage_that_ends_with_the_last_element(kernel, device, layout, strategy):
    """It is enough; with a byte less the tensor has no memory for all its elements."""
    values = good_arguments("attention_of_all", device)
    key = in_layout(values["key"], layout)
    last = key.storage_offset() + sum((size - 1) * stride for size, stride in zip(key.shape, key.stride()))
    key.untyped_storage().resize_((last + 1) * key.element_size())
    kernel.attention(**{**values, "key": key}, strategy=strategy)
    key.untyped_storage().resize_((last + 1) * key.element_size() - 1)
    with pytest.raises(kernel.AttentionSetupError, match=r"key must have memory .* storage has \d+ of \d+ bytes, got "):
        kernel.attention(**{**values, "key": key}, strategy=strategy)


@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
def test_no_elements_need_no_memory(kernel, device, strategy):
    query = normal((2, 4, 5, 16), F32, device=device)
    empty = with_storage_of(torch.ones(2, 4, 0, 16, device=device), 0)
    assert not kernel.attention(query, empty, empty, strategy=strategy).any()


def test_the_message_reads_no_tensor(kernel, device):
    """Not even one inside of something else that is no tensor."""
    values = good_arguments("attention_of_all", device)
    freed = with_storage_of(values["query"], 0)
    one = with_storage_of(torch.ones(1, device=device), 0)
    several = {one, with_storage_of(torch.ones(1, device=device), 0)}
    holders = [several, frozenset(several), dict.fromkeys(several), SimpleNamespace(tensor=freed), iter([freed])]
    for other in ([freed], (freed,), {"query": freed}, kernel.AttentionPlan(freed, {}), *holders):
        assert_refused(kernel, "attention", "query", kernel.attention, {**values, "query": other})
        assert_refused(kernel, "attention", "options", kernel.attention, {**values, "options": other})
    assert_refused(kernel, "AttentionOptions", "window", kernel.AttentionOptions, {"window": (one, 1)})
    assert_refused(kernel, "AttentionOptions", "scale", kernel.AttentionOptions, {"scale": one})
    for case in ("flash_attn_func", "flash_attn_varlen_func"):
        for argument in ("dropout_p", "softcap", "softmax_scale", "causal", "window_size"):
            assert_refused(
                kernel, case, argument, getattr(kernel, case), {**good_arguments(case, device), argument: one}
            )


@pytest.mark.parametrize("case", FUNCTIONS)
def test_good_arguments_are_taken(kernel, device, case):
    """Or the tables above would say nothing."""
    name, _ = FUNCTIONS[case]
    values = good_arguments(case, device)
    with torch.no_grad():
        getattr(kernel, name)(**values)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_tensor_left_on_the_cpu(kernel, device, case):
    """Its address means nothing to a GPU."""
    not_on_the_cpu(device)
    name, _ = FUNCTIONS[case]
    values = good_arguments(case, device)
    for argument, value in values.items():
        if isinstance(value, torch.Tensor) and argument not in ("query", "q"):
            assert_refused(kernel, name, argument, getattr(kernel, name), {**values, argument: value.cpu()})


@pytest.mark.parametrize("case", FUNCTIONS)
def test_wrong_calls_are_type_errors(kernel, device, case):
    name, _ = FUNCTIONS[case]
    with pytest.raises(TypeError):
        getattr(kernel, name)()
    with pytest.raises(TypeError):
        getattr(kernel, name)(**good_arguments(case, device), nonsense=1)


NO_FLAGS = {"none": None, "one": 1, "string": "True", "tensor": torch.tensor(True)}
NO_OPTIONS = {"none": None, "number": 2, "dict": {"is_causal": True}, "tuple": (None, None, True)}


@pytest.mark.parametrize("function", ["attention", "attention_plan"])
@pytest.mark.parametrize("options", NO_OPTIONS.values(), ids=NO_OPTIONS)
def test_options(kernel, device, function, options):
    values = good_arguments("attention_of_all", device)
    assert_refused(kernel, function, "options", getattr(kernel, function), {**values, "options": options})


@pytest.mark.parametrize("function", ["attention", "attention_plan"])
@pytest.mark.parametrize("strategy", ["", "FLASH_UNIT", "flash-unit", "flash", None, 1, b"fallback"])
def test_strategies(kernel, device, function, strategy):
    values = good_arguments("attention_of_all", device)
    assert_refused(kernel, function, "strategy", getattr(kernel, function), {**values, "strategy": strategy})


@pytest.mark.parametrize("value", NO_FLAGS.values(), ids=NO_FLAGS)
def test_return_lse(kernel, device, value):
    values = good_arguments("attention_of_all", device)
    assert_refused(kernel, "attention", "return_lse", kernel.attention, {**values, "return_lse": value})


BAD_SCALES = {
    "zero": 0.0,
    "negative": -1.0,
    "nan": math.nan,
    "inf": math.inf,
    "string": "1",
    "true": True,
    "complex": 1 + 0j,
    "tensor": torch.tensor(1.0),
    "too_large_for_a_float": 10**400,
    "too_large_for_float32": 1e39,
    "zero_in_float32": 1e-46,
}
BAD_WINDOWS = {
    "number": 3,
    "one": (3,),
    "three": (1, 2, 3),
    "below": (-2, 1),
    "right_below": (1, -2),
    "float": (1.0, 2),
    "none_inside": (None, 2),
    "true": (True, 2),
    "string": "12",
    "too_far": (2**31, 0),
    "right_too_far": (3, 2**31),
    "right_true": (2, True),
    "right_float": (1, 2.5),
    "none": (),
    "tensor": torch.tensor([1, 2]),
}
OPTIONS = {"scale": BAD_SCALES, "softcap": BAD_SCALES, "is_causal": NO_FLAGS, "window": BAD_WINDOWS}


@pytest.mark.parametrize(
    "option, value",
    [pytest.param(name, value, id=f"{name}-{id}") for name, table in OPTIONS.items() for id, value in table.items()],
)
def test_options_check_themselves(kernel, option, value):
    assert_refused(kernel, "AttentionOptions", option, kernel.AttentionOptions, {option: value})


@pytest.mark.parametrize("window", [value for value in BAD_WINDOWS.values() if isinstance(value, tuple)], ids=str)
def test_the_message_says_which_windows_there_are(kernel, window):
    with pytest.raises(kernel.AttentionSetupError) as caught:
        kernel.AttentionOptions(window=window)
    assert str(caught.value) == (
        "AttentionOptions: window must be two integers (left, right), each from 0 to 2147483647, or -1 for no bound, "
        f"got tuple {window}"
    )


def test_the_widest_window(kernel):
    assert kernel.AttentionOptions(window=(2**31 - 1, 0)).window == (2**31 - 1, 0)


def test_options_are_values(kernel):
    """Frozen, comparable, and of plain types whatever numbers they were made of."""
    options = kernel.AttentionOptions(numpy.float32(0.5), 2, True, [numpy.int64(3), -1])
    assert options == kernel.AttentionOptions(0.5, 2.0, True, (3, -1))
    assert hash(options) == hash(kernel.AttentionOptions(0.5, 2.0, True, (3, -1)))
    assert [type(each) for each in (options.scale, options.softcap, *options.window)] == [float, float, int, int]
    with pytest.raises(AttributeError):
        options.scale = 1.0


NOT_IN_FLASH = {
    "dropout_p": [0.1, 1, -0.5, math.nan, None],
    "causal": [None, 1, "True"],
    "softmax_scale": [value for value in BAD_SCALES.values() if not isinstance(value, torch.Tensor)],
    "softcap": [-1.0, math.nan, math.inf, "1", True, 10**400],
    "window_size": list(BAD_WINDOWS.values()),
}


@pytest.mark.parametrize("case", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
@pytest.mark.parametrize("argument", NOT_IN_FLASH)
def test_options_of_flash_attention(kernel, device, case, argument):
    if case == "flash_attn_with_kvcache" and argument == "dropout_p":
        pytest.skip("it has none")
    for value in NOT_IN_FLASH[argument]:
        values = {**good_arguments(case, device), argument: value}
        assert_refused(kernel, case, argument, getattr(kernel, case), values)


@pytest.mark.parametrize("argument, value", [("alibi_slopes", torch.ones(4)), ("return_attn_probs", True)])
def test_what_flash_attention_has_and_this_has_not(kernel, device, argument, value):
    values = {**good_arguments("flash_attn_func", device), argument: value}
    assert_refused(kernel, "flash_attn_func", argument, kernel.flash_attn_func, values)


def test_new_keys_without_a_length(kernel, device):
    values = good_arguments("flash_attn_with_kvcache", device)
    del values["cache_seqlens"]
    assert_refused(kernel, "flash_attn_with_kvcache", "cache_seqlens", kernel.flash_attn_with_kvcache, values)


NO_LENGTHS = {
    "none": None,
    "negative": -1,
    "float": 4.0,
    "string": "4",
    "true": True,
    "too_large": 2**31,
    "two": torch.tensor([4, 4]),
    "float_tensor": torch.tensor(4.0),
    "freed": lambda: with_storage_of(torch.tensor(4), 0),
}


@pytest.mark.parametrize("case", ["flash_attn_varlen_func", "paged_varlen"])
@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("value", NO_LENGTHS.values(), ids=NO_LENGTHS)
def test_lengths_of_the_longest(kernel, device, case, argument, value):
    name, _ = FUNCTIONS[case]
    value = value() if callable(value) else value
    assert_refused(kernel, name, argument, getattr(kernel, name), {**good_arguments(case, device), argument: value})


@pytest.mark.parametrize("case", ["flash_attn_varlen_func", "paged_varlen"])
@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_k"])
def test_a_sequence_longer_than_the_longest(kernel, device, case, argument):
    only_on_the_cpu(device, "elsewhere nobody looks at what index tensors hold")
    values = good_arguments(case, device)
    values[argument] -= 1
    assert_refused(kernel, "flash_attn_varlen_func", argument, kernel.flash_attn_varlen_func, values)
    values[argument] = torch.tensor(values[argument])
    assert_refused(kernel, "flash_attn_varlen_func", argument, kernel.flash_attn_varlen_func, values)


ONE_MEMORY = {
    "the_same": lambda memory: (memory, memory),
    "the_beginning_of_each_row": lambda memory: (memory, memory[..., :4]),
    "shifted_columns": lambda memory: (memory[..., :-1], memory[..., 1:]),
    "shifted_heads": lambda memory: (memory[:, :, :-1], memory[:, :, 1:]),
    "shifted_rows": lambda memory: (memory[:, :-1], memory[:, 1:]),
}


@pytest.mark.parametrize("case", ONE_MEMORY)
def test_new_keys_and_values_in_one_memory(kernel, device, case):
    """Where they differ, one would be written over the other."""
    k_cache, v_cache = ONE_MEMORY[case](torch.zeros(2, 8, 3, 16, device=device))
    k, v = (torch.full_like(cache[:, :2], filling) for cache, filling in ((k_cache, 1.0), (v_cache, 2.0)))
    values = {"q": torch.ones_like(k), "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 2}
    assert_refused(kernel, "flash_attn_with_kvcache", "v_cache", kernel.flash_attn_with_kvcache, values)
    assert not k_cache.any()
    assert not v_cache.any()


def test_one_memory_with_other_strides(kernel, device):
    """Whether an element is shared is not found out: it is enough that one might be."""
    memory = torch.zeros(2 * 4 * 4 * 8, device=device)
    k_cache = memory[: 4 * 4 * 8].view(1, 4, 4, 8)
    for offset, refused in ((0, True), (4 * 4 * 8 - 1, True), (4 * 4 * 8, False)):
        v_cache = memory[offset : offset + 4 * 4 * 8].view(1, 4, 4, 8).transpose(1, 2)
        k, v = (torch.ones(1, 1, 4, 8, device=device) for _ in range(2))
        values = {"q": k, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 2}
        if refused:
            assert_refused(kernel, "flash_attn_with_kvcache", "v_cache", kernel.flash_attn_with_kvcache, values)
        else:
            kernel.flash_attn_with_kvcache(**values)


INTERFACE = {
    "query": ATTENTION["query"],
    "key": ATTENTION["key"],
    "value": ATTENTION["value"],
    "attention_mask": without(("float32",), ATTENTION["mask"]),
    "position_bias": ATTENTION["attn_bias"],
    "s_aux": ATTENTION["sinks"],
    "scaling": {"zero": lambda _: 0.0, "string": lambda _: "1"},
    "softcap": {"negative": lambda _: -1.0, "true": lambda _: True},
    "dropout": {"none": lambda _: None, "freed": lambda _: with_storage_of(torch.zeros(1), 0)},
}
# The sum of mask and bias is float32.
WITH_ADDED_MASK = INTERFACE | {
    "attention_mask": without(("bool", *OTHER_FLOAT), ATTENTION["attn_bias"]),
    "position_bias": without(OTHER_FLOAT, ATTENTION["attn_bias"]),
}


@pytest.mark.parametrize("argument", INTERFACE)
@pytest.mark.parametrize("added", [False, True], ids=["mask", "added_mask"])
def test_the_attention_interface(kernel, device, argument, added):
    """The mask is of bool or added to the scores, in front of the other bias."""
    for change in (WITH_ADDED_MASK if added else INTERFACE)[argument].values():
        inputs = good_arguments("attention_of_all", device)
        values = {name: inputs[name] for name in ("query", "key", "value")}
        mask = inputs["mask"].float() if added else inputs["mask"]
        values |= {"attention_mask": mask, "position_bias": inputs["attn_bias"], "s_aux": inputs["sinks"]}
        values[argument] = change(values.get(argument))
        call = kernel.sdpa_attention_forward
        assert_refused(kernel, "sdpa_attention_forward", argument, call, {"module": torch.nn.Identity(), **values})


def test_a_mask_of_no_dtype_for_masks(kernel, device):
    inputs = good_arguments("attention_of_all", device)
    tensors = [inputs[name] for name in ("query", "key", "value")]
    with pytest.raises(
        kernel.AttentionSetupError,
        match=r"^sdpa_attention_forward: attention_mask must be a dense tensor of bool, True where a key takes part, "
        r"or of float32, float16 or bfloat16, added to the scores, got int64 ",
    ):
        kernel.sdpa_attention_forward(torch.nn.Identity(), *tensors, inputs["mask"].long())


def test_dropout_in_transformers(kernel, device):
    tensors = [normal((1, 2, 3, 8), F32, device=device) for _ in range(3)]
    module = torch.nn.Identity()
    with pytest.raises(
        kernel.AttentionSetupError, match=r"sdpa_attention_forward: dropout must be 0.*, got float 0\.1"
    ):
        kernel.sdpa_attention_forward(module, *tensors, None, dropout=0.1)


def test_the_message_says_op_requirement_and_what_came(kernel, device):
    with pytest.raises(kernel.AttentionSetupError) as caught:
        kernel.attention(*(torch.ones(shape, device=device) for shape in ((1, 3, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8))))
    assert str(caught.value).startswith(
        "attention: key must have a number of heads that divides query's 3, got float32 (1"
    )


def test_the_error_is_a_value_error(kernel):
    assert issubclass(kernel.AttentionSetupError, ValueError)
    assert kernel.AttentionSetupError.__doc__


OP_CHANGES = {
    "one_column_less": lambda tensor: tensor[..., :-1],
    "one_column_more": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "one_row_less": lambda tensor: tensor[:-1],
    "two_rows_more": lambda tensor: torch.cat([tensor, tensor, tensor]),
    "no_axes": lambda tensor: tensor.flatten()[0],
    "extra_axis": lambda tensor: tensor[None],
    "float64": torch.Tensor.double,
    "int16": torch.Tensor.short,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda tensor: tensor.to("meta"),
}
# Values of another width, and a mask for all of a batch of two.
STILL_RIGHT = [
    ("attention", "value", OP_CHANGES["one_column_less"]),
    ("attention", "value", OP_CHANGES["one_column_more"]),
    ("attention", "mask", OP_CHANGES["one_row_less"]),
    ("attention_backward", "mask", OP_CHANGES["one_row_less"]),
]
FLASH_OPS = [name for name in TENSOR_OPS if "fallback" not in name]


@pytest.mark.parametrize("name", FLASH_OPS)
@pytest.mark.parametrize("change", OP_CHANGES.values(), ids=OP_CHANGES)
def test_registered_ops_refuse_what_would_be_unsafe(ops, device, name, change):
    """Each tensor argument in turn; the exception says what is wrong, and nothing crashes."""
    op = getattr(ops, name).default
    valid = arguments(name, SMALL, F32, device)
    for position, value in enumerate(valid):
        if not isinstance(value, torch.Tensor):
            continue
        argument = op._schema.arguments[position].name
        if (name, argument, change) in STILL_RIGHT:
            continue
        with pytest.raises((RuntimeError, ValueError)):
            op(*valid[:position], change(value), *valid[position + 1 :])


@pytest.mark.parametrize("name", FLASH_OPS)
def test_registered_ops_take_any_strides(ops, device, name):
    """A strided tensor is never read as dense, in a direct call neither."""
    op = getattr(ops, name).default
    valid = arguments(name, SMALL, F32, device)
    expected = op(*valid)
    for position, value in enumerate(valid):
        if isinstance(value, torch.Tensor):
            filling = torch.nan if value.is_floating_point() else True
            strided = torch.stack([value, torch.full_like(value, filling)], -1)[..., 0]
            found = op(*valid[:position], strided, *valid[position + 1 :])
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FLASH_OPS)
def test_registered_ops_refuse_other_numbers(ops, device, name):
    op = getattr(ops, name).default
    valid = arguments(name, SMALL, F32, device)
    names = [argument.name for argument in op._schema.arguments]
    for argument in ("window_left", "window_right"):
        with pytest.raises(RuntimeError):
            op(*(-2 if each == argument else value for each, value in zip(names, valid)))


@pytest.mark.parametrize("name", FLASH_OPS)
def test_float32_has_no_matrix_units(ops, device, name):
    valid = arguments(name, SMALL, F32, device, accelerated=True)
    with pytest.raises(RuntimeError, match="accelerated"):
        getattr(ops, name).default(*valid)


@pytest.mark.parametrize("name", [name for name in TENSOR_OPS if name.endswith("_backward")])
def test_gradients_of_what_is_not_there(ops, device, name):
    valid = arguments(name, SMALL, F32, device, optional=False)
    for position in (-2, -1):
        asked = [*valid]
        asked[position] = True
        with pytest.raises((RuntimeError, AssertionError)):
            getattr(ops, name).default(*asked)
