"""How registered ops are called."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import below_autograd, needs_autograd, register_gradient


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], *leaves: torch.Tensor | None) -> Any:
    """Calls an op, below autograd unless a gradient of one of `leaves` may be asked for."""
    if is_dynamo_compiling() or needs_autograd(*leaves):
        return op(*arguments)
    with below_autograd():
        return op(*arguments)


def register_last_derivative(op: torch._ops.OpOverload) -> None:
    """Makes an op that computes gradients one whose results cannot be differentiated again."""
    register_gradient(op, _save_nothing, _refuse)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
    raise RuntimeError("this function can be differentiated once only; a second derivative was asked for")
