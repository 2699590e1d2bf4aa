"""The family's error, and the checks that raise it."""

from __future__ import annotations

import numbers

import torch

from ._checks import ArgumentChecks, dtype_name, served_devices
from ._ops import add_op_namespace_prefix, ops


class AttentionSetupError(ValueError):
    """An argument of a function or an option of this package is not what it asks for."""


# Raises where RUDNN_CPU_ISA names no instruction set, rather than at some later call.
if hasattr(ops, "cpu_isa"):
    ops.cpu_isa()

DEVICES = served_devices(add_op_namespace_prefix("attention"))
"""Where the flash strategies run."""

REFUSALS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
"""What a registered op, or an attempt to call it, raises for arguments that it cannot take."""

SMALLEST_FLOAT32 = 2.0**-149

INT32_MAX = 2**31 - 1

INDEX_DTYPES = (torch.int32, torch.int64)


def is_zero(value: object) -> bool:
    """Tells whether a number is 0; a tensor is no number, and is not asked."""
    return isinstance(value, numbers.Real) and value == 0


def bounded_integer(value: object, least: int, most: int = INT32_MAX) -> int | None:
    """Returns an integer within bounds as an int, and None for anything else."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return None
    number = int(value)
    return number if least <= number <= most else None


class AttentionChecks(ArgumentChecks):
    """The checks of one call. Each raises AttentionSetupError with a message that names the function and the argument.

    Args:
        function: the name of the function.
        anywhere: whether tensors of devices for which the build has no kernels are taken too.
    """

    def __init__(self, function: str, *, anywhere: bool = False) -> None:
        super().__init__(AttentionSetupError, function, _Everywhere() if anywhere else DEVICES)

    def axes(self, name: str, value: torch.Tensor, names: str) -> None:
        """Requires as many axes as there are names, such as `B, H, S, D`."""
        if value.dim() != len(names.split(", ")):
            self.fail(name, f"have the axes [{names}]", value)

    def boolean_tensor(self, name: str, value: object) -> torch.Tensor:
        """Requires a dense tensor of bool, and returns it."""
        requirement = "be a dense tensor of bool, True where a key takes part"
        return self.dense_tensor(name, requirement, value, (torch.bool,))

    def integers(self, name: str, value: object) -> torch.Tensor:
        """Requires a dense tensor of int32 or int64, and returns it."""
        return self.dense_tensor(name, "be a dense tensor of int32 or int64", value, INDEX_DTYPES)

    def broadcastable(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Requires a shape whose axes, from the last one on, are each 1 or that of `shape`."""
        pairs = zip(reversed(value.shape), reversed(shape), strict=False)
        if value.dim() > len(shape) or any(size not in (1, full) for size, full in pairs):
            self.fail(name, f"broadcast to {tuple(shape)}", value)

    def integer(self, name: str, value: object, least: int, most: int = INT32_MAX) -> int:
        """Requires an integer within bounds, and returns it."""
        number = bounded_integer(value, least, most)
        if number is None:
            self.fail(name, f"be an integer from {least} to {most}", value)
        return number

    def length(self, name: str, value: object) -> int:
        """Requires a number of elements, in a tensor perhaps, which is waited for, and returns it."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in INDEX_DTYPES:
            self.memory(name, value)
            value = value.item()
        if isinstance(value, torch.SymInt):
            return int(value)
        return self.integer(name, value, 0)

    def positive_float32(self, name: str, value: object) -> float:
        """Requires a number that is finite and greater than zero in float32, and returns it as a float."""
        number = self.positive(name, value)
        if not SMALLEST_FLOAT32 <= number <= torch.finfo(torch.float32).max:
            self.fail(name, "be finite and > 0 in float32", value)
        return number

    def instance(self, name: str, value: object, kind: type) -> None:
        """Requires an instance of a class."""
        if not isinstance(value, kind):
            self.fail(name, f"be an instance of {kind.__name__}", value)

    def dtype_of(self, name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
        """Requires the dtype of another argument."""
        if value.dtype != other.dtype:
            self.fail(name, f"be {dtype_name(other.dtype)}, as {other_name} is", value)


class _Everywhere(frozenset[str]):
    """Every device type."""

    def __contains__(self, device: object) -> bool:
        return True
