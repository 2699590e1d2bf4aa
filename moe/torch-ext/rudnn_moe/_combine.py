"""The op that sums the rows of each token, and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from ._autograd import Gradients, register_gradient, register_last_derivative
from ._errors import MoeChecks
from ._ops import add_op_namespace_prefix, ops

combine_op = ops.combine.default
combine_backward_op = ops.combine_backward.default


def check_combine(function: str, expert_output: object, weights: object, slot_rows: object) -> torch.Tensor:
    """Raises MoeError unless the op takes the arguments, and returns the expert output."""
    check = MoeChecks(function)
    rows = check.float_rows("expert_output", expert_output, "R, H")
    factors = check.float_rows("weights", weights, "T, k")
    check.device("weights", factors, "expert_output", rows)
    if rows.shape[0] != factors.numel():
        check.fail("expert_output", f"have a row for each of the {factors.numel()} weights", rows)
    check.map("slot_rows", slot_rows, tuple(factors.shape), "expert_output", rows)
    return rows


def check_combine_backward(
    function: str, grad: object, expert_output: object, weights: torch.Tensor, row_slots: object, slot_rows: object
) -> None:
    """Raises MoeError unless the op takes the arguments."""
    check = MoeChecks(function)
    rows = check_combine(function, expert_output, weights, slot_rows)
    check.map("row_slots", row_slots, (weights.numel(),), "expert_output", rows)
    check_gradient(check, grad, "expert_output", rows, (weights.shape[0], rows.shape[1]))


def check_gradient(
    check: MoeChecks, grad: object, other_name: str, other: torch.Tensor, shape: tuple[int, ...]
) -> None:
    """Raises MoeError unless `grad_output` has a shape, and the dtype and device of another argument."""
    tensor = check.float_tensor("grad_output", grad)
    if tensor.dtype != other.dtype:
        check.fail("grad_output", f"have the dtype of {other_name}, {other.dtype}", tensor)
    check.shape("grad_output", tensor, shape)
    check.device("grad_output", tensor, other_name, other)


def invert(slot_rows: torch.Tensor) -> torch.Tensor:
    """Returns the slot of each row, int32 `[R]`, and -1 for a row that is nobody's; no row may have two slots."""
    slots = torch.arange(slot_rows.numel(), dtype=torch.int32, device=slot_rows.device)
    rows = slot_rows.flatten().long()
    # One more row takes the slots that have none.
    rows = rows.where((rows >= 0) & (rows < rows.numel()), rows.numel())
    return slots.new_full((slots.numel() + 1,), -1).scatter(0, rows, slots)[:-1]


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_combine(ctx: Any, grad: torch.Tensor) -> Gradients:
    expert_output, weights, slot_rows = ctx.saved_tensors
    MoeChecks("combine_backward").memory("slot_rows", slot_rows)
    need_expert_output, need_weights, _ = ctx.needs_input_grad
    grad_expert_output, grad_weights = combine_backward_op(
        grad, expert_output, weights, invert(slot_rows), slot_rows, False, need_expert_output, need_weights
    )
    return (
        grad_expert_output if need_expert_output else None,
        grad_weights.to(weights.dtype) if need_weights else None,
        None,
    )


register_gradient(combine_op, _setup_combine, _backward_combine)
register_last_derivative(combine_backward_op)


@torch.library.register_fake(add_op_namespace_prefix("combine"))
def _(expert_output: torch.Tensor, weights: torch.Tensor, slot_rows: torch.Tensor) -> torch.Tensor:
    check_combine("combine", expert_output, weights, slot_rows)
    return expert_output.new_empty((slot_rows.shape[0], expert_output.shape[1]))


@torch.library.register_fake(add_op_namespace_prefix("combine_backward"))
def _(
    grad: torch.Tensor,
    expert_output: torch.Tensor,
    weights: torch.Tensor,
    row_slots: torch.Tensor,
    slot_rows: torch.Tensor,
    plane: bool,
    need_expert_output: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_combine_backward("combine_backward", grad, expert_output, weights, row_slots, slot_rows)
    return (
        expert_output.new_empty(expert_output.shape if need_expert_output else (0,)),
        weights.new_empty(weights.shape if need_weights else (0,), dtype=torch.float32),
    )
