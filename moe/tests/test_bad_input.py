"""Invalid arguments: the functions answer with MoeError, the registered ops with an exception."""

import dataclasses
import math
import re

import numpy
import pytest
import torch
from conftest import WITHOUT_MEMORY, not_on_the_cpu, with_storage_of
from operations import BF16, F16, F32, Shape, make_indices, make_weights, normal
from test_ops import SHAPES, TENSOR_OPS, arguments

pytestmark = [pytest.mark.small, pytest.mark.isa_independent, pytest.mark.kernels_ci]

SIZES = Shape(3, 4, 2, 8, 6)


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
NO_FLOATS = {
    **NOT_TENSORS,
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
NO_INTEGERS = {
    **NOT_TENSORS,
    "float32": torch.Tensor.float,
    "int16": torch.Tensor.short,
    "uint8": lambda tensor: tensor.to(torch.uint8),
    "bool": torch.Tensor.bool,
    "sparse_coo": torch.Tensor.to_sparse,
    **WITHOUT_MEMORY,
}
WRONG_AXES = {
    "no_axes": lambda tensor: tensor.flatten()[0],
    "missing_axis": lambda tensor: tensor[0],
    "extra_axis": lambda tensor: tensor[None],
}
WRONG_ROWS = {
    "one_row_less": lambda tensor: tensor[:-1],
    "one_row_more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "broadcast_rows": lambda tensor: tensor[:1],
}
WRONG_COLUMNS = {
    "one_column_less": lambda tensor: tensor[..., :-1],
    "one_column_more": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "no_columns": lambda tensor: tensor[..., :0],
}
ELSEWHERE = {"other_device": lambda tensor: tensor.to("meta")}
OTHER_FLOAT = {
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
}
MATRIX_KINDS = {"sparse_csr": torch.Tensor.to_sparse_csr, "nested": nested, "jagged": jagged}

MATRIX = {**NO_FLOATS, **MATRIX_KINDS, **WRONG_AXES}
HALVES = {
    "no_axes": WRONG_AXES["no_axes"],
    "odd": lambda tensor: tensor[:, :7],
    "empty": lambda tensor: tensor[:, :0],
}
ROWS = {**MATRIX, **WRONG_ROWS, **WRONG_COLUMNS, **ELSEWHERE}
INDICES = {**NO_INTEGERS, **WRONG_AXES}
WEIGHT = {**NO_FLOATS, **WRONG_AXES, **WRONG_ROWS, **WRONG_COLUMNS, **ELSEWHERE, **OTHER_FLOAT}
WEIGHT["middle_axis_less"] = lambda tensor: tensor[:, :-1]
WEIGHT["empty"] = lambda tensor: tensor[:0]


def tensors(device):
    weights = make_weights(SIZES, F32, device, 3)
    indices = make_indices(SIZES, device=device)
    return {
        "input": normal((3, 8), F32, device=device),
        "logits": normal((3, 4), F32, device=device, seed=1),
        "indices": indices,
        "weights": normal((3, 2), F32, device=device, seed=2),
        "bias": normal((4,), F32, device=device),
        "grad_weights": normal((3, 2), F32, device=device),
        "rows": normal((6, 8), F32, device=device),
        **weights,
    }


def dispatched_of(kernel, values):
    plan = kernel.RoutingPlan(values["indices"], values["weights"], 4)
    return plan.dispatch(values["input"])


def experts_of(kernel, values):
    return kernel.SwiGluExperts(values["gate"], values["up"], values["down"])


def cache_of(kernel, values):
    return experts_of(kernel, values).forward_dispatched_training(dispatched_of(kernel, values)).cache


class Experts(torch.nn.Module):
    """What `experts_forward` reads of a module of Transformers."""

    def __init__(self, values, **changes):
        super().__init__()
        self.gate_up_proj = torch.cat([values["gate"], values["up"]], 1)
        self.down_proj = values["down"]
        self.act_fn = torch.nn.SiLU()
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed, self.is_concatenated = False, True
        for name, value in changes.items():
            setattr(self, name, value)


def training_of(kernel, values):
    plan = kernel.RoutingPlan(values["indices"], values["weights"], 4)
    return plan.into_training(values["logits"], kernel.RouterWeightOptions())


def changed(dispatched, name):
    """The same with one of its tensors freed."""
    return dataclasses.replace(dispatched, **{name: with_storage_of(getattr(dispatched, name), 0)})


# By function: how to get it from the kernel and good values, its good arguments, and tables of changes to them.
FUNCTIONS = {
    "route": (
        lambda kernel, values: kernel.route,
        lambda kernel, values: {"logits": values["logits"], "options": kernel.RoutingOptions(2)},
        {"logits": MATRIX | {"one_expert": lambda tensor: tensor[:, :1], "no_experts": lambda tensor: tensor[:, :0]}},
    ),
    "route_sigmoid_grouped": (
        lambda kernel, values: kernel.route_sigmoid_grouped,
        lambda kernel, values: {
            "logits": values["logits"],
            "bias": values["bias"],
            "options": kernel.GroupRoutingOptions(2, 2, 1),
        },
        {
            "logits": MATRIX | {"no_experts": lambda tensor: tensor[:, :0], "odd": lambda tensor: tensor[:, :3]},
            "bias": {
                **{id: change for id, change in NO_FLOATS.items() if id != "none"},
                **OTHER_FLOAT,
                **WRONG_COLUMNS,
                **ELSEWHERE,
                "extra_axis": lambda tensor: tensor[None],
            },
        },
    ),
    "selected_router_weights": (
        lambda kernel, values: kernel.selected_router_weights,
        lambda kernel, values: {
            "logits": values["logits"],
            "indices": values["indices"],
            "options": kernel.RouterWeightOptions(),
        },
        {
            "logits": MATRIX | WRONG_ROWS | ELSEWHERE,
            "indices": INDICES
            | WRONG_ROWS
            | ELSEWHERE
            | {
                "freed_uint32": lambda tensor: with_storage_of(tensor.int().view(torch.uint32), 0),
                "no_columns": WRONG_COLUMNS["no_columns"],
                "more_than_experts": lambda tensor: tensor.repeat(1, 3),
                "not_contiguous": lambda tensor: tensor.T.contiguous().T,
            },
        },
    ),
    "selected_router_backward": (
        lambda kernel, values: kernel.selected_router_backward,
        lambda kernel, values: {
            "logits": values["logits"],
            "indices": values["indices"],
            "grad_weights": values["grad_weights"],
            "options": kernel.RouterWeightOptions(),
        },
        {
            "logits": MATRIX | WRONG_ROWS | ELSEWHERE,
            "indices": INDICES | WRONG_ROWS | ELSEWHERE | WRONG_COLUMNS,
            "grad_weights": ROWS | OTHER_FLOAT,
        },
    ),
    "silu_and_mul": (
        lambda kernel, values: kernel.silu_and_mul,
        lambda kernel, values: {"input": values["input"]},
        {"input": NO_FLOATS | MATRIX_KINDS | HALVES},
    ),
    "RoutingPlan": (
        lambda kernel, values: kernel.RoutingPlan,
        lambda kernel, values: {"expert_indices": values["indices"], "weights": values["weights"], "experts": 4},
        {
            "expert_indices": INDICES | WRONG_ROWS | WRONG_COLUMNS | ELSEWHERE,
            "weights": ROWS,
        },
    ),
    "RoutingPlan.dispatch": (
        lambda kernel, values: kernel.RoutingPlan(values["indices"], values["weights"], 4).dispatch,
        lambda kernel, values: {"input": values["input"]},
        {"input": MATRIX | WRONG_ROWS | ELSEWHERE},
    ),
    "RoutingPlan.into_training": (
        lambda kernel, values: kernel.RoutingPlan(values["indices"], values["weights"], 4).into_training,
        lambda kernel, values: {"logits": values["logits"], "options": kernel.RouterWeightOptions()},
        {"logits": ROWS},
    ),
    "RouterTrainingPlan.backward": (
        lambda kernel, values: training_of(kernel, values).backward,
        lambda kernel, values: {"grad_weights": values["grad_weights"]},
        {"grad_weights": ROWS | OTHER_FLOAT},
    ),
    "DispatchedTokens.combine": (
        lambda kernel, values: dispatched_of(kernel, values).combine,
        lambda kernel, values: {"expert_output": values["rows"]},
        {"expert_output": MATRIX | WRONG_ROWS | ELSEWHERE},
    ),
    "DispatchedTokens.combine_backward": (
        lambda kernel, values: dispatched_of(kernel, values).combine_backward,
        lambda kernel, values: {"expert_output": values["rows"], "grad_output": values["input"]},
        {
            "expert_output": MATRIX | WRONG_ROWS | ELSEWHERE | OTHER_FLOAT,
            "grad_output": ROWS | OTHER_FLOAT,
        },
    ),
    "DispatchedTokens.dispatch_backward": (
        lambda kernel, values: dispatched_of(kernel, values).dispatch_backward,
        lambda kernel, values: {"grad_values": values["rows"]},
        {"grad_values": MATRIX | WRONG_ROWS | ELSEWHERE},
    ),
    "SwiGluExperts": (
        lambda kernel, values: kernel.SwiGluExperts,
        lambda kernel, values: {"gate": values["gate"], "up": values["up"], "down": values["down"]},
        {
            "gate": WEIGHT,
            "up": {id: change for id, change in WEIGHT.items() if id != "none"},
            "down": WEIGHT,
        },
    ),
    "SwiGluExperts.forward_dispatched": (
        lambda kernel, values: experts_of(kernel, values).forward_dispatched,
        lambda kernel, values: {"dispatched": dispatched_of(kernel, values)},
        {
            "dispatched": {
                "none": lambda dispatched: None,
                "tensor": lambda dispatched: dispatched.values,
                "freed_values": lambda dispatched: changed(dispatched, "values"),
                "freed_offsets": lambda dispatched: changed(dispatched, "expert_offsets"),
            }
        },
    ),
    "SwiGluExperts.forward": (
        lambda kernel, values: experts_of(kernel, values).forward,
        lambda kernel, values: {
            "input": values["input"],
            "logits": values["logits"],
            "options": kernel.RoutingOptions(2),
        },
        {"input": ROWS | OTHER_FLOAT, "logits": ROWS},
    ),
    "SwiGluExperts.forward_sigmoid_grouped": (
        lambda kernel, values: experts_of(kernel, values).forward_sigmoid_grouped,
        lambda kernel, values: {
            "input": values["input"],
            "logits": values["logits"],
            "bias": values["bias"],
            "options": kernel.GroupRoutingOptions(2),
        },
        {
            "input": ROWS | OTHER_FLOAT,
            "logits": ROWS,
            "bias": {id: change for id, change in NO_FLOATS.items() if id != "none"} | OTHER_FLOAT | WRONG_COLUMNS,
        },
    ),
    "ExpertsCache.backward": (
        lambda kernel, values: cache_of(kernel, values).backward,
        lambda kernel, values: {"grad_output": values["rows"]},
        {"grad_output": ROWS | OTHER_FLOAT},
    ),
    "experts_forward": (
        lambda kernel, values: lambda **arguments: kernel.experts_forward(Experts(values), **arguments),
        lambda kernel, values: {
            "hidden_states": values["input"],
            "top_k_index": values["indices"],
            "top_k_weights": values["weights"],
        },
        {
            "hidden_states": ROWS,
            "top_k_index": INDICES | WRONG_ROWS | WRONG_COLUMNS | ELSEWHERE,
            "top_k_weights": ROWS,
        },
    ),
}
FUNCTIONS["gelu_and_mul"] = (lambda kernel, values: kernel.gelu_and_mul, *FUNCTIONS["silu_and_mul"][1:])
FUNCTIONS["gelu_tanh_and_mul"] = (lambda kernel, values: kernel.gelu_tanh_and_mul, *FUNCTIONS["silu_and_mul"][1:])
FUNCTIONS["SwiGluExperts.forward_dispatched_training"] = (
    lambda kernel, values: experts_of(kernel, values).forward_dispatched_training,
    *FUNCTIONS["SwiGluExperts.forward_dispatched"][1:],
)


def assert_refused(kernel, function, argument, call, arguments):
    """The message says the function, the argument, what it must be, and what came."""
    with pytest.raises(kernel.MoeError) as caught:
        call(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{function}: "), message
    assert re.search(rf"\b{argument}\b", message), f"the message must name {argument}: {message}"
    assert re.search(r"\bgot \S", message), f"the message must say what came: {message}"


def bad_arguments():
    for function, (_, _, tables) in FUNCTIONS.items():
        for argument, table in tables.items():
            for id, change in table.items():
                yield pytest.param(function, argument, change, id=f"{function}-{argument}-{id}")


@pytest.mark.parametrize("function, argument, change", list(bad_arguments()))
def test_tensors(kernel, device, function, argument, change):
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    arguments = make(kernel, values)
    arguments[argument] = change(arguments[argument])
    assert_refused(kernel, function, argument, get(kernel, values), arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_good_arguments_are_taken(kernel, device, function):
    """Or the tables above would say nothing."""
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    get(kernel, values)(**make(kernel, values))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tensor_left_on_the_cpu(kernel, device, function):
    """Its address means nothing to a GPU."""
    not_on_the_cpu(device)
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    arguments = make(kernel, values)
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor):
            changed = {**arguments, argument: value.cpu()}
            assert_refused(kernel, function, argument, get(kernel, values), changed)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_calls_are_type_errors(kernel, device, function):
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    with pytest.raises(TypeError):
        get(kernel, values)()
    with pytest.raises(TypeError):
        get(kernel, values)(**make(kernel, values), nonsense=1)


WITH_OPTIONS = [
    "route",
    "route_sigmoid_grouped",
    "selected_router_weights",
    "selected_router_backward",
    "RoutingPlan.into_training",
    "SwiGluExperts.forward",
    "SwiGluExperts.forward_sigmoid_grouped",
]
NO_OPTIONS = {"none": None, "number": 2, "dict": {"top_k": 2}, "tuple": (2, False)}


@pytest.mark.parametrize("function", WITH_OPTIONS)
@pytest.mark.parametrize("options", NO_OPTIONS.values(), ids=NO_OPTIONS)
def test_options(kernel, device, function, options):
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    arguments = {**make(kernel, values), "options": options}
    assert_refused(kernel, function, "options", get(kernel, values), arguments)


@pytest.mark.parametrize("function", WITH_OPTIONS)
def test_options_of_another_function(kernel, device, function):
    """They have some fields of the same name, and are refused all the same."""
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    arguments = make(kernel, values)
    every = [getattr(kernel, cls)(**good) for cls, good in GOOD_OPTIONS.items()]
    for options in every:
        if type(options) is not type(arguments["options"]):
            changed = {**arguments, "options": options}
            assert_refused(kernel, function, "options", get(kernel, values), changed)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name.startswith("SwiGluExperts.")])
