"""silu_and_mul, gelu_and_mul and gelu_tanh_and_mul."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, call, register_gradient, register_last_derivative
from ._errors import REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops

_gated_activation_op = ops.gated_activation.default
_gated_activation_backward_op = ops.gated_activation_backward.default


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Returns `silu(a) * b` for the halves a, b of the last axis.

    In float32 arithmetic, rounded once.

    Args:
        input: `[..., 2 d]`, float32, float16 or bfloat16, any strides, d >= 1.

    Returns:
        A contiguous tensor `[..., d]` of the input's dtype. Differentiable once.

    Raises:
        MoeError: for an input that is not as described.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    return _and_mul("silu_and_mul", input, "silu")


def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Returns `gelu(a) * b` for the halves a, b of the last axis, with the error function.

    In float32 arithmetic, rounded once.

    Args:
        input: `[..., 2 d]`, float32, float16 or bfloat16, any strides, d >= 1.

    Returns:
        A contiguous tensor `[..., d]` of the input's dtype. Differentiable once.

    Raises:
        MoeError: for an input that is not as described.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (GEGLU).
    """
    return _and_mul("gelu_and_mul", input, "gelu")


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Returns `gelu(a) * b` for the halves a, b of the last axis, with the tanh approximation.

    In float32 arithmetic, rounded once.

    Args:
        input: `[..., 2 d]`, float32, float16 or bfloat16, any strides, d >= 1.

    Returns:
        A contiguous tensor `[..., d]` of the input's dtype. Differentiable once.

    Raises:
        MoeError: for an input that is not as described.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, for the approximation.
    """
    return _and_mul("gelu_tanh_and_mul", input, "gelu_tanh")


def _and_mul(function: str, input: torch.Tensor, activation: str) -> torch.Tensor:
    if is_dynamo_compiling():
        _check_halves(function, input)
    try:
        return call(_gated_activation_op, (input, activation), input)
    except REFUSALS:
        _check_halves(function, input)
        raise


def _check_halves(function: str, input: object) -> torch.Tensor:
    check = MoeChecks(function)
    tensor = check.float_tensor("input", input)
    if tensor.dim() == 0 or tensor.shape[-1] < 2 or tensor.shape[-1] % 2 != 0:
        check.fail("input", "have a last axis of even length >= 2", tensor)
    return tensor


def _setup_gated_activation(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, ctx.activation = inputs
    ctx.save_for_backward(input)


def _backward_gated_activation(ctx: Any, grad: torch.Tensor) -> Gradients:
    (input,) = ctx.saved_tensors
    return _gated_activation_backward_op(grad, input, ctx.activation), None


register_gradient(_gated_activation_op, _setup_gated_activation, _backward_gated_activation)
register_last_derivative(_gated_activation_backward_op)


@torch.library.register_fake(add_op_namespace_prefix("gated_activation"))
def _(input: torch.Tensor, activation: str) -> torch.Tensor:
    _check_halves("gated_activation", input)
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


@torch.library.register_fake(add_op_namespace_prefix("gated_activation_backward"))
def _(grad: torch.Tensor, input: torch.Tensor, activation: str) -> torch.Tensor:
    _check_halves("gated_activation_backward", input)
    MoeChecks("gated_activation_backward").device("grad", grad, "input", input)
    return input.new_empty(input.shape)
