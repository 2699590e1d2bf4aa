"""selected_router_weights and selected_router_backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, call, register_gradient, register_last_derivative
from ._errors import INDEX_DTYPES, INT32_MAX, REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops
from ._options import RouterWeightOptions

MAX_SELECTED = 64
"""Experts of a token that the ops take at most."""

_weights_op = ops.selected_router_weights.default
_backward_op = ops.selected_router_backward.default


def selected_router_weights(logits: torch.Tensor, indices: torch.Tensor, options: RouterWeightOptions) -> torch.Tensor:
    """Returns the weights of experts that have been chosen already.

    Their scores, divided by the sum of them plus 1e-20 with `renormalize`, times the scale, in float32. An index that
    repeats counts each time. A row with an index outside `[0, E)` is NaN.

    Args:
        logits: `[T, E]`, float32, float16 or bfloat16, any strides.
        indices: `[T, k]`, int32, int64 or uint32, contiguous, with 1 <= k <= min(E, 64).
        options: how logits become weights.

    Returns:
        A contiguous float32 tensor `[T, k]`. Differentiable once in the logits; the choice itself is fixed.

    Raises:
        MoeError: for an argument that is not as described.

    Source: the routers of Mixtral (softmax) and DeepSeek-V3 (sigmoid).
    """
    return weights_of("selected_router_weights", logits, indices, options)


def selected_router_backward(
    logits: torch.Tensor, indices: torch.Tensor, grad_weights: torch.Tensor, options: RouterWeightOptions
) -> torch.Tensor:
    """Returns the gradient of logits through `selected_router_weights`.

    Args:
        logits: `[T, E]`, float32, float16 or bfloat16, any strides.
        indices: `[T, k]`, int32, int64 or uint32, contiguous, with 1 <= k <= min(E, 64).
        grad_weights: float32 `[T, k]`, the gradient of the weights, any strides.
        options: how logits become weights.

    Returns:
        A contiguous tensor `[T, E]` in the logits' dtype, in which a row with an index outside `[0, E)` is NaN.

    Raises:
        MoeError: for an argument that is not as described.

    Source: the derivative of `selected_router_weights`.
    """
    return gradient_of("selected_router_backward", logits, indices, grad_weights, options)


def weights_of(
    function: str, logits: torch.Tensor, indices: torch.Tensor, options: RouterWeightOptions
) -> torch.Tensor:
    """Returns what `selected_router_weights` does; a refusal names the function."""
    indices = _signed(function, indices)
    if is_dynamo_compiling():
        _check_weights(function, logits, indices, options)
    try:
        _require_contiguous(indices)
        return call(_weights_op, (logits, indices, *_unpack(options)), logits)
    except REFUSALS:
        _check_weights(function, logits, indices, options)
        raise


def gradient_of(
    function: str,
    logits: torch.Tensor,
    indices: torch.Tensor,
    grad_weights: torch.Tensor,
    options: RouterWeightOptions,
) -> torch.Tensor:
    """Returns what `selected_router_backward` does; a refusal names the function."""
    indices = _signed(function, indices)
    if is_dynamo_compiling():
        _check_backward(function, logits, indices, grad_weights, options)
    try:
        _require_contiguous(indices)
        return call(_backward_op, (logits, indices, grad_weights, *_unpack(options)), logits, grad_weights)
    except REFUSALS:
        _check_backward(function, logits, indices, grad_weights, options)
        raise


def _unpack(options: RouterWeightOptions) -> tuple[str, bool, float]:
    """Returns options as the ops take them."""
    if not isinstance(options, RouterWeightOptions):
        raise TypeError("options must be RouterWeightOptions")
    return options.scoring.value, options.renormalize, options.scale


def _signed(function: str, indices: torch.Tensor) -> torch.Tensor:
    """Widens uint32, which the ops do not know; raises MoeError where such a tensor cannot be read."""
    if getattr(indices, "dtype", None) is not torch.uint32:
        return indices
    return MoeChecks(function).integers("indices", indices, *INDEX_DTYPES, torch.uint32).long()


def _require_contiguous(indices: torch.Tensor) -> None:
    if not indices.is_contiguous():
        raise ValueError("indices must be contiguous")


def _check_selection(function: str, logits: object, indices: object) -> tuple[torch.Tensor, torch.Tensor]:
    check = MoeChecks(function)
    rows = check.float_rows("logits", logits, "T, E")
    chosen = check.indices("indices", indices, "logits", rows)
    if rows.shape[1] > INT32_MAX:
        check.fail("logits", "have fewer than 2^31 experts", rows)
    most = min(MAX_SELECTED, rows.shape[1])
    if chosen.shape[1] > most:
        check.fail("indices", f"have at most {most} experts for each of the logits' rows", chosen)
    return rows, chosen


def _check_weights(function: str, logits: object, indices: object, options: object) -> torch.Tensor:
    check = MoeChecks(function)
    _, chosen = _check_selection(function, logits, indices)
    if not chosen.is_contiguous():
        check.fail("indices", "have the strides of a contiguous tensor", chosen.stride())
    check.instance("options", options, RouterWeightOptions)
    return chosen


def _check_backward(function: str, logits: object, indices: object, grad_weights: object, options: object) -> None:
    chosen = _check_weights(function, logits, indices, options)
    _check_gradient(function, chosen, grad_weights)


def _check_gradient(function: str, indices: torch.Tensor, grad_weights: object) -> None:
    check = MoeChecks(function)
    grads = check.float_tensor("grad_weights", grad_weights)
    check.dtype("grad_weights", grads, torch.float32)
    if grads.shape != indices.shape:
        check.fail("grad_weights", f"have the shape {tuple(indices.shape)} of indices", grads)
    check.device("grad_weights", grads, "indices", indices)


def _setup_weights(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, indices, *ctx.options = inputs
    ctx.save_for_backward(logits, indices)


def _backward_weights(ctx: Any, grad: torch.Tensor) -> Gradients:
    logits, indices = ctx.saved_tensors
    return _backward_op(logits, indices, grad, *ctx.options), None, None, None, None


register_gradient(_weights_op, _setup_weights, _backward_weights)
register_last_derivative(_backward_op)


@torch.library.register_fake(add_op_namespace_prefix("selected_router_weights"))
def _(logits: torch.Tensor, indices: torch.Tensor, scoring: str, renormalize: bool, scale: float) -> torch.Tensor:
    _check_selection("selected_router_weights", logits, indices)
    return logits.new_empty(indices.shape, dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("selected_router_backward"))
def _(
    logits: torch.Tensor,
    indices: torch.Tensor,
    grad_weights: torch.Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> torch.Tensor:
    _check_selection("selected_router_backward", logits, indices)
    _check_gradient("selected_router_backward", indices, grad_weights)
    return logits.new_empty(logits.shape)