@pytest.mark.parametrize("strategy", ["", "SCALAR", "tensor-core", None, 1, b"scalar"])
def test_strategies(kernel, device, function, strategy):
    values = tensors(device)
    get, make, _ = FUNCTIONS[function]
    arguments = {**make(kernel, values), "strategy": strategy}
    assert_refused(kernel, function, "strategy", get(kernel, values), arguments)


@pytest.mark.parametrize("strategy", ["", "warp", None, 1])
def test_strategies_of_backwards(kernel, device, strategy):
    values = tensors(device)
    arguments = {"expert_output": values["rows"], "grad_output": values["input"], "strategy": strategy}
    combine = dispatched_of(kernel, values).combine_backward_with_strategy
    assert_refused(kernel, "DispatchedTokens.combine_backward_with_strategy", "strategy", combine, arguments)
    arguments = {"grad_output": values["rows"], "strategy": strategy}
    backward = cache_of(kernel, values).backward_with_strategy
    assert_refused(kernel, "ExpertsCache.backward_with_strategy", "strategy", backward, arguments)


def test_dispatched_rows_that_do_not_fit(kernel, device):
    """Another hidden size, dtype or number of experts."""
    values = tensors(device)
    experts = experts_of(kernel, values)
    plan = kernel.RoutingPlan(values["indices"], values["weights"], 4)
    other = kernel.RoutingPlan(values["indices"], values["weights"], 5)
    for dispatched, argument in (
        (plan.dispatch(values["input"][:, :7]), "values"),
        (plan.dispatch(values["input"].half()), "values"),
        (other.dispatch(values["input"]), "expert_offsets"),
    ):
        for name in ("forward_dispatched", "forward_dispatched_training"):
            call = getattr(experts, name)
            assert_refused(kernel, f"SwiGluExperts.{name}", argument, call, {"dispatched": dispatched})


