"""Checks of public functions' arguments: what is asked for, what came, and the sentence that says so.

A registered op refuses what would be unsafe by itself, so a public function calls it first and comes here only when it
raises: a call with good arguments pays for no check twice. Memory is the exception, since reading past it may end the
process: it is looked at first where PyTorch's operators read an argument before the op does, and an op written in
Python, which graphs and direct calls reach too, looks at it by itself. Under torch.compile the checks come first.
"""

from __future__ import annotations

import math
import numbers
import os
import reprlib
from itertools import islice
from operator import mul
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
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
        return f"{type(value).__name__} {_words.repr(value)}"
    if isinstance(value, _UNINITIALIZED):
        return "an uninitialised parameter"
    if isinstance(value, MaskedTensor):
        return "a masked tensor"
    if value.is_nested:
        return "a nested tensor"
    layout = "" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} "
    return f"{layout}{dtype_name(value.dtype)} {tuple(value.shape)} on {value.device}"


class _Words(reprlib.Repr):
    """Short forms of values that read no element of a tensor: it may be on another device, or have no memory.

    So nothing is compared, and only what cannot hold a tensor is asked for its own form.
    """

    _PLAIN = (numbers.Number, str, bytes, type, type(None), torch.dtype, torch.device, torch.layout)

    def repr_instance(self, value: object, level: int) -> str:
        """Returns the form of a value for whose class there is no method."""
        if isinstance(value, torch.Tensor):
            return describe(value)
        if isinstance(value, self._PLAIN):
            return super().repr_instance(value, level)
        return f"{type(value).__name__}(...)"

    def repr_set(self, value: set[Any], level: int) -> str:
        """Returns the form of a set, without its elements: they have no order but by comparing."""
        return self.repr_instance(value, level)

    def repr_frozenset(self, value: frozenset[Any], level: int) -> str:
        """Returns the form of a frozen set."""
        return self.repr_instance(value, level)

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Returns the form of a dict, in its own order."""
        if level <= 0:
            return "{...}"
        pairs = islice(value.items(), self.maxdict)
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(each, level - 1)}" for key, each in pairs]
        return f"{{{', '.join([*shown, '...'] if len(value) > self.maxdict else shown)}}}"


_words = _Words()


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module."""
    return str(dtype).removeprefix("torch.")


def why_no_matrix_units(ops: Any, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> str:
    """Returns why the matrix units at hand do not multiply a dtype.

    Args:
        ops: the package's registered ops.
        dtypes: those that the matrix units multiply, if there are any.
        dtype: another one.
    """
    if dtypes:
        names = " and ".join(map(dtype_name, dtypes))
        return f"the matrix units here multiply {names}, not {dtype_name(dtype)}"
    if not hasattr(ops, "cpu_isa"):
        return "there are no matrix units here"
    cap = os.environ.get("RUDNN_CPU_ISA")
    why = f" (RUDNN_CPU_ISA is {cap})" if cap else ""
    return f"the instruction set in use, {ops.cpu_isa()}, has no matrix units{why}"


def _end_of(tensor: torch.Tensor) -> int | torch.SymInt:
    """Returns how many bytes from the beginning of its storage on a tensor's elements lie."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        strides = tensor.stride()
        elements = 1 + sum(map(mul, tensor.shape, strides)) - sum(strides)
    return (tensor.storage_offset() + elements) * tensor.element_size()


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
        tensor = self.dense_tensor(name, "be a dense tensor of float32, float16 or bfloat16", value, FLOAT_DTYPES)
        self.served(name, tensor)
        return tensor

    def dense_tensor(self, name: str, requirement: str, value: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Requires a dense tensor of one of some dtypes, as `requirement` says, with its memory, and returns it."""
        if not isinstance(value, torch.Tensor) or isinstance(value, _NOT_DENSE) or value.dtype not in dtypes:
            self.fail(name, requirement, value)
        if value.layout != torch.strided or value.is_nested:
            self.fail(name, requirement, value)
        self.memory(name, value)
        return value

    def memory(self, name: str, value: torch.Tensor) -> None:
        """Requires memory for all elements, where the tensor is no placeholder of a trace.

        A parameter that is sharded or offloaded keeps its shape while its storage is freed. PyTorch's operators read it
        all the same.
        """
        if is_dynamo_compiling() or isinstance(value, FakeTensor) or value.is_meta:
            return
        try:
            there = value.untyped_storage().nbytes()
        except NotImplementedError:
            # The wrappers of function transforms have no storage.
            return
        end = _end_of(value)
        if there < end:
            requirement = f"have memory for all its elements, but its storage has {there} of {end} bytes"
            self.fail(name, requirement, value)

    def served(self, name: str, value: torch.Tensor) -> None:
        """Requires a device that the build serves."""
        if value.device.type not in self._devices:
            self.fail(name, f"be on {' or '.join(sorted(self._devices - {'meta'}))}, which this build serves", value)

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
