"""What the functions of this package share: their error, their checks and their fake results."""

from __future__ import annotations

from math import inf

import torch

from ._checks import ArgumentChecks, served_devices
from ._ops import add_op_namespace_prefix, ops


class NormalizationError(ValueError):
    """An argument of a normalization function is not what the function asks for."""


# Raises where RUDNN_CPU_ISA names no instruction set, rather than at some later call.
if hasattr(ops, "cpu_isa"):
    ops.cpu_isa()

_DEVICES = served_devices(add_op_namespace_prefix("rms_norm"))

REFUSALS = (AttributeError, RuntimeError, TypeError, ValueError)
"""What a registered op, or an attempt to call it, raises for arguments that it cannot take."""


def checks(function: str) -> ArgumentChecks:
    """Returns the checks of one function's arguments."""
    return ArgumentChecks(NormalizationError, function, _DEVICES)


def is_epsilon(epsilon: object) -> bool:
    """Tells whether `epsilon` is a finite float > 0. The ops do not check it: it has no say in memory safety."""
    return type(epsilon) is float and 0.0 < epsilon < inf


def check_rows(function: str, input: object) -> None:
    """Raises NormalizationError unless `input` has rows to work on."""
    check = checks(function)
    tensor = check.float_tensor("input", input)
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        check.fail("input", "have a last axis of length >= 1", tensor)


def check_norm(function: str, input: torch.Tensor, parameters: dict[str, object], like: dict[str, object]) -> None:
    """Raises NormalizationError unless the tensors of a norm go together.

    Args:
        function: the name of the public function.
        input: the rows `[..., H]`.
        parameters: by name, what must be `[H]` and float32 or of the input's dtype.
        like: by name, what must have the input's shape and dtype.
    """
    check_rows(function, input)
    check = checks(function)
    for name, value in like.items():
        check.like(name, value, "input", input)
    for name, value in parameters.items():
        tensor = check.float_tensor(name, value)
        check.dtype(name, tensor, torch.float32, input.dtype)
        check.shape(name, tensor, tuple(input.shape[-1:]))
        check.device(name, tensor, "input", input)


def fake_like(input: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Returns a fake result of the input's shape, after checking that all tensors are on one device."""
    for other in others:
        if other is not None and other.device != input.device:
            raise RuntimeError(f"all tensors must be on one device, got {input.device} and {other.device}")
    return input.new_empty(input.shape)


def fake_gradient(input: torch.Tensor, needed: bool, *others: torch.Tensor | None) -> torch.Tensor:
    """Returns the fake gradient of rows: of the input's shape, or of shape (0,) if nobody needs it."""
    gradient = fake_like(input, *others)
    return gradient if needed else input.new_empty((0,))


def fake_parameter_gradient(input: torch.Tensor, needed: bool) -> torch.Tensor:
    """Returns the fake gradient of gamma or beta: float32 `[H]`, or of shape (0,) if nobody needs it."""
    return input.new_empty((input.shape[-1] if needed else 0,), dtype=torch.float32)
