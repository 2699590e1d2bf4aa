"""Checks of public functions' arguments: what is asked for, what came, and the sentence that says so.

A registered op refuses what would be unsafe by itself, so a public function calls it first and comes here only when it
raises: a call with good arguments pays for no check twice. Under torch.compile the checks come first.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import NoReturn

import torch
from torch.masked import MaskedTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
_NOT_DENSE = (*_UNINITIALIZED, MaskedTensor)

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}


def served_devices(op: str) -> frozenset[str]:
    """Returns the device types that the loaded build has kernels of `op` for, and "meta", which needs none.

    Args:
        op: qualified name of a registered op, `namespace::name`.
    """
    kernels = (
        device for device, key in _DISPATCH_KEYS.items() if torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
    )
    return frozenset((*kernels, "meta"))


def describe(value: object) -> str:
    """Says in a few words what came for an argument."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {reprlib.repr(value)}"
    if isinstance(value, _UNINITIALIZED):
        return "an uninitialised parameter"
    if isinstance(value, MaskedTensor):
        return "a masked tensor"
    if value.is_nested:
        return "a nested tensor"
    layout = "" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} "
    return f"{layout}{dtype_name(value.dtype)} {tuple(value.shape)} on {value.device}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module."""
    return str(dtype).removeprefix("torch.")


class ArgumentChecks:
    """The checks of one call. Each raises `error` with a message that names the function and the argument."""

    def __init__(self, error: type[ValueError], function: str, devices: frozenset[str]) -> None:
        self._error = error
        self._function = function
        self._devices = devices

    def fail(self, name: str, requirement: str, value: object) -> NoReturn:
        """Raises for argument `name`, which must `requirement`, and is `value`."""
        raise self._error(f"{self._function}: {name} must {requirement}, got {describe(value)}") from None

    def float_tensor(self, name: str, value: object) -> torch.Tensor:
        """Requires a dense tensor of float32, float16 or bfloat16 on a device that the build serves, and returns it."""
        requirement = "be a dense tensor of float32, float16 or bfloat16"
        if not isinstance(value, torch.Tensor) or isinstance(value, _NOT_DENSE) or value.dtype not in FLOAT_DTYPES:
            self.fail(name, requirement, value)
        if value.layout != torch.strided or value.is_nested:
            self.fail(name, requirement, value)
        if value.device.type not in self._devices:
            self.fail(name, f"be on {' or '.join(sorted(self._devices - {'meta'}))}, which this build serves", value)
        return value

    def dtype(self, name: str, value: torch.Tensor, *allowed: torch.dtype) -> None:
        """Requires one of the allowed dtypes."""
        if value.dtype not in allowed:
            self.fail(name, f"be {' or '.join(dtype_name(dtype) for dtype in dict.fromkeys(allowed))}", value)

    def shape(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Requires a shape."""
        if tuple(value.shape) != tuple(shape):
            self.fail(name, f"have shape {tuple(shape)}", value)

    def device(self, name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
        """Requires the device of another argument."""
        if value.device != other.device:
            self.fail(name, f"be on the device of {other_name}, {other.device}", value)

    def like(self, name: str, value: object, other_name: str, other: torch.Tensor) -> None:
        """Requires the shape, dtype and device of another argument."""
        tensor = self.float_tensor(name, value)
        self.dtype(name, tensor, other.dtype)
        self.shape(name, tensor, tuple(other.shape))
        self.device(name, tensor, other_name, other)

    def positive(self, name: str, value: object) -> float:
        """Requires a finite number greater than zero, and returns it as a float."""
        try:
            number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not 0 < number < math.inf:
            self.fail(name, "be a finite number > 0", value)
        return number

    def flag(self, name: str, value: object) -> None:
        """Requires True or False."""
        if not isinstance(value, bool):
            self.fail(name, "be True or False", value)

    def choice(self, name: str, value: object, allowed: tuple[str, ...]) -> None:
        """Requires one of some strings."""
        if not isinstance(value, str) or value not in allowed:
            self.fail(name, f"be {' or '.join(map(repr, allowed))}", value)
