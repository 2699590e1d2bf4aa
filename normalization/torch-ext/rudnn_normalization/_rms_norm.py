"""rms_norm, rms_norm_gated and fused_add_rms_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _rows
from ._autograd import Gradients, below_autograd, needs_autograd, register_gradient
from ._ops import add_op_namespace_prefix, ops
from ._rows import is_epsilon

_ACTIVATIONS = ("silu", "sigmoid")

_rms_norm_op = ops.rms_norm.default
_rms_norm_gated_op = ops.rms_norm_gated.default
_fused_add_rms_norm_op = ops.fused_add_rms_norm.default


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6, *, zero_centered: bool = False
) -> torch.Tensor:
    """Divides each row by its root mean square and multiplies it by a weight.

    `input / sqrt(mean(input ** 2) + epsilon) * gamma` over the last axis, in float32 arithmetic, rounded once. Rows
    whose squares overflow float32 come out right too.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.
        gamma: `[H]`, float32 or the input's dtype, on the input's device.
        epsilon: added to the mean of squares; finite and > 0.
        zero_centered: multiply by `1 + gamma` instead of `gamma`, as Gemma and Qwen3.5 do.

    Returns:
        A contiguous tensor of the input's shape and dtype. Differentiable once in input and gamma.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if not is_epsilon(epsilon):
        epsilon = _rows.checks("rms_norm").positive("epsilon", epsilon)
    if type(zero_centered) is not bool:
        _rows.checks("rms_norm").flag("zero_centered", zero_centered)
    if is_dynamo_compiling():
        _check_rms_norm(input, gamma)
        return _rms_norm_op(input, gamma, epsilon, zero_centered)
    try:
        if needs_autograd(input, gamma):
            return _rms_norm_op(input, gamma, epsilon, zero_centered)
        with below_autograd():
            return _rms_norm_op(input, gamma, epsilon, zero_centered)
    except _rows.REFUSALS:
        _check_rms_norm(input, gamma)
        raise


