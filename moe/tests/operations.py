"""The public functions as a table, and the two checks that every test of their numbers makes.

An operation says which arguments it takes and how PyTorch and models compute the same thing. Shapes are named by the
code path they take.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close_to_exact, load_kernel
from torch import Tensor

Inputs = dict[str, Tensor]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}

by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def strategies() -> list:
    """Each dtype with each strategy that the loaded build has for it on the hardware at hand."""
    supported = load_kernel()._strategy.TENSOR_CORE_DTYPES
    cases = [(dtype, "scalar", f"{name}_scalar") for name, dtype in DTYPES.items()]
    cases += [(dtype, "tensor_core", f"{name}_tensor_core") for name, dtype in DTYPES.items() if dtype in supported]
    return [pytest.param(dtype, strategy, id=id) for dtype, strategy, id in cases]


by_strategy = pytest.mark.parametrize("dtype, strategy", strategies())


@dataclass(frozen=True)
class Shape:
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SMALL = Shape(5, 4, 2, 24, 12)


def _small(id: str, *sizes: int):
    return pytest.param(Shape(*sizes), id=id, marks=pytest.mark.small)


def _checked(id: str, *sizes: int):
    return pytest.param(Shape(*sizes), id=id, marks=[pytest.mark.small, pytest.mark.simt_checked])


# A tile holds 16 or 32 tokens and as many features; a vector has 4, 8 or 16 float32 lanes; bfloat16 comes in pairs.
EXPERT_SHAPES = [
    _small("one_of_everything", 1, 1, 1, 1, 1),
    _small("one_token", 1, 4, 2, 24, 12),
    _small("whole_vectors", 4, 4, 2, 32, 16),
    _small("one_past_vectors", 3, 2, 1, 17, 33),
    _small("odd_sizes", 5, 3, 2, 19, 13),
    _small("every_expert_of_each_token", 4, 3, 3, 16, 8),
    _small("more_experts_than_rows", 2, 16, 2, 24, 16),
    _small("one_below_a_tile", 15, 1, 1, 16, 16),
    _checked("whole_tiles", 32, 2, 1, 64, 32),
    _checked("one_past_a_tile", 33, 1, 1, 33, 17),
    _checked("partial_tiles", 37, 4, 2, 40, 24),
    _checked("many_steps_of_a_wide_tile", 140, 1, 1, 136, 24),
    _small("second_tiles_everywhere", 140, 1, 1, 136, 72),
    _checked("stages_used_again", 34, 1, 1, 200, 24),
    pytest.param(Shape(129, 8, 2, 160, 96), id="several_blocks"),
    pytest.param(Shape(50, 9, 2, 64, 72), id="odd_number_of_experts"),
    pytest.param(Shape(70, 32, 4, 256, 128), id="several_blocks_of_features"),
    pytest.param(Shape(600, 4, 2, 64, 48), id="many_tokens_an_expert"),
    pytest.param(Shape(40, 4, 2, 1030, 518), id="long_ragged_rows"),
]
by_shape = pytest.mark.parametrize("shape", EXPERT_SHAPES)


def spread_logits(tokens: int, experts: int, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Logits `[T, E]` whose scores lie further apart in each row than any rounding: a grid in random order.

    The grid is exact in bfloat16 for up to 512 experts.
    """
    generator = torch.Generator().manual_seed(seed)
    step = 2.0 ** -max((experts - 1).bit_length() - 3, 0)
    grid = (torch.arange(experts) - experts // 2) * step
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return grid[order].to(dtype).to(device)


def normal(shape: Iterable[int], dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def make_indices(shape: Shape, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Distinct experts for each token, int32 `[T, k]`."""
    scores = spread_logits(shape.tokens, shape.experts, F32, seed=seed)
    return scores.argsort(1)[:, : shape.top_k].int().to(device)


# How PyTorch and models compute the same.


def softmax_router(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """In float32, rounded to the logits' dtype at the end (Qwen3-MoE)."""
    weights, indices = torch.softmax(logits, -1, dtype=F32).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return indices, weights.to(logits.dtype)


def weights_of_selected(logits: Tensor, indices: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """In float32 throughout (Mixtral, DeepSeek-V3)."""
    scores = torch.sigmoid(logits.float()) if scoring == "sigmoid" else torch.softmax(logits.float(), -1)
    weights = scores.gather(1, indices.long())
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def eager_experts(
    input: Tensor, indices: Tensor, weights: Tensor, gate: Tensor, up: Tensor | None, down: Tensor
) -> Tensor:
    """Expert by expert, every result rounded to the input's dtype, as Transformers' eager experts do."""
    gate, up = gate.chunk(2, 1) if up is None else (gate, up)
    output = torch.zeros_like(input)
    for expert in range(down.shape[0]):
        token, choice = torch.where(indices == expert)
        rows = eager_expert(input[token], gate[expert], up[expert], down[expert])
        rows = rows * weights[token, choice, None]
        output = output.index_add(0, token, rows.to(output.dtype))
    return output


def eager_expert(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)


def eager_rows(values: Tensor, offsets: Tensor, gate: Tensor, up: Tensor | None, down: Tensor) -> Tensor:
    """The experts' results for rows that are grouped already."""
    gate, up = gate.chunk(2, 1) if up is None else (gate, up)
    sizes = offsets.diff().tolist()
    parts = values.split([*sizes, values.shape[0] - sum(sizes)])
    done = [eager_expert(rows, *each) for rows, each in zip(parts[:-1], zip(gate, up, down))]
    return torch.cat([*done, torch.zeros_like(parts[-1])])


@dataclass(frozen=True)
class Operation:
    """One way of calling the package.

    make: `(shape, dtype, device, seed)` gives the arguments by name; the floating-point ones can be differentiated.
    run: `(kernel, arguments)` gives the result.
    exact: `(reference, arguments)` gives the definition's, in the dtype of the arguments.
    plain: `(arguments)` gives PyTorch's own.
    per_token: the arguments with a row for each token, which the result has too.
    strategic: whether the call takes a strategy.
    """

    id: str
    make: Callable[[Shape, torch.dtype, str, int], Inputs]
    run: Callable[..., Tensor]
    exact: Callable[[ModuleType, Inputs], Tensor]
    plain: Callable[[Inputs], Tensor]
    per_token: tuple[str, ...]
    strategic: bool = False

    def __str__(self) -> str:
        return self.id

    def inputs(
        self,
        shape: Shape = SMALL,
        dtype: torch.dtype = F32,
        *,
        device: str = "cpu",
        requires_grad: bool = False,
        seed: int = 0,
    ) -> Inputs:
        inputs = self.make(shape, dtype, device, seed)
        for tensor in differentiable(inputs).values():
            tensor.requires_grad_(requires_grad)
        return inputs

    def run_exact(self, kernel: ModuleType, inputs: Inputs) -> tuple[Tensor, Inputs]:
        """The result in float64 on the CPU, and the arguments that it was computed from."""
        leaves = {
            name: tensor.detach().cpu().double().requires_grad_(tensor.requires_grad)
            if tensor.is_floating_point()
            else tensor.cpu()
            for name, tensor in inputs.items()
        }
        return self.exact(kernel.reference, leaves), leaves


def differentiable(inputs: Inputs) -> Inputs:
    return {name: tensor for name, tensor in inputs.items() if tensor.is_floating_point() and name != "bias"}


def _make_logits(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    return {"logits": spread_logits(shape.tokens, shape.experts, dtype, device=device, seed=seed)}


def _make_selection(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    logits = normal((shape.tokens, shape.experts), dtype, device=device, seed=seed)
    return {"logits": logits, "indices": make_indices(shape, device=device, seed=seed + 1)}


def _make_activation(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    return {"input": normal((shape.tokens, 2 * shape.intermediate), dtype, device=device, seed=seed)}


def _make_tokens(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    return {
        "input": normal((shape.tokens, shape.hidden), dtype, device=device, seed=seed),
        "indices": make_indices(shape, device=device, seed=seed + 1),
    }


def _make_rows(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    rows = shape.tokens * shape.top_k
    return {
        "expert_output": normal((rows, shape.hidden), dtype, device=device, seed=seed),
        "weights": normal((shape.tokens, shape.top_k), dtype, device=device, seed=seed + 1),
        "indices": make_indices(shape, device=device, seed=seed + 2),
    }


def make_weights(shape: Shape, dtype: torch.dtype, device: str, seed: int, *, fused: bool = False) -> Inputs:
    """Weights of experts, scaled so that results are of the order of the input."""
    experts, hidden, intermediate = shape.experts, shape.hidden, shape.intermediate
    narrow = (experts, 2 * intermediate if fused else intermediate, hidden)

    def weight(size: tuple[int, ...], seed: int) -> Tensor:
        return (normal(size, F32, seed=seed) * size[-1] ** -0.5).to(dtype).to(device)

    weights = {"gate": weight(narrow, seed), "up": weight(narrow, seed + 1)}
    weights["down"] = weight((experts, hidden, intermediate), seed + 2)
    if fused:
        del weights["up"]
    return weights


def _make_layer(shape: Shape, dtype: torch.dtype, device: str, seed: int, *, fused: bool = False) -> Inputs:
    return {
        "input": normal((shape.tokens, shape.hidden), dtype, device=device, seed=seed),
        **_make_logits(shape, dtype, device, seed),
        **make_weights(shape, dtype, device, seed + 1, fused=fused),
    }


def _make_fused_layer(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    return _make_layer(shape, dtype, device, seed, fused=True)


def _make_grouped_layer(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    bias = (torch.arange(shape.experts) % 3 - 1.0).to(device)
    return {**_make_layer(shape, dtype, device, seed), "bias": bias}


def _make_dispatched(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    return {
        **_make_tokens(shape, dtype, device, seed),
        **make_weights(shape, dtype, device, seed + 2),
    }


def top_k_of(logits: Tensor) -> int:
    """The top_k that the operations with logits ask for: about half of the experts, at most four."""
    return min(4, (logits.shape[1] + 1) // 2)


def plan_of(kernel: ModuleType, inputs: Inputs, weights: Tensor | None = None):
    indices = inputs["indices"]
    weights = indices.new_ones(indices.shape, dtype=F32) if weights is None else weights
    return kernel.RoutingPlan(indices, weights, _experts_in(inputs))


def _experts_in(inputs: Inputs) -> int:
    """Enough of them for any indices where there are no weights to say so."""
    return inputs["down"].shape[0] if "down" in inputs else 64


def swiglu_experts(kernel: ModuleType, inputs: Inputs):
    return kernel.SwiGluExperts(inputs["gate"], inputs.get("up"), inputs["down"])


def _run_layer(kernel: ModuleType, inputs: Inputs, strategy: str = "auto") -> Tensor:
    options = kernel.RoutingOptions(top_k_of(inputs["logits"]), True)
    return swiglu_experts(kernel, inputs).forward(inputs["input"], inputs["logits"], options, strategy)


def _exact_layer(reference: ModuleType, inputs: Inputs) -> Tensor:
    options = load_kernel().RoutingOptions(top_k_of(inputs["logits"]), True)
    indices, weights = reference.route(inputs["logits"], options, compute_dtype=torch.float64)
    return _exact_mixture(reference, inputs, indices, weights)


def _exact_mixture(reference: ModuleType, inputs: Inputs, indices: Tensor, weights: Tensor) -> Tensor:
    matrices = inputs["gate"], inputs.get("up"), inputs["down"]
    return reference.mixture(inputs["input"], indices, weights, *matrices, compute_dtype=torch.float64)


def _plain_layer(inputs: Inputs) -> Tensor:
    indices, weights = softmax_router(inputs["logits"], top_k_of(inputs["logits"]), True)
    return eager_experts(inputs["input"], indices, weights, inputs["gate"], inputs.get("up"), inputs["down"])


def _group_options(kernel: ModuleType, logits: Tensor):
    groups = 2 if logits.shape[1] % 2 == 0 else 1
    top_k = min(top_k_of(logits), logits.shape[1] // groups)
    return kernel.GroupRoutingOptions(top_k, groups, 1, False, True, 2.5)


def _run_grouped_layer(kernel: ModuleType, inputs: Inputs, strategy: str = "auto") -> Tensor:
    logits, bias = inputs["logits"], inputs["bias"]
    experts = swiglu_experts(kernel, inputs)
    return experts.forward_sigmoid_grouped(inputs["input"], logits, bias, _group_options(kernel, logits), strategy)


def _exact_grouped_layer(reference: ModuleType, inputs: Inputs) -> Tensor:
    logits, bias = inputs["logits"], inputs["bias"].float()
    indices, weights = reference.route_sigmoid_grouped(
        logits, bias, _group_options(load_kernel(), logits), compute_dtype=torch.float64
    )
    return _exact_mixture(reference, inputs, indices, weights)


def _plain_grouped_layer(inputs: Inputs) -> Tensor:
    logits, bias = inputs["logits"], inputs["bias"]
    options = _group_options(load_kernel(), logits)
    indices, _ = load_kernel().reference.route_sigmoid_grouped(logits, bias, options)
    weights = weights_of_selected(logits, indices, "sigmoid", True, options.scale).to(logits.dtype)
    return eager_experts(inputs["input"], indices, weights, inputs["gate"], inputs.get("up"), inputs["down"])


def _run_dispatched(kernel: ModuleType, inputs: Inputs, strategy: str = "auto") -> Tensor:
    dispatched = plan_of(kernel, inputs).dispatch(inputs["input"])
    return swiglu_experts(kernel, inputs).forward_dispatched(dispatched, strategy)


def _exact_dispatched(reference: ModuleType, inputs: Inputs) -> Tensor:
    values, offsets, *_ = reference.dispatch(inputs["input"], inputs["indices"], _experts_in(inputs))
    matrices = inputs["gate"], inputs["up"], inputs["down"]
    return reference.experts(values, offsets, *matrices, compute_dtype=torch.float64)


def _plain_dispatched(inputs: Inputs) -> Tensor:
    reference = load_kernel().reference
    values, offsets, *_ = reference.dispatch(inputs["input"], inputs["indices"], _experts_in(inputs))
    return eager_rows(values, offsets, inputs["gate"], inputs["up"], inputs["down"])


def _run_combine(kernel: ModuleType, inputs: Inputs) -> Tensor:
    plan = plan_of(kernel, inputs, inputs["weights"])
    tokens = torch.zeros(len(inputs["indices"]), 1, device=inputs["indices"].device)
    return plan.dispatch(tokens).combine(inputs["expert_output"])


def _slot_rows(inputs: Inputs) -> Tensor:
    tokens = torch.zeros(len(inputs["indices"]), 1, device=inputs["indices"].device)
    return load_kernel().reference.dispatch(tokens, inputs["indices"], _experts_in(inputs))[-1]


def _exact_combine(reference: ModuleType, inputs: Inputs) -> Tensor:
    rows, weights = inputs["expert_output"], inputs["weights"]
    return reference.combine(rows, weights, _slot_rows(inputs), compute_dtype=torch.float64)


def _plain_combine(inputs: Inputs) -> Tensor:
    """Products rounded to the dtype, their sum in float32, as Transformers' grouped_mm experts do."""
    rows = inputs["expert_output"][_slot_rows(inputs).long()]
    return (rows * inputs["weights"].unsqueeze(-1)).sum(1)


def _dispatch_of(module: ModuleType, inputs: Inputs) -> Tensor:
    return module.dispatch(inputs["input"], inputs["indices"], _experts_in(inputs))[0]


def _activation(name: str, plain: Callable[[Tensor], Tensor]) -> Operation:
    def run_plain(inputs: Inputs) -> Tensor:
        first, second = inputs["input"].chunk(2, -1)
        return plain(first) * second

    return Operation(
        name,
        _make_activation,
        lambda kernel, inputs: getattr(kernel, name)(inputs["input"]),
        lambda reference, inputs: getattr(reference, name)(inputs["input"], compute_dtype=torch.float64),
        run_plain,
        ("input",),
    )


def _router(renormalize: bool) -> Operation:
    def options(kernel: ModuleType, logits: Tensor):
        return kernel.RoutingOptions(top_k_of(logits), renormalize)

    return Operation(
        "route_renormalized" if renormalize else "route",
        _make_logits,
        lambda kernel, inputs: kernel.route(inputs["logits"], options(kernel, inputs["logits"])).weights,
        lambda reference, inputs: reference.route(
            inputs["logits"], options(load_kernel(), inputs["logits"]), compute_dtype=torch.float64
        )[1],
        lambda inputs: softmax_router(inputs["logits"], top_k_of(inputs["logits"]), renormalize)[1],
        ("logits",),
    )


def _grouped_router() -> Operation:
    def plain(inputs: Inputs) -> Tensor:
        logits = inputs["logits"]
        options = _group_options(load_kernel(), logits)
        indices, _ = load_kernel().reference.route_sigmoid_grouped(logits, None, options)
        return weights_of_selected(logits, indices, "sigmoid", True, options.scale).to(logits.dtype)

    return Operation(
        "route_sigmoid_grouped",
        _make_logits,
        lambda kernel, inputs: (
            kernel.route_sigmoid_grouped(inputs["logits"], None, _group_options(kernel, inputs["logits"])).weights
        ),
        lambda reference, inputs: reference.route_sigmoid_grouped(
            inputs["logits"], None, _group_options(load_kernel(), inputs["logits"]), compute_dtype=torch.float64
        )[1],
        plain,
        ("logits",),
    )


def _selected_router(scoring: str, renormalize: bool, scale: float) -> Operation:
    def options(kernel: ModuleType):
        return kernel.RouterWeightOptions(scoring, renormalize, scale)

    return Operation(
        f"selected_router_{scoring}{'_renormalized' if renormalize else ''}",
        _make_selection,
        lambda kernel, inputs: kernel.selected_router_weights(inputs["logits"], inputs["indices"], options(kernel)),
        lambda reference, inputs: reference.selected_router_weights(
            inputs["logits"], inputs["indices"], options(load_kernel()), compute_dtype=torch.float64
        ),
        lambda inputs: weights_of_selected(inputs["logits"], inputs["indices"], scoring, renormalize, scale),
        ("logits", "indices"),
    )


ROUTERS = (_router(False), _router(True), _grouped_router())
SELECTED_ROUTERS = (
    _selected_router("softmax", False, 1.0),
    _selected_router("softmax", True, 1.0),
    _selected_router("sigmoid", False, 2.5),
    _selected_router("sigmoid", True, 2.5),
)
ACTIVATIONS = (
    _activation("silu_and_mul", F.silu),
    _activation("gelu_and_mul", F.gelu),
    _activation("gelu_tanh_and_mul", lambda tensor: F.gelu(tensor, approximate="tanh")),
)
DISPATCH = Operation(
    "dispatch",
    _make_tokens,
    lambda kernel, inputs: plan_of(kernel, inputs).dispatch(inputs["input"]).values,
    _dispatch_of,
    lambda inputs: _dispatch_of(load_kernel().reference, inputs),
    (),
)
COMBINE = Operation("combine", _make_rows, _run_combine, _exact_combine, _plain_combine, ())
FORWARD_DISPATCHED = Operation(
    "forward_dispatched", _make_dispatched, _run_dispatched, _exact_dispatched, _plain_dispatched, (), strategic=True
)
FORWARD = Operation("forward", _make_layer, _run_layer, _exact_layer, _plain_layer, ("input", "logits"), strategic=True)
FORWARD_FUSED_GATE = replace(FORWARD, id="forward_fused_gate", make=_make_fused_layer)
FORWARD_SIGMOID_GROUPED = Operation(
    "forward_sigmoid_grouped",
    _make_grouped_layer,
    _run_grouped_layer,
    _exact_grouped_layer,
    _plain_grouped_layer,
    ("input", "logits"),
    strategic=True,
)
LAYERS = (FORWARD, FORWARD_FUSED_GATE, FORWARD_SIGMOID_GROUPED)
WITH_EXPERTS = (FORWARD_DISPATCHED, *LAYERS)
CHECKED = (FORWARD, FORWARD_FUSED_GATE)
OPERATIONS = (*ROUTERS, *SELECTED_ROUTERS, *ACTIVATIONS, DISPATCH, COMBINE, *WITH_EXPERTS)


def for_each(*operations: Operation):
    """Parametrises `operation`."""
    return pytest.mark.parametrize("operation", operations, ids=str)


def for_each_of_experts(operations: Iterable[Operation], shapes: Iterable):
    """Parametrises `operation` and `shape`, params that may be marked.

    Only `CHECKED` operations keep the mark simt_checked: the others launch the same kernels.
    """
    cases = []
    for operation, shape in itertools.product(operations, shapes):
        marks = [mark for mark in shape.marks if operation in CHECKED or mark.name != "simt_checked"]
        cases.append(pytest.param(operation, *shape.values, id=f"{shape.id}-{operation}", marks=marks))
    return pytest.mark.parametrize("operation, shape", cases)


def strategy_option(operation: Operation, strategy: str) -> dict[str, str]:
    return {"strategy": strategy} if operation.strategic else {}


def check_forward(kernel: ModuleType, operation: Operation, inputs: Inputs, **options) -> None:
    """The result meets the tolerance rule and is contiguous, and the inputs are as they were."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    output = operation.run(kernel, inputs, **options)
    exact, _ = operation.run_exact(kernel, inputs)
    plain = operation.plain(inputs)
    assert output.dtype == plain.dtype
    assert_close_to_exact(output, exact, plain)
    assert output.is_contiguous()
    assert all(not shares_storage(output, tensor) for tensor in inputs.values())
    for name, tensor in inputs.items():
        assert torch.equal(_bits(tensor), _bits(before[name])), f"{name} was changed"


def check_gradients(kernel: ModuleType, operation: Operation, inputs: Inputs, **options) -> None:
    """The gradients of the inputs that require one meet the tolerance rule and have their input's dtype."""
    output = operation.run(kernel, inputs, **options)
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    exact_output, leaves = operation.run_exact(kernel, inputs)
    exact = gradients(exact_output, leaves, grad.cpu().double())
    plain = gradients(operation.plain(inputs), inputs, grad)
    for name, gradient in found.items():
        assert gradient.dtype == inputs[name].dtype, name
        assert_close_to_exact(gradient, exact[name], plain[name])


def gradients(output: Tensor, inputs: Inputs, grad: Tensor) -> Inputs:
    """The gradients of the inputs that require one, by name."""
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(output, tuple(wanted.values()), grad), strict=True))


def random_gradient(output: Tensor, seed: int = 101) -> Tensor:
    return normal(output.shape, output.dtype, device=output.device.type, seed=seed)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0 and b.numel() > 0


def _bits(tensor: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])
