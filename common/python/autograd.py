"""When a call must be recorded for autograd, and how far it can be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

Gradients = tuple[torch.Tensor | None, ...]


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Tells whether a call must be recorded: a gradient can be asked for, or forward-mode differentiation is on.

    The latter is not supported, and recording the call makes PyTorch say so.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110, any() with a generator takes twice as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def first_order_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Makes the backward of an autograd.Function one whose results cannot be differentiated again.

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


class _RefuseDerivative(torch.autograd.Function):
    """Passes its first `count` tensors through and makes them depend on all of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count] if tensor is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError("this function can be differentiated once only; a second derivative was asked for")
