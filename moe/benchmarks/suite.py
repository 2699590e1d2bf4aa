"""The cases of `./dev bench moe`: the experts of models from one token to two thousand, forward and in training.

The peers compute with the same module: eager, expert by expert, Transformers' batched_mm, and its default, grouped_mm,
as it is and through torch.compile. Every call makes fresh outputs, the kernel's as its peers', and no gradient is
wanted where only the forward is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devtools.benchmarking import Case

try:
    from transformers.integrations.moe import (
        _default_apply_gate,
        batched_mm_experts_forward,
        grouped_mm_experts_forward,
    )
except ImportError:  # peers where it is installed
    _default_apply_gate = batched_mm_experts_forward = grouped_mm_experts_forward = None

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOKENS = (1, 16, 128, 512, 2048)
TRAINING_TOKENS = 512
CHECKED_TOKENS = 16
"""Results of so many tokens are compared with float64; tokens do not depend on each other."""
CHECKED_EXPERTS = 8
"""The gradients of so many experts' weights are compared with float64; experts do not depend on each other."""
EAGER_TRAINING_EXPERTS = 8
"""Eager writes a gradient as large as all weights for each expert: with more experts a step takes seconds to minutes,
and the memory that it leaves behind slows what comes next."""
BATCHED_TOKENS = 16
"""batched_mm copies an expert's weights for each choice of each token: with more tokens that takes gigabytes."""

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """The sizes of one layer's experts."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def weights_of(self, experts: int) -> int:
        """Returns how many elements the weights of so many experts have."""
        return experts * 3 * self.hidden * self.intermediate


MODEL = Model("a small model", 32, 4, 1024, 512)
MODELS = (
    Model("Mixtral 8x7B / 4", 8, 2, 1024, 3584),
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Model("DeepSeek-V3 / 4", 256, 8, 1792, 512),
)
"""With `/ 4`, hidden and intermediate size are a fourth of the model's, so that the weights fit."""


