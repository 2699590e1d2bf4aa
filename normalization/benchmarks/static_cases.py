"""The cases that `./dev perf-static` traces: every operator on a row for each path that its launchers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 4

ROW_BYTES = {
    "warp row": 1 << 10,
    "block row": 8 << 10,
    "wide block row": 32 << 10,
    "longer than held": 48 << 10,
}
SCALAR_WIDTH = 1027
RAGGED_WIDTH = 1032
"""Whole vectors, but not the same number of them for every thread."""

# Arguments of the shapes [rows, width] and [width], and results of the shape [rows, width].
OPERATORS = {
    "rms_norm": (1, 1, 1),
    "rms_norm_gated": (2, 1, 1),
    "fused_add_rms_norm": (2, 1, 2),
    "layer_norm": (1, 2, 1),
    "fused_add_layer_norm": (2, 2, 2),
    "softmax_last_axis": (1, 0, 1),
}


def cases(kernel: ModuleType) -> Iterator[tuple[str, Callable[[], object]]]:
    """Generates names and calls; what a backward needs from its forward has been computed before the call."""
    for name in OPERATORS:
        for dtype in DTYPES:
            widths = {path: size // dtype.itemsize for path, size in ROW_BYTES.items()}
            widths |= {"ragged": RAGGED_WIDTH, "scalar": SCALAR_WIDTH}
            for path, width in widths.items():
                yield from _forward_and_backward(kernel, name, width, dtype, dtype, path)
        if OPERATORS[name][1]:
            width = ROW_BYTES["block row"] // torch.bfloat16.itemsize
            path = "block row, float32 parameters"
            yield from _forward_and_backward(kernel, name, width, torch.bfloat16, torch.float32, path)


def _forward_and_backward(
    kernel: ModuleType, name: str, width: int, dtype: torch.dtype, parameter_dtype: torch.dtype, path: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    rows, parameters, results = OPERATORS[name]
    function = getattr(kernel, name)
    tensors = [torch.randn(ROWS, width).to(dtype) for _ in range(rows)]
    tensors += [torch.randn(width).to(parameter_dtype) for _ in range(parameters)]
    case = f"{name} {str(dtype).removeprefix('torch.')}, {path}"
    yield f"{case}, forward", lambda: function(*tensors)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    outputs = outputs if results > 1 else (outputs,)
    yield f"{case}, backward", lambda: torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
