"""experts_plan: how the products of the experts are computed, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._checks import FLOAT_DTYPES, dtype_name, why_no_matrix_units
from ._errors import DEVICES, MoeChecks
from ._ops import ops
from ._options import GroupedStrategy, values_of

_tensor_core_names = ops.tensor_core_dtypes().split(",")

TENSOR_CORE_DTYPES = tuple(dtype for dtype in FLOAT_DTYPES if dtype_name(dtype) in _tensor_core_names)
"""What the hardware at hand has matrix units for."""


class ExpertsPlan(NamedTuple):
    """What `experts_plan` returns.

    Attributes:
        strategy: the one that runs, `scalar` or `tensor_core`.
        reasons: why each of the others does not.
    """

    strategy: GroupedStrategy
    reasons: dict[GroupedStrategy, str]


def experts_plan(
    dtype: torch.dtype, device: torch.device | str, strategy: GroupedStrategy | str = "auto"
) -> ExpertsPlan:
    """Tells which strategy the experts would run with, and why not with the others.

    Args:
        dtype: of the expert weights, float32, float16 or bfloat16.
        device: of the expert weights, one that the loaded build serves.
        strategy: as it would be given to the experts.

    Returns:
        The strategy, and the reasons against the others.

    Raises:
        MoeError: for an argument that is not as described, or a strategy that the hardware does not support.
    """
    check = MoeChecks("experts_plan")
    if dtype not in FLOAT_DTYPES:
        check.fail("dtype", "be torch.float32, torch.float16 or torch.bfloat16", dtype)
    if _device_type(device) not in DEVICES:
        check.fail("device", f"be one of {', '.join(sorted(DEVICES))}, which this build serves", device)
    tensor_core = uses_tensor_core("experts_plan", strategy, dtype)
    if tensor_core:
        why = "tensor_core was asked for" if strategy == GroupedStrategy.TENSOR_CORE else "auto takes matrix units"
        return ExpertsPlan(GroupedStrategy.TENSOR_CORE, {GroupedStrategy.SCALAR: why})
    why = _why_no_tensor_core(dtype) or "scalar was asked for"
    return ExpertsPlan(GroupedStrategy.SCALAR, {GroupedStrategy.TENSOR_CORE: why})


def _device_type(device: object) -> str:
    """Returns a device's type, or nothing where there is no such device."""
    try:
        return torch.device(device).type if isinstance(device, torch.device | str) else ""
    except RuntimeError:
        return ""


def uses_tensor_core(function: str, strategy: object, dtype: torch.dtype) -> bool:
    """Tells whether a strategy means matrix units; a refusal names the function."""
    if strategy == "auto":
        return dtype in TENSOR_CORE_DTYPES
    check = MoeChecks(function)
    check.choice("strategy", strategy, values_of(GroupedStrategy))
    reason = _why_no_tensor_core(dtype)
    if reason and strategy == GroupedStrategy.TENSOR_CORE:
        check.fail("strategy", f"be scalar or auto, for {reason}", strategy)
    return not reason and strategy != GroupedStrategy.SCALAR


def _why_no_tensor_core(dtype: torch.dtype) -> str:
    """Returns why `tensor_core` is not supported, or nothing."""
    if dtype in TENSOR_CORE_DTYPES:
        return ""
    return why_no_matrix_units(ops, TENSOR_CORE_DTYPES, dtype)
