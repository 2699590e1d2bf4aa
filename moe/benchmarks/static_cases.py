"""The cases that `./dev perf-static` traces: every operator, with shapes for each path that its launchers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, EXPERTS, TOP_K = 40, 2, 2
HIDDEN, INTERMEDIATE = 128, 64
RAGGED = (33, 17)
"""Hidden and intermediate size that vectors of 16 bytes do not divide."""

Case = tuple[str, Callable[[], object]]


def cases(kernel: ModuleType) -> Iterator[Case]:
    """Generates names and calls; what a backward needs from its forward has been computed before the call."""
    yield from router_cases(kernel)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield from activation_cases(kernel, name, dtype)
        yield from row_cases(kernel, name, dtype)
        plan = kernel.experts_plan(dtype, "cpu")
        for strategy in dict.fromkeys((plan.strategy, kernel.GroupedStrategy.SCALAR)):
            for sizes, path in (((HIDDEN, INTERMEDIATE), "vectors"), (RAGGED, "ragged")):
                yield from expert_cases(kernel, f"{name} {strategy.value}, {path}", dtype, sizes, strategy)


def router_cases(kernel: ModuleType) -> Iterator[Case]:
    """Generates the routers on rows that a warp holds once and several times."""
    for experts in (32, 256):
        logits = torch.randn(TOKENS, experts)
        yield f"route of {experts}", lambda logits=logits: kernel.route(logits, kernel.RoutingOptions(8, True))
        options = kernel.GroupRoutingOptions(8, 8, 4, True, True)
        yield (
            f"route_sigmoid_grouped of {experts}",
            lambda logits=logits, options=options: kernel.route_sigmoid_grouped(logits, None, options),
        )
        indices = logits.topk(8).indices.int()
        grad = torch.randn(TOKENS, 8)
        weights = kernel.RouterWeightOptions("softmax", True)
        yield (
            f"selected_router_weights of {experts}",
            lambda logits=logits, indices=indices, weights=weights: kernel.selected_router_weights(
                logits, indices, weights
            ),
        )
        yield (
            f"selected_router_backward of {experts}",
            lambda logits=logits, indices=indices, grad=grad, weights=weights: kernel.selected_router_backward(
                logits, indices, grad, weights
            ),
        )


def activation_cases(kernel: ModuleType, name: str, dtype: torch.dtype) -> Iterator[Case]:
    """Generates a gated activation; the others differ in arithmetic only."""
    for width, path in ((512, "vectors"), (513, "elements")):
        input = torch.randn(4, 2 * width).to(dtype)
        yield f"silu_and_mul {name}, {path}, forward", lambda input=input: kernel.silu_and_mul(input)
        leaf = input.clone().requires_grad_()
        output = kernel.silu_and_mul(leaf)
        yield f"silu_and_mul {name}, {path}, backward", backward(output, leaf)


def row_cases(kernel: ModuleType, name: str, dtype: torch.dtype) -> Iterator[Case]:
    """Generates dispatch and combine."""
    for hidden, path in ((HIDDEN, "vectors"), (RAGGED[0], "elements")):
        input = torch.randn(TOKENS, hidden).to(dtype).requires_grad_()
        plan = make_plan(kernel, dtype)
        dispatched = plan.dispatch(input)
        yield f"dispatch {name}, {path}, forward", lambda plan=plan, input=input: plan.dispatch(input.detach())
        yield f"dispatch {name}, {path}, backward", backward(dispatched.values, input)
        rows = dispatched.values.detach()
        yield f"combine {name}, {path}, forward", lambda dispatched=dispatched, rows=rows: dispatched.combine(rows)
        grad = torch.ones_like(input.detach())
        for strategy in kernel.CombineGradientStrategy:
            yield (
                f"combine {name}, {path}, backward, {strategy.value}",
                lambda dispatched=dispatched, rows=rows, grad=grad, strategy=strategy: (
                    dispatched.combine_backward_with_strategy(rows, grad, strategy)
                ),
            )


def expert_cases(
    kernel: ModuleType, name: str, dtype: torch.dtype, sizes: tuple[int, int], strategy: str
) -> Iterator[Case]:
    """Generates the experts on dispatched rows, forward and backward, and the layer from input to output."""
    hidden, intermediate = sizes
    gate, up = (torch.randn(EXPERTS, intermediate, hidden).to(dtype) for _ in range(2))
    experts = kernel.SwiGluExperts(gate, up, torch.randn(EXPERTS, hidden, intermediate).to(dtype))
    input = torch.randn(TOKENS, hidden).to(dtype)
    dispatched = make_plan(kernel, dtype).dispatch(input)
    training = experts.forward_dispatched_training(dispatched, strategy)
    grad = torch.ones_like(training.output)
    logits, options = torch.randn(TOKENS, EXPERTS), kernel.RoutingOptions(TOP_K)
    yield f"experts {name}, forward", lambda: experts.forward_dispatched(dispatched, strategy)
    yield f"experts {name}, training", lambda: experts.forward_dispatched_training(dispatched, strategy)
    yield f"experts {name}, backward", lambda: training.cache.backward_with_strategy(grad, strategy)
    yield f"fused_experts {name}", lambda: experts.forward(input, logits, options, strategy)


def make_plan(kernel: ModuleType, dtype: torch.dtype) -> object:
    """Returns a plan that sends each token to every expert, in an order of its own."""
    indices = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K].int()
    return kernel.RoutingPlan(indices, torch.rand(TOKENS, TOP_K).to(dtype), EXPERTS)


def backward(output: Tensor, leaf: Tensor) -> Callable[[], object]:
    """Returns the call of a backward, which may be run again."""
    return lambda: torch.autograd.grad(output, leaf, torch.ones_like(output), retain_graph=True)