def test_routers_that_do_not_fit_the_experts(kernel, device):
    """More logits than experts must not be taken for valid indices."""
    values = tensors(device)
    experts = experts_of(kernel, values)
    logits = normal((3, 6), F32, device=device)
    arguments = {"input": values["input"], "logits": logits, "options": kernel.RoutingOptions(2)}
    assert_refused(kernel, "SwiGluExperts.forward", "logits", experts.forward, arguments)
    arguments |= {"bias": None, "options": kernel.GroupRoutingOptions(2)}
    function = "SwiGluExperts.forward_sigmoid_grouped"
    assert_refused(kernel, function, "logits", experts.forward_sigmoid_grouped, arguments)
    plan = kernel.RoutingPlan(values["indices"], values["weights"], 4)
    arguments = {"logits": logits, "options": kernel.RouterWeightOptions()}
    assert_refused(kernel, "RoutingPlan.into_training", "logits", plan.into_training, arguments)


@pytest.mark.parametrize(
    "sizes, argument",
    [
        pytest.param((2, 3, 1), "groups", id="groups_do_not_divide"),
        pytest.param((3, 4, 2, True), "groups", id="groups_of_one_have_no_top_two"),
        pytest.param((3, 2, 1), "top_k", id="more_than_the_selected_groups_have"),
        pytest.param((5, 1, 1), "top_k", id="more_than_there_are"),
    ],
)
def test_groups_that_do_not_fit_the_logits(kernel, device, sizes, argument):
    arguments = {"logits": tensors(device)["logits"], "bias": None, "options": kernel.GroupRoutingOptions(*sizes)}
    assert_refused(kernel, "route_sigmoid_grouped", argument, kernel.route_sigmoid_grouped, arguments)


