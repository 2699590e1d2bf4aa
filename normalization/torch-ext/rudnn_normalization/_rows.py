"""What the functions of this package share: their error, their checks and their fake results."""

from __future__ import annotations

from math import inf

import torch

from ._checks import FLOAT_DTYPES, ArgumentChecks, served_devices
from ._ops import add_op_namespace_prefix, ops


class NormalizationError(ValueError):
    """An argument of a normalization function is not what the function asks for."""


# Raises where RUDNN_CPU_ISA names no instruction set, rather than at some later call.
if hasattr(ops, "cpu_isa"):
    ops.cpu_isa()

_DEVICES = served_devices(add_op_namespace_prefix("rms_norm"))
_SERVES_CPU = "cpu" in _DEVICES


def checks(function: str) -> ArgumentChecks:
    """Return the detailed checks of one function's arguments."""
    return ArgumentChecks(NormalizationError, function, _DEVICES)


def is_rows(input: torch.Tensor) -> bool:
    """Tell whether `input` is a tensor that the functions work on; AttributeError if it is no tensor at all."""
    return (
        input.dtype in FLOAT_DTYPES
        and input.layout is torch.strided
        and not input.is_nested
        and input.dim() > 0
        and input.size(-1) > 0
        # Reading `is_cpu` costs a fifth of reading `device.type`.
        and ((_SERVES_CPU and input.is_cpu) or input.device.type in _DEVICES)
    )


def is_parameter(parameter: torch.Tensor, input: torch.Tensor) -> bool:
    """Tell whether `parameter` is a gamma or beta for the rows of `input`."""
    return (
        (parameter.dtype is torch.float32 or parameter.dtype is input.dtype)
        and parameter.layout is torch.strided
        and parameter.dim() == 1
        and parameter.size(0) == input.size(-1)
        and parameter.device == input.device
    )


def is_like(other: torch.Tensor, input: torch.Tensor) -> bool:
    """Tell whether `other` goes with `input` element by element."""
    return (
        other.dtype is input.dtype
        and other.layout is torch.strided
        and not other.is_nested
        and other.shape == input.shape
        and other.device == input.device
    )


def is_epsilon(epsilon: object) -> bool:
    """Tell whether `epsilon` is a finite float greater than zero."""
    return type(epsilon) is float and 0.0 < epsilon < inf


def check_rows(check: ArgumentChecks, input: object) -> torch.Tensor:
    """Require what `is_rows` tests."""
    check.float_tensor("input", input)
    assert isinstance(input, torch.Tensor)
    if input.dim() == 0 or input.shape[-1] == 0:
        check.fail("input", "have a last axis of length >= 1", input)
    return input


def check_parameter(check: ArgumentChecks, name: str, parameter: object, input: torch.Tensor) -> None:
    """Require what `is_parameter` tests."""
    check.float_tensor(name, parameter)
    assert isinstance(parameter, torch.Tensor)
    check.dtype(name, parameter, torch.float32, input.dtype)
    check.shape(name, parameter, tuple(input.shape[-1:]))
    check.device(name, parameter, "input", input)


def fake_like(input: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Return the fake result of an op on rows, after checking that all tensors are on one device."""
    for other in others:
        if other is not None and other.device != input.device:
            raise RuntimeError(f"all tensors must be on one device, got {input.device} and {other.device}")
    return input.new_empty(input.shape)


def fake_gradient(input: torch.Tensor, needed: bool, *others: torch.Tensor | None) -> torch.Tensor:
    """Return the fake gradient of rows: of the input's shape, or of shape (0,) if nobody needs it."""
    gradient = fake_like(input, *others)
    return gradient if needed else input.new_empty((0,))


def fake_parameter_gradient(input: torch.Tensor, needed: bool) -> torch.Tensor:
    """Return the fake gradient of gamma or beta: float32 `[H]`, or of shape (0,) if nobody needs it."""
    return input.new_empty((input.shape[-1] if needed else 0,), dtype=torch.float32)