def rms_norm_gated(
    input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6, *, activation: str = "silu"
) -> torch.Tensor:
    """Normalises each row as `rms_norm` does and multiplies it by an activation of a gate.

    `rms_norm(input, gamma, epsilon) * silu(gate)`, in float32 arithmetic, rounded once.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.
        gate: the input's shape, dtype and device, any strides.
        gamma: `[H]`, float32 or the input's dtype, on the input's device.
        epsilon: added to the mean of squares; finite and > 0.
        activation: "silu" or "sigmoid".

    Returns:
        A contiguous tensor of the input's shape and dtype. Differentiable once in input, gate and gamma.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: the gated norms of Qwen3-Next (silu) and Kimi-Linear (sigmoid) in Transformers.
    """
    if not is_epsilon(epsilon):
        epsilon = _rows.checks("rms_norm_gated").positive("epsilon", epsilon)
    if type(activation) is not str or activation not in _ACTIVATIONS:
        _rows.checks("rms_norm_gated").choice("activation", activation, _ACTIVATIONS)
    if is_dynamo_compiling():
        _check_rms_norm_gated(input, gate, gamma)
        return _rms_norm_gated_op(input, gate, gamma, epsilon, activation)
    try:
        if needs_autograd(input, gate, gamma):
            return _rms_norm_gated_op(input, gate, gamma, epsilon, activation)
        with below_autograd():
            return _rms_norm_gated_op(input, gate, gamma, epsilon, activation)
    except _rows.REFUSALS:
        _check_rms_norm_gated(input, gate, gamma)
        raise


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a residual and normalises the sum as `rms_norm` does, in one pass.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides, H >= 1.
        residual: the input's shape, dtype and device, any strides.
        gamma: `[H]`, float32 or the input's dtype, on the input's device.
        epsilon: added to the mean of squares; finite and > 0.

    Returns:
        `(rms_norm(sum, gamma, epsilon), sum)` with `sum = input + residual`, rounded to the input's dtype before it is
        normalised, as models do. Both are new contiguous tensors. Differentiable once in input, residual and gamma.

    Raises:
        NormalizationError: for an argument that is not as described.

    Source: the residual stream of pre-norm Transformers, `norm(x + attention(x))`.
    """
    if not is_epsilon(epsilon):
        epsilon = _rows.checks("fused_add_rms_norm").positive("epsilon", epsilon)
    if is_dynamo_compiling():
        _check_fused_add_rms_norm(input, residual, gamma)
        return _fused_add_rms_norm_op(input, residual, gamma, epsilon)
    try:
        if needs_autograd(input, residual, gamma):
            return _fused_add_rms_norm_op(input, residual, gamma, epsilon)
        with below_autograd():
            return _fused_add_rms_norm_op(input, residual, gamma, epsilon)
    except _rows.REFUSALS:
        _check_fused_add_rms_norm(input, residual, gamma)
        raise


def _check_rms_norm(input: torch.Tensor, gamma: torch.Tensor) -> None:
    _rows.check_norm("rms_norm", input, {"gamma": gamma}, {})


def _check_rms_norm_gated(input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> None:
    _rows.check_norm("rms_norm_gated", input, {"gamma": gamma}, {"gate": gate})


def _check_fused_add_rms_norm(input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> None:
    _rows.check_norm("fused_add_rms_norm", input, {"gamma": gamma}, {"residual": residual})


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, gamma, ctx.epsilon, ctx.zero_centered = inputs
    ctx.save_for_backward(input, gamma)


def _backward_rms_norm(ctx: Any, grad: torch.Tensor) -> Gradients:
    input, gamma = ctx.saved_tensors
    need_input, need_gamma = ctx.needs_input_grad[:2]
    grad_input, grad_gamma = ops.rms_norm_backward(
        grad, None, input, gamma, ctx.epsilon, ctx.zero_centered, need_input, need_gamma
    )
    return (
        grad_input if need_input else None,
        grad_gamma.to(gamma.dtype) if need_gamma else None,
        None,
        None,
    )


register_gradient(_rms_norm_op, _setup_rms_norm, _backward_rms_norm)


def _setup_rms_norm_gated(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, gate, gamma, ctx.epsilon, ctx.activation = inputs
    ctx.save_for_backward(input, gate, gamma)


def _backward_rms_norm_gated(ctx: Any, grad: torch.Tensor) -> Gradients:
    input, gate, gamma = ctx.saved_tensors
    need_input, need_gate, need_gamma = ctx.needs_input_grad[:3]
    grad_input, grad_gate, grad_gamma = ops.rms_norm_gated_backward(
        grad, input, gate, gamma, ctx.epsilon, ctx.activation, need_input, need_gate, need_gamma
    )
    return (
        grad_input if need_input else None,
        grad_gate if need_gate else None,
        grad_gamma.to(gamma.dtype) if need_gamma else None,
        None,
        None,
    )


register_gradient(_rms_norm_gated_op, _setup_rms_norm_gated, _backward_rms_norm_gated)


def _setup_fused_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, gamma, ctx.epsilon = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], gamma)


def _backward_fused_add_rms_norm(ctx: Any, grad: torch.Tensor | None, grad_sum: torch.Tensor | None) -> Gradients:
    sum, gamma = ctx.saved_tensors
    need_input, need_residual, need_gamma = ctx.needs_input_grad[:3]
    if grad is None:
        # The norm was not used. Its zero gradient would be NaN where the row holds inf.
        grad_rows, grad_gamma = grad_sum, torch.zeros_like(gamma)
    else:
        grad_rows, grad_gamma = ops.rms_norm_backward(
            grad, grad_sum, sum, gamma, ctx.epsilon, False, need_input or need_residual, need_gamma
        )
    return (
        grad_rows if need_input else None,
        grad_rows if need_residual else None,
        grad_gamma.to(gamma.dtype) if need_gamma else None,
        None,
    )


register_gradient(_fused_add_rms_norm_op, _setup_fused_add_rms_norm, _backward_fused_add_rms_norm)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _(input: torch.Tensor, gamma: torch.Tensor, epsilon: float, zero_centered: bool) -> torch.Tensor:
    _check_rms_norm(input, gamma)
    return _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_gated"))
def _(input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor, epsilon: float, activation: str) -> torch.Tensor:
    _check_rms_norm_gated(input, gate, gamma)
    return _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("fused_add_rms_norm"))
def _(
    input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_fused_add_rms_norm(input, residual, gamma)
    return _rows.fake_like(input), _rows.fake_like(input)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    input: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    zero_centered: bool,
    need_input: bool,
    need_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _rows.fake_gradient(input, need_input, grad, grad_sum, gamma),
        _rows.fake_parameter_gradient(input, need_gamma),
    )


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_gated_backward"))
def _(
    grad: torch.Tensor,
    input: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    activation: str,
    need_input: bool,
    need_gate: bool,
    need_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _rows.fake_gradient(input, need_input, grad, gate, gamma),
        _rows.fake_gradient(input, need_gate),
        _rows.fake_parameter_gradient(input, need_gamma),
    )
