"""softmax_last_axis."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _rows
from ._autograd import Gradients, below_autograd, needs_autograd, register_gradient
from ._ops import add_op_namespace_prefix, ops

_softmax_last_axis_op = ops.softmax_last_axis.default


def softmax_last_axis(input: torch.Tensor) -> torch.Tensor:
    """Returns the softmax over the last axis.

    `exp(input - max) / sum(exp(input - max))`, in float32 arithmetic, rounded once. A row with NaN or +inf, or with
    only -inf, gives NaN, as PyTorch's softmax does.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.

    Returns:
        A contiguous tensor of the input's shape and dtype. Differentiable once.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: `torch.softmax`, whose results this gives.
    """
    if is_dynamo_compiling():
        _rows.check_rows("softmax_last_axis", input)
        return _softmax_last_axis_op(input)
    try:
        if needs_autograd(input):
            return _softmax_last_axis_op(input)
        with below_autograd():
            return _softmax_last_axis_op(input)
    except _rows.REFUSALS:
        _rows.check_rows("softmax_last_axis", input)
        raise


def _setup_softmax_last_axis(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward_softmax_last_axis(ctx: Any, grad: torch.Tensor) -> Gradients:
    (output,) = ctx.saved_tensors
    return (ops.softmax_last_axis_backward(grad, output),)


register_gradient(_softmax_last_axis_op, _setup_softmax_last_axis, _backward_softmax_last_axis)


@torch.library.register_fake(add_op_namespace_prefix("softmax_last_axis"))
def _(input: torch.Tensor) -> torch.Tensor:
    _rows.check_rows("softmax_last_axis", input)
    return _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("softmax_last_axis_backward"))
def _(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _rows.fake_like(output, grad)