def test_too_many_experts_for_groups(kernel, device):
    arguments = {"logits": torch.ones(2, 1025, device=device), "bias": None, "options": kernel.GroupRoutingOptions(2)}
    assert_refused(kernel, "route_sigmoid_grouped", "logits", kernel.route_sigmoid_grouped, arguments)


def test_too_many_selected_experts(kernel, device):
    logits = torch.ones(2, 100, device=device)
    arguments = {
        "logits": logits,
        "indices": torch.zeros(2, 65, dtype=torch.int32, device=device),
        "options": kernel.RouterWeightOptions(),
    }
    assert_refused(kernel, "selected_router_weights", "indices", kernel.selected_router_weights, arguments)


BAD_COUNTS = {
    "zero": 0,
    "negative": -1,
    "float": 2.0,
    "string": "2",
    "none": None,
    "true": True,
    "tensor": torch.tensor(2),
    "list": [2],
}
BAD_FLAGS = {"none": None, "one": 1, "string": "True", "tensor": torch.tensor(True)}
BAD_SCALES = {
    "zero": 0.0,
    "negative": -1.0,
    "nan": math.nan,
    "inf": math.inf,
    "string": "1",
    "none": None,
    "true": True,
    "complex": 1 + 0j,
    "tensor": torch.tensor(1.0),
    "too_large_for_a_float": 10**400,
    "too_large_for_float32": 1e39,
    "zero_in_float32": 1e-46,
}
OPTIONS = {
    "RoutingOptions": {"top_k": BAD_COUNTS, "renormalize": BAD_FLAGS},
    "GroupRoutingOptions": {
        "top_k": BAD_COUNTS | {"too_many": 65},
        "groups": BAD_COUNTS | {"too_many": 129},
        "selected_groups": BAD_COUNTS | {"more_than_groups": 5},
        "group_top_two": BAD_FLAGS,
        "renormalize": BAD_FLAGS,
        "scale": BAD_SCALES,
    },
    "RouterWeightOptions": {
        "scoring": {"unknown": "relu", "upper_case": "SOFTMAX", "none": None, "number": 1},
        "renormalize": BAD_FLAGS,
        "scale": BAD_SCALES,
    },
}
GOOD_OPTIONS = {
    "RoutingOptions": {"top_k": 2},
    "GroupRoutingOptions": {"top_k": 2, "groups": 4, "selected_groups": 2},
    "RouterWeightOptions": {},
}


