"""The family's error, and the checks that raise it."""

from __future__ import annotations

import numbers

import torch

from ._checks import ArgumentChecks, dtype_name, served_devices
from ._ops import add_op_namespace_prefix, ops


class MoeError(ValueError):
    """An argument of a function or an option of this package is not what it asks for."""


# Raises where RUDNN_CPU_ISA names no instruction set, rather than at some later call.
if hasattr(ops, "cpu_isa"):
    ops.cpu_isa()

DEVICES = served_devices(add_op_namespace_prefix("route"))

REFUSALS = (AttributeError, RuntimeError, TypeError, ValueError)
"""What a registered op, or an attempt to call it, raises for arguments that it cannot take."""

SMALLEST_FLOAT32 = 2.0**-149

INT32_MAX = 2**31 - 1

INDEX_DTYPES = (torch.int32, torch.int64)


class MoeChecks(ArgumentChecks):
    """The checks of one call. Each raises MoeError with a message that names the function and the argument."""

    def __init__(self, function: str) -> None:
        super().__init__(MoeError, function, DEVICES)

    def integer(self, name: str, value: object, least: int, most: int | None = None) -> int:
        """Requires an integer within bounds, and returns it."""
        number = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else least - 1
        if number < least or (most is not None and number > most):
            self.fail(name, f"be an integer {f'>= {least}' if most is None else f'from {least} to {most}'}", value)
        return number

    def positive_float32(self, name: str, value: object) -> float:
        """Requires a number that is finite and greater than zero in float32, and returns it as a float."""
        number = self.positive(name, value)
        if not SMALLEST_FLOAT32 <= number <= torch.finfo(torch.float32).max:
            self.fail(name, "be finite and > 0 in float32", value)
        return number

    def instance(self, name: str, value: object, kind: type) -> None:
        """Requires an instance of a class."""
        if not isinstance(value, kind):
            self.fail(name, f"be a {kind.__name__}", value)

    def axes(self, name: str, value: torch.Tensor, names: str) -> None:
        """Requires as many axes as there are names, such as `T, H`."""
        if value.dim() != len(names.split(", ")):
            self.fail(name, f"have the axes [{names}]", value)

    def float_rows(self, name: str, value: object, names: str = "T, H") -> torch.Tensor:
        """Requires a dense matrix of float32, float16 or bfloat16, and returns it."""
        tensor = self.float_tensor(name, value)
        self.axes(name, tensor, names)
        return tensor

    def integers(self, name: str, value: object, *allowed: torch.dtype) -> torch.Tensor:
        """Requires a dense tensor of one of the integer dtypes on a device that the build serves, and returns it."""
        requirement = f"be a dense tensor of {' or '.join(map(dtype_name, allowed))}"
        tensor = self.dense_tensor(name, requirement, value, allowed)
        self.served(name, tensor)
        return tensor

    def indices(self, name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
        """Requires int32 or int64 `[T, k]` with k >= 1 for the T rows of another argument, on its device."""
        tensor = self.integers(name, value, *INDEX_DTYPES)
        self.axes(name, tensor, "T, k")
        if tensor.shape[0] != other.shape[0]:
            self.fail(name, f"have a row for each of the {other.shape[0]} of {other_name}", tensor)
        if tensor.shape[1] < 1:
            self.fail(name, "have at least one expert for each token", tensor)
        self.device(name, tensor, other_name, other)
        return tensor

    def fewer_than_int32(self, name: str, value: torch.Tensor) -> None:
        """Requires no more elements than the int32 maps count."""
        if value.numel() > INT32_MAX:
            self.fail(name, "have fewer than 2^31 elements", value)

    def map(self, name: str, value: object, shape: tuple[int, ...], other_name: str, other: torch.Tensor) -> None:
        """Requires one of the int32 maps that dispatch makes, on the device of another argument."""
        tensor = self.integers(name, value, torch.int32)
        self.shape(name, tensor, shape)
        self.device(name, tensor, other_name, other)