class Experts(nn.Module):
    """A module as Transformers' implementations of experts read it."""

    _apply_gate = _default_apply_gate

    def __init__(self, model: Model, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.empty(shape, dtype=dtype, device=device)
            return nn.Parameter(values.normal_(std=shape[-1] ** -0.5, generator=generator))

        self.gate_up_proj = weight(model.experts, 2 * model.intermediate, model.hidden)
        self.down_proj = weight(model.experts, model.hidden, model.intermediate)
        self.act_fn = nn.SiLU()
        self.num_experts = model.experts
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed, self.is_concatenated, self._is_expert_parallel = False, True, False


def cases(kernel: ModuleType, quick: bool, device: str) -> Iterator[Case]:
    """Generates the cases on a device, those of one set of weights one after the other."""
    for dtype in (BF16, F32):
        module = Experts(MODEL, dtype, device)
        for tokens in TOKENS:
            yield forward_case(kernel, MODEL, module, tokens, compiled=not quick and dtype is BF16)
        yield forward_case(kernel, MODEL, module, TRAINING_TOKENS, skewed=True)
        yield training_case(kernel, MODEL, module, TRAINING_TOKENS)
    yield from router_cases(kernel, device)
    if quick:
        return
    module = Experts(MODEL, F16, device)
    for tokens in (1, TRAINING_TOKENS):
        yield forward_case(kernel, MODEL, module, tokens)
    yield from strategy_cases(kernel, device)
    for model in MODELS:
        module = Experts(model, BF16, device)
        for tokens, skewed in itertools.product(TOKENS, (False, True)):
            if tokens > 1 or not skewed:
                yield forward_case(kernel, model, module, tokens, skewed=skewed)
        yield training_case(kernel, model, module, TRAINING_TOKENS // 4)
    yield from activation_cases(kernel, device)


def make_inputs(model: Model, tokens: int, dtype: torch.dtype, device: str, skewed: bool) -> Inputs:
    """Returns input `[T, H]`, int64 indices and weights `[T, k]`; skewed, the n-th expert is chosen as 1 / n."""
    generator = torch.Generator().manual_seed(tokens)
    popularity = -torch.log(torch.arange(1.0, model.experts + 1)) if skewed else torch.zeros(model.experts)
    noise = -torch.log(-torch.log(torch.rand(tokens, model.experts, generator=generator)))
    scores, indices = (popularity + noise).topk(model.top_k, -1)
    input = torch.randn(tokens, model.hidden, generator=generator)
    return input.to(device, dtype), indices.to(device), scores.softmax(-1).to(device, dtype)


def forward_case(
    kernel: ModuleType,
    model: Model,
    module: Experts,
    tokens: int,
    *,
    skewed: bool = False,
    compiled: bool = False,
    strategy: str | None = None,
) -> Case:
    """Returns the case of a call without gradients."""
    dtype, device = module.down_proj.dtype, module.down_proj.device.type
    inputs = make_inputs(model, tokens, dtype, device, skewed)
    ours = ours_with(kernel, module, strategy)
    peers = {"eager": partial(eager_experts, module)}
    if grouped_mm_experts_forward is not None:
        peers["grouped_mm"] = partial(grouped_mm_experts_forward, module)
        if tokens <= BATCHED_TOKENS:
            peers["batched_mm"] = partial(batched_mm_experts_forward, module)
        if compiled:
            peers["torch.compile"] = partial(compiled_grouped_mm(), module)
    if strategy is not None:
        peers = {"auto": ours_with(kernel, module, "auto")}
    used = len(inputs[1].unique())
    return Case(
        op=f"experts of {model.name}" if strategy is None else f"experts, {strategy}",
        shape=title(model, tokens, skewed),
        dtype=dtype,
        device=device,
        threads=2,
        ours=without_gradients(lambda: ours(*inputs)),
        peers={name: without_gradients(lambda call=call: call(*inputs)) for name, call in peers.items()},
        check=lambda: forward_is_right(kernel, ours, module, inputs),
        bytes=(model.weights_of(used) + 2 * inputs[0].numel()) * dtype.itemsize,
        flops=2 * inputs[1].numel() * model.weights_of(1),
    )


def training_case(kernel: ModuleType, model: Model, module: Experts, tokens: int) -> Case:
    """Returns the case of a call and the gradients of input, routing weights and expert weights."""
    dtype, device = module.down_proj.dtype, module.down_proj.device.type
    inputs = make_inputs(model, tokens, dtype, device, False)
    grad = torch.randn_like(inputs[0])

    def step(call: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: gradients(call, module, inputs, grad)

    peers = {"eager": step(eager_experts)} if model.experts <= EAGER_TRAINING_EXPERTS else {}
    if grouped_mm_experts_forward is not None:
        peers["grouped_mm"] = step(grouped_mm_experts_forward)
    used = len(inputs[1].unique())
    weights = model.weights_of(used) + model.weights_of(used) + model.weights_of(model.experts)
    return Case(
        op=f"experts of {model.name}",
        shape=title(model, tokens, False),
        dtype=dtype,
        direction="forward+backward",
        device=device,
        threads=2,
        ours=step(kernel.experts_forward),
        peers=peers,
        check=lambda: gradients_are_right(kernel, module, inputs, grad),
        bytes=(weights + 4 * inputs[0].numel()) * dtype.itemsize,
        flops=3 * 2 * inputs[1].numel() * model.weights_of(1),
    )


def strategy_cases(kernel: ModuleType, device: str) -> Iterator[Case]:
    """Generates the forward with each strategy that the hardware has, beside the one that `auto` takes."""
    module = Experts(MODEL, BF16, device)
    chosen = kernel.experts_plan(BF16, device)
    for strategy in (chosen.strategy, *(each for each in chosen.reasons if chosen.strategy != "scalar")):
        for tokens in (1, TRAINING_TOKENS):
            yield forward_case(kernel, MODEL, module, tokens, strategy=strategy.value)


def router_cases(kernel: ModuleType, device: str) -> Iterator[Case]:
    """Generates the routers, beside the models' own lines in PyTorch."""
    for tokens in (1, 2048):
        generator = torch.Generator().manual_seed(tokens)
        logits = torch.randn(tokens, 128, generator=generator).to(device)
        options = kernel.RoutingOptions(8, True)
        yield Case(
            op="route",
            shape=f"{tokens} x 128, top 8",
            dtype=F32,
            device=device,
            threads=2,
            ours=lambda logits=logits, options=options: kernel.route(logits, options),
            peers={"PyTorch": lambda logits=logits: softmax_router(logits, 8)},
            check=lambda logits=logits, options=options: same_choice(
                kernel.route(logits, options), *softmax_router(logits, 8)
            ),
            bytes=logits.nbytes,
        )
        logits = torch.randn(tokens, 256, generator=generator).to(device)
        bias = torch.randn(256, generator=generator).to(device) / 8
        grouped = kernel.GroupRoutingOptions(8, 8, 4, True, True, 2.5)
        yield Case(
            op="route_sigmoid_grouped",
            shape=f"{tokens} x 256, top 8 of 4 groups of 8",
            dtype=F32,
            device=device,
            threads=2,
            ours=lambda logits=logits, bias=bias, grouped=grouped: kernel.route_sigmoid_grouped(logits, bias, grouped),
            peers={"PyTorch": lambda logits=logits, bias=bias: grouped_router(logits, bias, 8, 8, 4, 2.5)},
            check=lambda logits=logits, bias=bias, grouped=grouped: same_choice(
                kernel.route_sigmoid_grouped(logits, bias, grouped), *grouped_router(logits, bias, 8, 8, 4, 2.5)
            ),
            bytes=logits.nbytes,
        )


def activation_cases(kernel: ModuleType, device: str) -> Iterator[Case]:
    """Generates the gated activations."""
    plain = {
        "silu_and_mul": F.silu,
        "gelu_and_mul": F.gelu,
        "gelu_tanh_and_mul": lambda tensor: F.gelu(tensor, approximate="tanh"),
    }
    for (name, activation), dtype in itertools.product(plain.items(), (BF16, F32)):
        input = torch.randn(2048, 8192, device=device).to(dtype)
        function, definition = getattr(kernel, name), getattr(kernel.reference, name)

        def run_plain(activation: Callable[[Tensor], Tensor] = activation, input: Tensor = input) -> Tensor:
            first, second = input.chunk(2, -1)
            return activation(first) * second

        yield Case(
            op=name,
            shape="2048 x 2 x 4096",
            dtype=dtype,
            device=device,
            threads=2,
            ours=lambda function=function, input=input: function(input),
            peers={"PyTorch": run_plain},
            check=lambda function=function, definition=definition, input=input, run_plain=run_plain: is_close(
                function(input), definition(input, compute_dtype=torch.float64), run_plain()
            ),
            bytes=input.nbytes // 2 * 3,
        )


def title(model: Model, tokens: int, skewed: bool) -> str:
    """Returns what the table calls a shape."""
    sizes = f"top {model.top_k} of {model.experts}, {model.hidden} x {model.intermediate}"
    return f"T={tokens}{' skewed' if skewed else ''}: {sizes}"


def ours_with(kernel: ModuleType, module: Experts, strategy: str | None) -> Callable[..., Tensor]:
    """Returns the kernel's call: of the interface to Transformers, or with a strategy by hand."""
    if strategy is None:
        return lambda *inputs: kernel.experts_forward(module, *inputs)
    experts = kernel.SwiGluExperts(module.gate_up_proj, None, module.down_proj)

    def run(input: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        dispatched = kernel.RoutingPlan(indices, weights, module.num_experts).dispatch(input)
        return dispatched.combine(experts.forward_dispatched(dispatched, strategy))

    return run


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a call in inference mode."""
    return torch.inference_mode()(call)


def eager_experts(module: nn.Module, input: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Runs expert by expert, as Transformers' models do by themselves."""
    output = torch.zeros_like(input)
    for expert in indices[indices < module.num_experts].unique().tolist():
        token, choice = torch.where(indices == expert)
        gate, up = F.linear(input[token], module.gate_up_proj[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, module.down_proj[expert]) * weights[token, choice, None]
        output = output.index_add(0, token, rows.to(output.dtype))
    return output


@cache
def compiled_grouped_mm() -> Callable[..., Tensor]:
    """Returns Transformers' grouped_mm experts, compiled for any number of tokens."""
    return torch.compile(grouped_mm_experts_forward, dynamic=True)


def softmax_router(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Qwen3-MoE's router after the projection."""
    weights, indices = torch.softmax(logits, -1, dtype=F32).topk(top_k, -1)
    return indices, weights / weights.sum(-1, keepdim=True)


def grouped_router(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, selected_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's router after the projection."""
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(1, (groups, -1))
    kept = grouped.topk(2, -1).values.sum(-1).topk(selected_groups, -1).indices
    dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, False)
    indices = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1).topk(top_k, -1).indices
    weights = scores.gather(1, indices)
    return indices, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def same_choice(plan, indices: Tensor, weights: Tensor) -> bool:
    """Tells whether a plan agrees with another router, choices that are nearly equal aside."""
    same = (plan.expert_indices == indices).all(-1)
    close = torch.allclose(plan.weights[same], weights[same], rtol=1e-5, atol=1e-7)
    return close and same.float().mean().item() > 0.99


def forward_is_right(kernel: ModuleType, ours: Callable[..., Tensor], module: Experts, inputs: Inputs) -> bool:
    """Tells whether some tokens, of a call with all, lose at most twice what the eager experts lose."""
    with torch.inference_mode():
        output = ours(*inputs)
        step = max(1, len(output) // CHECKED_TOKENS)
        some = tuple(tensor[::step] for tensor in inputs)
        part = SomeExperts(module, some[1].unique(), torch.float64)
        return is_close(output[::step], mixture(kernel, part, *part.inputs(*some)), eager_experts(module, *some))


def mixture(kernel: ModuleType, module: nn.Module, input: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Returns the definition's result in float64."""
    matrices = module.gate_up_proj, None, module.down_proj
    return kernel.reference.mixture(input, indices, weights, *matrices, compute_dtype=torch.float64)


def gradients(
    call: Callable[..., Tensor], module: nn.Module, inputs: Inputs, grad: Tensor, *, learned: bool = True
) -> tuple[Tensor, ...]:
    """Returns the gradients of input and routing weights, and those of the experts' weights if they are learned."""
    input, indices, weights = inputs
    leaves = [input.detach().requires_grad_(), weights.detach().requires_grad_()]
    if learned:
        leaves += [module.gate_up_proj, module.down_proj]
    output = call(module, leaves[0], indices, leaves[1])
    return torch.autograd.grad(output, leaves, grad.to(output.dtype))


def gradients_are_right(kernel: ModuleType, module: Experts, inputs: Inputs, grad: Tensor) -> bool:
    """Tells whether gradients, of a call with all, lose at most twice what the eager experts' lose.

    Compared are those of input and routing weights for some tokens, and those of some experts' weights.
    """

    def close(found: tuple[Tensor, ...], experts: Tensor, inputs: Inputs, grad: Tensor, learned: bool) -> bool:
        """Compares with gradients through some experts only: the last of them."""
        exact, plain = (
            gradients(call, part, part.inputs(*inputs), grad, learned=learned)[-len(found) :]
            for call, part in (
                (partial(mixture, kernel), SomeExperts(module, experts, torch.float64)),
                (eager_experts, SomeExperts(module, experts, grad.dtype)),
            )
        )
        return all(is_close(*triple) for triple in zip(found, exact, plain, strict=True))

    of_input, of_weights, of_gate_up, of_down = gradients(kernel.experts_forward, module, inputs, grad)
    step = max(1, len(grad) // CHECKED_TOKENS)
    tokens = tuple(tensor[::step] for tensor in inputs)
    experts = inputs[1].unique()[:CHECKED_EXPERTS]
    return close((of_input[::step], of_weights[::step]), tokens[1].unique(), tokens, grad[::step], False) and close(
        (of_gate_up[experts], of_down[experts]), experts, inputs, grad, True
    )


class SomeExperts(nn.Module):
    """Copies of some experts' weights; a choice of another expert goes to none."""

    def __init__(self, module: Experts, experts: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[experts].to(dtype))
        self.down_proj = nn.Parameter(module.down_proj.detach()[experts].to(dtype))
        self.num_experts = len(experts)

    def inputs(self, input: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
        """Returns a call's inputs for these experts, in their dtype."""
        position = torch.searchsorted(self.experts, indices.contiguous()).clamp(max=self.num_experts - 1)
        own = torch.where(self.experts[position] == indices, position, self.num_experts)
        dtype = self.down_proj.dtype
        return input.to(dtype), own, weights.to(dtype)


def is_close(ours: Tensor, exact: Tensor, plain: Tensor) -> bool:
    """Tells whether a result loses at most twice what PyTorch's own loses against float64."""
    floor = 2 * torch.finfo(ours.dtype).eps * exact.abs().max()
    allowed = 2 * (plain - exact).abs().max() + floor
    return bool((ours - exact).abs().max() <= allowed)
