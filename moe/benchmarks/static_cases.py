"""The cases that `./dev perf-static` traces: every op on a shape for each path that its launchers know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

Case = tuple[str, Callable[[], object]]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
TENSOR_CORE_KERNELS = "TensorCoreTile"
INSTRUCTIONS = {TENSOR_CORE_KERNELS: ("mma.sync", "cp.async.cg.shared.global")}
"""What must be in the PTX of kernels whose names hold the key; `cp.async.cg` copies 16 bytes."""

EXPERTS, TOP_K = 2, 2
HIDDEN, INTERMEDIATE = 256, 192
RAGGED_HIDDEN, RAGGED_INTERMEDIATE = 251, 187
ROWS_AN_EXPERT = {"narrow tile": 32, "wide tile": 160}

ROUTER_EXPERTS = {"few experts": 64, "experts held by lanes": 256, "many experts": 1024, "experts read again": 2048}
MOST_GROUPED_EXPERTS = 1024
WIDTHS = {"vectors": 1024, "elements": 1027}


def cases(kernel: ModuleType) -> Iterator[Case]:
    """Generates names and calls; what a backward needs from its forward has been computed before the call."""
    ops = kernel._dispatch.ops
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for path, experts in ROUTER_EXPERTS.items():
            yield from _routers(ops, f"{name}, {path}", dtype, experts)
        for path, width in WIDTHS.items():
            yield from _moves(ops, f"{name}, {path}", dtype, width)
        for strategy in ("scalar", "tensor_core") if dtype != F32 else ("scalar",):
            yield from _products(ops, f"{name} {strategy}", dtype, strategy == "tensor_core")


def _routers(ops: ModuleType, name: str, dtype: torch.dtype, experts: int) -> Iterator[Case]:
    logits = torch.randn(4, experts).to(dtype)
    indices = logits.float().topk(8).indices
    grad = torch.randn(4, 8)
    options = ("softmax", True, 1.0)
    yield f"route {name}", lambda: ops.route(logits, 8, True)
    yield f"selected_router {name}, forward", lambda: ops.selected_router_weights(logits, indices, *options)
    yield f"selected_router {name}, backward", lambda: ops.selected_router_backward(logits, indices, grad, *options)
    if experts <= MOST_GROUPED_EXPERTS:
        bias = torch.randn(experts)
        grouped = (8, 8, 4, True, True, 1.0)
        yield f"route_sigmoid_grouped {name}", lambda: ops.route_sigmoid_grouped(logits, bias, *grouped)


def _moves(ops: ModuleType, name: str, dtype: torch.dtype, width: int) -> Iterator[Case]:
    tokens = torch.randn(8, width).to(dtype)
    indices = torch.randint(EXPERTS, (8, TOP_K))
    weights = torch.rand(8, TOP_K)
    values, _, _, _, row_slots, slot_rows = ops.dispatch(tokens, indices, EXPERTS)
    yield f"dispatch {name}, forward", lambda: ops.dispatch(tokens, indices, EXPERTS)
    yield f"dispatch {name}, backward", lambda: ops.dispatch_backward(values, slot_rows)
    yield f"combine {name}, forward", lambda: ops.combine(values, weights, slot_rows)
    maps = row_slots, slot_rows
    for plane, strategy in enumerate(("serial", "plane")):
        yield (
            f"combine {name}, backward, {strategy}",
            lambda plane=bool(plane): ops.combine_backward(tokens, values, weights, *maps, plane, True, True),
        )
    both = torch.randn(8, 2 * width).to(dtype)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield (
            f"gated_activation {name}, {activation}, forward",
            lambda activation=activation: ops.gated_activation(both, activation),
        )
        yield (
            f"gated_activation {name}, {activation}, backward",
            lambda activation=activation: ops.gated_activation_backward(tokens, both, activation),
        )


def _products(ops: ModuleType, name: str, dtype: torch.dtype, tensor_core: bool) -> Iterator[Case]:
    sizes = {"vectors": (HIDDEN, INTERMEDIATE), "elements": (RAGGED_HIDDEN, RAGGED_INTERMEDIATE)}
    rows_an_expert = ROWS_AN_EXPERT if tensor_core else {"tile": 64}
    for (tile, rows), (path, (hidden, intermediate)) in itertools.product(rows_an_expert.items(), sizes.items()):
        yield from _experts(ops, f"{name}, {tile}, {path}", dtype, tensor_core, rows, hidden, intermediate)


def _experts(
    ops: ModuleType, name: str, dtype: torch.dtype, tensor_core: bool, rows: int, hidden: int, intermediate: int
) -> Iterator[Case]:
    values, grad = (torch.randn(EXPERTS * rows, hidden).to(dtype) for _ in range(2))
    offsets = torch.arange(0, EXPERTS * rows + 1, rows, dtype=torch.int32)
    weights: list[Tensor] = [torch.randn(EXPERTS, intermediate, hidden).to(dtype) for _ in range(2)]
    weights.append(torch.randn(EXPERTS, hidden, intermediate).to(dtype))
    arguments = (values, offsets, *weights)
    yield f"experts {name}, forward", lambda: ops.experts_training(*arguments, tensor_core)
    _, *projections = ops.experts_training(*arguments, tensor_core)
    yield (
        f"experts {name}, backward",
        lambda: ops.experts_backward(grad, *arguments, *projections, tensor_core, True, True, True, True, True),
    )
