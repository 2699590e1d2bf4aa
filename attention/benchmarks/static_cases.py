"""The cases that `./dev perf-static` traces: each op on a shape for each path that its launchers know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

Case = tuple[str, Callable[[], object]]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
ACCELERATED_KERNELS = "TensorCoreMachine"
INSTRUCTIONS = {ACCELERATED_KERNELS: ("mma.sync", "cp.async.cg.shared.global")}
"""What must be in the PTX of kernels whose names hold the key; `cp.async.cg` copies 16 bytes."""

HEADS, KEY_HEADS = 2, 1
ROWS = {"many rows": 64, "few rows": 4}
KEYS = 128
SPLIT_KEYS = 320
"""More than a block of few rows goes through."""
HEAD_DIMS = {"head_dim 64": 64, "head_dim 128": 128, "elements": 51}
WIDE_HEAD_DIM = 320
"""Of which the tensor cores' blocks have few stationary rows."""


def cases(kernel: ModuleType) -> Iterator[Case]:
    """Generates names and calls; what a backward needs from its forward has been computed before the call."""
    ops = kernel._ops.ops
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for accelerated in (False, True) if dtype != F32 else (False,):
            strategy = "flash_accelerated" if accelerated else "flash_unit"
            for (rows, queries), (dims, head_dim) in itertools.product(ROWS.items(), HEAD_DIMS.items()):
                where = f"{name} {strategy}, {rows}, {dims}"
                keys = SPLIT_KEYS if rows == "few rows" else KEYS
                yield from _attention(ops, where, dtype, accelerated, queries, keys, head_dim)
        if dtype != F32:
            yield from _attention(ops, f"{name} {strategy}, wide heads", dtype, True, 64, KEYS, WIDE_HEAD_DIM)


def _attention(
    ops: ModuleType, name: str, dtype: torch.dtype, accelerated: bool, queries: int, keys: int, head_dim: int
) -> Iterator[Case]:
    query, grad = (torch.randn(1, HEADS, queries, head_dim).to(dtype) for _ in range(2))
    key, value = (torch.randn(1, KEY_HEADS, keys, head_dim).to(dtype) for _ in range(2))
    bias = torch.randn(1, HEADS, queries, keys).to(dtype)
    sinks = torch.randn(HEADS)
    options = (0.1, 0.0, False, -1, -1, accelerated)
    for kind, addends in (("plain", (None, None, None)), ("bias and sinks", (None, bias, sinks))):
        tensors = (query, key, value, *addends)
        yield f"attention {name}, {kind}, forward", lambda tensors=tensors: ops.attention(*tensors, *options)
        results = ops.attention(*tensors, *options)
        needed = (True, True, True, kind != "plain", kind != "plain")
        yield (
            f"attention {name}, {kind}, backward",
            lambda tensors=tensors, results=results, needed=needed: ops.attention_backward(
                grad, *tensors, *results, *options, *needed
            ),
        )
