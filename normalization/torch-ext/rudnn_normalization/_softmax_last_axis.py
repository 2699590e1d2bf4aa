"""softmax_last_axis."""

from __future__ import annotations

from typing import Any

import torch

from . import _rows
from ._autograd import Gradients, first_order_only, needs_autograd
from ._ops import add_op_namespace_prefix, ops

_softmax_op = ops.softmax_last_axis.default
_softmax_backward_op = ops.softmax_last_axis_backward.default


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
    _rows.check_rows("softmax_last_axis", input)
    if needs_autograd(input):
        return _SoftmaxLastAxis.apply(input)
    return _softmax_op(input)


class _SoftmaxLastAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        output = _softmax_op(input)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        (output,) = ctx.saved_tensors
        return (_softmax_backward_op(grad, output),)


@torch.library.register_fake(add_op_namespace_prefix("softmax_last_axis"))
def _(input: torch.Tensor) -> torch.Tensor:
    return _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("softmax_last_axis_backward"))
def _(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _rows.fake_like(output, grad)