@pytest.mark.parametrize(
    "cls, option, value",
    [
        pytest.param(cls, option, value, id=f"{cls}-{option}-{id}")
        for cls, options in OPTIONS.items()
        for option, table in options.items()
        for id, value in table.items()
    ],
)
def test_options_check_themselves(kernel, cls, option, value):
    assert_refused(kernel, cls, option, getattr(kernel, cls), {**GOOD_OPTIONS[cls], option: value})


def test_options_are_values(kernel):
    """Frozen, comparable, and of plain types whatever integers and strings they were made of."""
    for cls, good in GOOD_OPTIONS.items():
        options = getattr(kernel, cls)(**good)
        assert options == getattr(kernel, cls)(**good)
        with pytest.raises(AttributeError):
            options.renormalize = True
    assert type(kernel.RoutingOptions(numpy.int64(2)).top_k) is int
    assert kernel.RouterWeightOptions("sigmoid").scoring is kernel.RouterScoring.SIGMOID
    assert type(kernel.RouterWeightOptions(scale=numpy.float32(2)).scale) is float


@pytest.mark.parametrize(
    "arguments, argument",
    [
        (("float32", "cpu"), "dtype"),
        ((torch.float64, "cpu"), "dtype"),
        ((F32, "xpu"), "device"),
        ((F32, None), "device"),
        ((F32, "nonsense"), "device"),
        ((F32, "cpu", "fast"), "strategy"),
    ],
)
def test_experts_plan(kernel, device, arguments, argument):
    def call():
        kernel.experts_plan(*(device if each == "cpu" else each for each in arguments))

    assert_refused(kernel, "experts_plan", argument, call, {})


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"has_bias": True}, "has_bias"),
        ({"has_gate": False}, "has_gate"),
        ({"has_post_expert_norm": True}, "has_post_expert_norm"),
        ({"act_fn": torch.nn.GELU()}, "act_fn"),
    ],
    ids=["bias", "no_gate", "norm_behind", "gelu"],
)
def test_experts_of_other_kinds_are_refused(kernel, device, change, argument):
    values = tensors(device)
    module = Experts(values, **change)
    arguments = {
        "hidden_states": values["input"],
        "top_k_index": values["indices"],
        "top_k_weights": values["weights"],
    }
    call = kernel.experts_forward
    assert_refused(kernel, "experts_forward", argument, call, {"self": module, **arguments})


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "act_fn", "is_concatenated", "is_transposed"])
def test_modules_that_are_no_experts_are_refused(kernel, device, name):
    values = tensors(device)
    module = Experts(values)
    delattr(module, name)
    with pytest.raises(kernel.MoeError, match=f"experts_forward: self must have the attribute {name}, got "):
        kernel.experts_forward(module, values["input"], values["indices"], values["weights"])


