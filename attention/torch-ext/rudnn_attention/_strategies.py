"""What serves a call: which strategies can, in which order they are preferred, and how each is run."""

from __future__ import annotations

from typing import Any

import torch

from ._autograd import call
from ._checks import FLOAT_DTYPES, dtype_name, why_no_matrix_units
from ._errors import DEVICES
from ._fallback import attention_fallback_backward_op, attention_fallback_op
from ._ops import ops
from ._options import AttentionStrategy

attention_op = ops.attention.default
attention_backward_op = ops.attention_backward.default

_accelerated_names = ops.accelerated_dtypes().split(",")

ACCELERATED_DTYPES = tuple(dtype for dtype in FLOAT_DTYPES if dtype_name(dtype) in _accelerated_names)
"""What the hardware at hand has matrix units for."""

Arguments = tuple[Any, ...]
"""Those of the op `attention` up to the window: tensors, mask and bias of four axes, and numbers."""

PREFERENCE = (AttentionStrategy.FLASH_ACCELERATED, AttentionStrategy.FLASH_UNIT, AttentionStrategy.FALLBACK)
"""The rule by which a strategy is chosen where none may be measured: the first that serves the call."""


def why_not(strategy: AttentionStrategy, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why a strategy cannot serve tensors of a dtype on a device, or nothing."""
    if strategy == AttentionStrategy.FALLBACK:
        return ""
    if device.type not in DEVICES:
        served = " and ".join(sorted(DEVICES - {"meta"})) or "no device"
        return f"this build has kernels for {served}, not for {device.type}"
    if strategy == AttentionStrategy.FLASH_ACCELERATED and dtype not in ACCELERATED_DTYPES:
        return why_no_matrix_units(ops, ACCELERATED_DTYPES, dtype)
    return ""


def serving(dtype: torch.dtype, device: torch.device) -> list[AttentionStrategy]:
    """Returns the strategies that serve tensors of a dtype on a device, the preferred one first."""
    return [strategy for strategy in PREFERENCE if not why_not(strategy, dtype, device)]


def run(strategy: AttentionStrategy, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp, with a gradient where one may be asked for."""
    query, key, value, _, bias, sinks, *_ = arguments
    leaves = query, key, value, bias, sinks
    if strategy == AttentionStrategy.FALLBACK:
        return call(attention_fallback_op, arguments, *leaves)
    return call(attention_op, (*arguments, strategy == AttentionStrategy.FLASH_ACCELERATED), *leaves)


def run_backward(
    strategy: AttentionStrategy,
    arguments: Arguments,
    grad: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key, value, bias and sinks, empty where not needed."""
    tensors, numbers = arguments[:6], arguments[6:]
    if strategy == AttentionStrategy.FALLBACK:
        return attention_fallback_backward_op(grad, *tensors, lse, *numbers, *needed)
    accelerated = strategy == AttentionStrategy.FLASH_ACCELERATED
    return attention_backward_op(grad, *tensors, output, lse, *numbers, accelerated, *needed)
