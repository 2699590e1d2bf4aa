"""layer_norm and fused_add_layer_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _rows
from ._autograd import Gradients, below_autograd, needs_autograd, register_gradient
from ._ops import add_op_namespace_prefix, ops
from ._rows import is_epsilon

_layer_norm_op = ops.layer_norm.default
_fused_add_layer_norm_op = ops.fused_add_layer_norm.default


def layer_norm(
    input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-5
) -> torch.Tensor:
    """Centres each row, divides it by its standard deviation, and applies a weight and a bias.

    `(input - mean) / sqrt(variance + epsilon) * gamma + beta` over the last axis with the biased variance, in float32
    arithmetic, rounded once. Neither a large mean nor squares that overflow float32 cost accuracy.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.
        gamma: `[H]`, float32 or the input's dtype, on the input's device.
        beta: the same, or None for no bias.
        epsilon: added to the variance; finite and > 0.

    Returns:
        A contiguous tensor of the input's shape and dtype. Differentiable once in input, gamma and beta.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    if not is_epsilon(epsilon):
        epsilon = _rows.checks("layer_norm").positive("epsilon", epsilon)
    if is_dynamo_compiling():
        _check_layer_norm(input, gamma, beta)
        return _layer_norm_op(input, gamma, beta, epsilon)
    try:
        if needs_autograd(input, gamma, beta):
            return _layer_norm_op(input, gamma, beta, epsilon)
        with below_autograd():
            return _layer_norm_op(input, gamma, beta, epsilon)
    except _rows.REFUSALS:
        _check_layer_norm(input, gamma, beta)
        raise


def fused_add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a residual and normalises the sum as `layer_norm` does, in one pass.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.
        residual: the input's shape, dtype and device, any strides.
        gamma: `[H]`, float32 or the input's dtype, on the input's device.
        beta: the same, or None for no bias.
        epsilon: added to the variance; finite and > 0.

    Returns:
        `(layer_norm(sum, gamma, beta, epsilon), sum)` with `sum = input + residual`, rounded to the input's dtype
        before it is normalised, as models do. Both are new contiguous tensors. Differentiable once in input, residual,
        gamma and beta.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: the residual stream of pre-norm Transformers, `norm(x + attention(x))`.
    """
    if not is_epsilon(epsilon):
        epsilon = _rows.checks("fused_add_layer_norm").positive("epsilon", epsilon)
    if is_dynamo_compiling():
        _check_fused_add_layer_norm(input, residual, gamma, beta)
        return _fused_add_layer_norm_op(input, residual, gamma, beta, epsilon)
    try:
        if needs_autograd(input, residual, gamma, beta):
            return _fused_add_layer_norm_op(input, residual, gamma, beta, epsilon)
        with below_autograd():
            return _fused_add_layer_norm_op(input, residual, gamma, beta, epsilon)
    except _rows.REFUSALS:
        _check_fused_add_layer_norm(input, residual, gamma, beta)
        raise


def _check_layer_norm(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> None:
    _rows.check_norm("layer_norm", input, _parameters(gamma, beta), {})


def _check_fused_add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None
) -> None:
    _rows.check_norm("fused_add_layer_norm", input, _parameters(gamma, beta), {"residual": residual})


def _parameters(gamma: torch.Tensor, beta: torch.Tensor | None) -> dict[str, object]:
    return {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}


def _setup_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, gamma, beta, ctx.epsilon = inputs
    ctx.save_for_backward(input, gamma)
    ctx.beta_dtype = None if beta is None else beta.dtype


def _backward_layer_norm(ctx: Any, grad: torch.Tensor) -> Gradients:
    input, gamma = ctx.saved_tensors
    need_input, need_gamma, need_beta = ctx.needs_input_grad[:3]
    grad_input, grad_gamma, grad_beta = ops.layer_norm_backward(
        grad, None, input, gamma, ctx.epsilon, need_input, need_gamma, need_beta
    )
    return (
        grad_input if need_input else None,
        grad_gamma.to(gamma.dtype) if need_gamma else None,
        grad_beta.to(ctx.beta_dtype) if need_beta else None,
        None,
    )


register_gradient(_layer_norm_op, _setup_layer_norm, _backward_layer_norm)


def _setup_fused_add_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, gamma, beta, ctx.epsilon = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], gamma)
    ctx.beta_dtype = None if beta is None else beta.dtype


def _backward_fused_add_layer_norm(ctx: Any, grad: torch.Tensor | None, grad_sum: torch.Tensor | None) -> Gradients:
    sum, gamma = ctx.saved_tensors
    need_input, need_residual, need_gamma, need_beta = ctx.needs_input_grad[:4]
    if grad is None:
        # The norm was not used. Its zero gradient would be NaN where the row holds inf.
        grad_rows, grad_gamma, grad_beta = grad_sum, torch.zeros_like(gamma), torch.zeros_like(gamma)
    else:
        grad_rows, grad_gamma, grad_beta = ops.layer_norm_backward(
            grad, grad_sum, sum, gamma, ctx.epsilon, need_input or need_residual, need_gamma, need_beta
        )
    return (
        grad_rows if need_input else None,
        grad_rows if need_residual else None,
        grad_gamma.to(gamma.dtype) if need_gamma else None,
        grad_beta.to(ctx.beta_dtype) if need_beta else None,
        None,
    )


register_gradient(_fused_add_layer_norm_op, _setup_fused_add_layer_norm, _backward_fused_add_layer_norm)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm"))
def _(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    _check_layer_norm(input, gamma, beta)
    return _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("fused_add_layer_norm"))
def _(
    input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_fused_add_layer_norm(input, residual, gamma, beta)
    return _rows.fake_like(input), _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_backward"))
def _(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    input: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    need_input: bool,
    need_gamma: bool,
    need_beta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _rows.fake_gradient(input, need_input, grad, grad_sum, gamma),
        _rows.fake_parameter_gradient(input, need_gamma),
        _rows.fake_parameter_gradient(input, need_beta),
    )