def test_more_than_32_bits_of_experts_or_rows_are_refused(kernel, ops, device):
    """Maps and indices are int32; views without memory of their own tell."""
    wide = torch.zeros(1, 1, device=device).expand(1, 2**31)
    with pytest.raises(kernel.MoeError, match="logits must have fewer than 2\\^31 experts"):
        kernel.route(wide, kernel.RoutingOptions(2))
    indices = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(kernel.MoeError, match="logits must have fewer than 2\\^31 experts"):
        kernel.selected_router_weights(wide, indices, kernel.RouterWeightOptions())
    many = torch.zeros(1, 1, dtype=torch.int32, device=device).expand(1, 2**31)
    with pytest.raises(RuntimeError, match="indices must have fewer than 2\\^31 elements"):
        ops.dispatch(torch.ones(1, 8, device=device), many, 4)
    weights = make_weights(SIZES, F32, device, 3)
    factors = torch.zeros(1, 1, device=device).expand(1, 2**31)
    with pytest.raises(RuntimeError, match="indices must have fewer than 2\\^31 elements"):
        ops.fused_experts(torch.ones(1, 8, device=device), many, factors, *weights.values(), False)


def test_experts_that_gate_in_their_own_way_are_refused(kernel, device):
    class OwnGate(Experts):
        def _apply_gate(self, gate_up):
            return gate_up

    values = tensors(device)
    with pytest.raises(kernel.MoeError, match="experts_forward: self must have no _apply_gate of its own"):
        kernel.experts_forward(OwnGate(values), values["input"], values["indices"], values["weights"])
    module = Experts(values)
    module._apply_gate = lambda gate_up: gate_up
    with pytest.raises(kernel.MoeError, match="experts_forward: self must have no _apply_gate of its own"):
        kernel.experts_forward(module, values["input"], values["indices"], values["weights"])


def test_weights_of_a_model_go_by_their_own_names(kernel, device):
    values = tensors(device)
    module = Experts(values)
    module.down_proj = module.down_proj[:, :-1]
    with pytest.raises(kernel.MoeError, match=r"experts_forward: down_proj must have shape .* gate_up_proj of shape"):
        kernel.experts_forward(module, values["input"], values["indices"], values["weights"])


