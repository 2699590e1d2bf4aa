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
    """Returns the detailed checks of one function's arguments."""
    return ArgumentChecks(NormalizationError, function, _DEVICES)


def check_rows(function: str, input: torch.Tensor) -> None:
    """Requires an input that has rows to work on."""
    try:
        if _is_rows(input):
            return
    except AttributeError:
        pass
    check = checks(function)
    check.float_tensor("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        check.fail("input", "have a last axis of length >= 1", input)


def check_norm(
    function: str,
    input: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    epsilon: float,
    other_name: str = "",
    other: torch.Tensor | None = None,
) -> float:
    """Requires the arguments of a norm, and returns epsilon as a float.

    Args:
        function: the name of the public function.
        input: the rows.
        gamma: a parameter `[H]`.
        beta: a second parameter, or None.
        epsilon: a finite number > 0.
        other_name: the name of a further tensor that goes with the input element by element; empty if there is none.
        other: that tensor.
    """
    try:
        if (
            _is_rows(input)
            and _is_parameter(gamma, input)
            and (beta is None or _is_parameter(beta, input))
            and (not other_name or _is_like(other, input))
            and type(epsilon) is float
            and 0.0 < epsilon < inf
        ):
            return epsilon
    except AttributeError:
        pass
    check_rows(function, input)
    check = checks(function)
    if other_name:
        check.like(other_name, other, "input", input)
    _check_parameter(check, "gamma", gamma, input)
    if beta is not None:
        _check_parameter(check, "beta", beta, input)
    return check.positive("epsilon", epsilon)


def _is_rows(input: torch.Tensor) -> bool:
    return (
        input.dtype in FLOAT_DTYPES
        and input.layout is torch.strided
        and not input.is_nested
        and input.dim() > 0
        and input.size(-1) > 0
        # Reading `is_cpu` costs a fifth of reading `device.type`.
        and ((_SERVES_CPU and input.is_cpu) or input.device.type in _DEVICES)
    )


def _is_parameter(parameter: torch.Tensor, input: torch.Tensor) -> bool:
    return (
        (parameter.dtype is torch.float32 or parameter.dtype is input.dtype)
        and parameter.layout is torch.strided
        and not parameter.is_nested
        and parameter.dim() == 1
        and parameter.size(0) == input.size(-1)
        and parameter.device == input.device
    )


def _is_like(other: torch.Tensor | None, input: torch.Tensor) -> bool:
    return (
        other is not None
        and other.dtype is input.dtype
        and other.layout is torch.strided
        and not other.is_nested
        and other.shape == input.shape
        and other.device == input.device
    )


def _check_parameter(check: ArgumentChecks, name: str, parameter: object, input: torch.Tensor) -> None:
    tensor = check.float_tensor(name, parameter)
    check.dtype(name, tensor, torch.float32, input.dtype)
    check.shape(name, tensor, tuple(input.shape[-1:]))
    check.device(name, tensor, "input", input)


def fake_like(input: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Returns the fake result of an op on rows, after checking that all tensors are on one device."""
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
