"""Gradients of registered ops, and how not to pay for them where nobody asks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

Gradients = tuple[torch.Tensor | None, ...]

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which an op runs as if no gradient could be asked for."""

_is_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Tells whether an op must be called with its registered gradient in place.

    That serves training and function transforms. It costs more than a small op itself, so calls for which this is False
    belong into `below_autograd()`. A call that torch.compile traces always has the gradient in place.

    Raises:
        RuntimeError: a tensor carries a tangent: forward-mode differentiation is not supported.
    """
    if _transforms_active():
        _refuse_tangents(tensors)
        return True
    if getattr(forward_ad, "_current_level", -1) >= 0:
        _refuse_tangents(tensors)
    if _is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def gradient_needed(*leaves: torch.Tensor | None) -> bool:
    """Tells whether a gradient may be asked for, also where torch.compile traces."""
    if not is_dynamo_compiling():
        return needs_autograd(*leaves)
    return torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], *leaves: torch.Tensor | None) -> Any:
    """Calls an op, below autograd unless a gradient of one of `leaves` may be asked for."""
    if is_dynamo_compiling() or needs_autograd(*leaves):
        return op(*arguments)
    with below_autograd():
        return op(*arguments)


def register_gradient(
    op: torch._ops.OpOverload,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Gradients],
) -> None:
    """Registers the gradient of an op, which can be differentiated no further.

    Args:
        op: the op.
        setup_context: `(ctx, inputs, output)`, as for `torch.library.register_autograd`.
        backward: `(ctx, *grads)`, returns a gradient or None for each argument.
    """
    torch.library.register_autograd(op.name(), first_order_only(backward), setup_context=setup_context)


def register_last_derivative(op: torch._ops.OpOverload) -> None:
    """Makes an op that computes gradients one whose results cannot be differentiated again."""
    register_gradient(op, _save_nothing, _refuse_derivative)


def first_order_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Makes a backward function one whose results cannot be differentiated again.

    Unlike `once_differentiable`, this also refuses where the incoming gradients are constants: there a second
    derivative with respect to the saved tensors would silently be left out.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: torch.Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        computed = [result for result in results if result is not None]
        guarded = iter(_RefuseDerivative.apply(len(computed), *computed, *ctx.saved_tensors, *grads))
        return tuple(None if result is None else next(guarded) for result in results)

    return wrapper


def _refuse_tangents(tensors: tuple[torch.Tensor | None, ...]) -> None:
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError("this function does not support forward-mode differentiation; use backward()")


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_derivative(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
    raise RuntimeError("this function can be differentiated once only; a second derivative was asked for")


class _RefuseDerivative(torch.autograd.Function):
    """Passes its first `count` tensors through and makes them depend on all of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count] if tensor is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        _refuse_derivative(ctx, *grads)