def test_masked_tensors_are_refused(kernel, device):
    logits = torch.masked.masked_tensor(torch.ones(2, 4, device=device), torch.ones(2, 4, device=device).bool())
    with pytest.raises(kernel.MoeError, match=r"route: logits must be a dense tensor .* got a masked tensor"):
        kernel.route(logits, kernel.RoutingOptions(2))


def test_dispatched_tokens_by_hand(kernel, device):
    plan = kernel.RoutingPlan(torch.zeros(2, 1, dtype=torch.int32, device=device), torch.ones(2, 1, device=device), 1)
    dispatched = plan.dispatch(torch.ones(2, 3, device=device))
    with pytest.raises(kernel.MoeError, match="DispatchedTokens: routing must be a RoutingPlan, got NoneType None"):
        dataclasses.replace(dispatched, routing=None)
    with pytest.raises(kernel.MoeError, match="dispatch_backward: slot_rows must be a dense tensor of int32"):
        dataclasses.replace(dispatched, slot_rows=None).dispatch_backward(torch.ones(2, 3, device=device))


def test_the_message_says_op_requirement_and_what_came(kernel, device):
    with pytest.raises(kernel.MoeError) as caught:
        kernel.SwiGluExperts(*(torch.ones(shape, device=device) for shape in ((2, 6, 8), (2, 6, 8), (2, 8, 5))))
    message = str(caught.value)
    assert message.startswith("SwiGluExperts: down must have shape (2, 8, 6), to go with gate of shape (2, 6, 8), got ")
    assert "(2, 8, 5)" in message


def test_the_error_is_a_value_error(kernel):
    assert issubclass(kernel.MoeError, ValueError)
    assert kernel.MoeError.__doc__


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
    "int16": torch.Tensor.short,
    "bool": torch.Tensor.bool,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "quantised": quantised,
    "meta": lambda tensor: tensor.to("meta"),
}
# What an argument may be all the same, where it does not have to fit another.
COLUMNS = {"one_column_less", "one_column_more"}
LEGAL = {
    ("route", "logits"): {"half", "no_rows", "one_row_less", "meta", *COLUMNS},
    ("route_sigmoid_grouped", "logits"): {"half", "no_rows", "one_row_less"},
    ("selected_router_weights", "logits"): {"half", *COLUMNS},
    ("selected_router_weights", "indices"): COLUMNS,
    ("selected_router_backward", "logits"): {"half", *COLUMNS},
    ("dispatch", "input"): {"half", "empty", *COLUMNS},
    ("dispatch", "indices"): COLUMNS,
    ("dispatch_backward", "grad_values"): {"half", "empty", *COLUMNS},
    ("combine", "expert_output"): {"half", "empty", *COLUMNS},
    ("combine", "weights"): {"half"},
    ("combine_backward", "weights"): {"half"},
    ("experts", "values"): {"no_rows", "one_row_less"},
    ("experts_training", "values"): {"no_rows", "one_row_less"},
    ("fused_experts", "weights"): {"half"},
    ("gated_activation", "input"): {"half", "no_rows", "one_row_less", "extra_axis", "meta"},
}


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("change_id", OP_CHANGES)
def test_registered_ops_raise(ops, device, name, change_id):
    """Called directly, with one tensor that does not fit the others."""
    op = getattr(ops, name).default
    valid = arguments(name, SHAPES[0], F32, device)
    op(*valid)
    names = [argument.name for argument in op._schema.arguments]
    for position, (argument, value) in enumerate(zip(names, valid)):
        if not isinstance(value, torch.Tensor) or change_id in LEGAL.get((name, argument), ()):
            continue
        changed = [*valid[:position], OP_CHANGES[change_id](value), *valid[position + 1 :]]
        with pytest.raises((RuntimeError, NotImplementedError, ValueError, TypeError)):
            op(*changed)


NUMBERS = [
    ("route", "top_k", [0, -1, 5, 2**40]),
    ("route_sigmoid_grouped", "top_k", [0, 5, 65, -1]),
    ("route_sigmoid_grouped", "groups", [0, 3, 129]),
    ("route_sigmoid_grouped", "selected_groups", [0, 2, -1]),
    ("dispatch", "experts", [0, -1, 2**31 - 1, 2**40]),
    ("gated_activation", "activation", ["", "relu", "silu\0"]),
    ("gated_activation_backward", "activation", ["", "relu"]),
    ("selected_router_weights", "scoring", ["", "relu"]),
    ("selected_router_backward", "scoring", ["", "relu"]),
]


@pytest.mark.parametrize(
    "name, argument, value", [(name, argument, value) for name, argument, values in NUMBERS for value in values]
)
def test_registered_ops_raise_for_numbers_and_names(ops, device, name, argument, value):
    op = getattr(ops, name).default
    valid = arguments(name, SHAPES[0], F32, device)
    valid[[each.name for each in op._schema.arguments].index(argument)] = value
    with pytest.raises(RuntimeError):
        op(*valid)


@pytest.mark.parametrize("name", [name for name in TENSOR_OPS if "experts" in name])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_registered_ops_refuse_matrix_units_that_are_not_there(ops, device, name, dtype):
    supported = ops.tensor_core_dtypes().split(",")
    valid = arguments(name, SHAPES[0], dtype, device)
    position = [argument.name for argument in getattr(ops, name).default._schema.arguments].index("tensor_core")
    valid[position] = True
    if str(dtype).removeprefix("torch.") in supported:
        getattr(ops, name).default(*valid)
        return
    with pytest.raises(RuntimeError, match="tensor_core"):
        getattr(ops, name).default(*valid)


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_registered_ops_refuse_a_tensor_left_on_the_cpu(ops, device, name):
    not_on_the_cpu(device)
    op = getattr(ops, name).default
    valid = arguments(name, SHAPES[0], F32, device)
    for position, value in enumerate(valid):
        if isinstance(value, torch.Tensor):
            with pytest.raises(RuntimeError):
                op(*valid[:position], value.cpu(), *valid[position + 1 :])


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_registered_ops_take_any_strides(ops, device, name):
    """A strided tensor is never read as dense, in a direct call neither."""
    op = getattr(ops, name).default
    valid = arguments(name, SHAPES[0], F32, device)
    expected = op(*valid)
    for position, value in enumerate(valid):
        if isinstance(value, torch.Tensor):
            filling = torch.nan if value.is_floating_point() else -7
            strided = torch.stack([value, torch.full_like(value, filling)], -1)[..., 0]
            found = op(*valid[:position], strided, *valid[position + 1 :])
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_plan_whose_indices_have_been_freed(kernel, device):
    values = tensors(device)
    indices = values["indices"].T.contiguous().T
    plan = kernel.RoutingPlan(indices, values["weights"], 4)
    indices.untyped_storage().resize_(0)
    for call in (plan.into_training, lambda *arguments: kernel.RouterTrainingPlan(plan, *arguments)):
        with pytest.raises(kernel.MoeError, match=r"into_training: selection\.expert_indices must have memory"):
            call(values["logits"], kernel.RouterWeightOptions())
    with pytest.raises(kernel.MoeError, match=r"into_training: selection must be a RoutingPlan, got NoneType None"):
        kernel.RouterTrainingPlan(None, values["logits"], kernel.RouterWeightOptions())


def test_the_message_reads_no_tensor(kernel, device):
    """Not even one inside of something else that is no tensor."""
    values = tensors(device)
    freed = with_storage_of(values["input"], 0)
    dispatched = changed(dispatched_of(kernel, values), "values")
    for other in ([freed], (freed, 1), dispatched, kernel.ExpertGradients(freed, freed, None, freed)):
        assert_refused(kernel, "route", "logits", kernel.route, {"logits": other, "options": kernel.RoutingOptions(2)})
        assert_refused(kernel, "route", "options", kernel.route, {"logits": values["logits"], "options": other})


@pytest.mark.parametrize("top_k", [2, 65], ids=["selected", "more_than_the_op_takes"])
def test_logits_freed_before_the_backward(kernel, device, top_k):
    logits = normal((3, 70), F32, device=device).requires_grad_()
    copy = logits.clone()
    weights = kernel.route(copy, kernel.RoutingOptions(top_k)).weights
    copy.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="logits must have memory for all its elements"):
        weights.sum().backward()


def test_maps_freed_before_the_backward(kernel, device):
    values = tensors(device)
    dispatched = dispatched_of(kernel, values)
    output = dispatched.combine(values["rows"].requires_grad_())
    dispatched.slot_rows.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="slot_rows must have memory for all its elements"):
        output.sum().backward()
