"""The ops of the experts: checks, gradients and fakes, and their chain without words for a refusal."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, below_autograd, gradient_needed, register_gradient, register_last_derivative
from ._checks import dtype_name
from ._combine import combine_backward_op, combine_op
from ._dispatch import dispatch_backward_op, dispatch_op
from ._errors import MoeChecks
from ._ops import add_op_namespace_prefix, ops

experts_op = ops.experts.default
experts_training_op = ops.experts_training.default
experts_backward_op = ops.experts_backward.default
fused_experts_op = ops.fused_experts.default


def mix(
    input: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    tensor_core: bool,
) -> torch.Tensor:
    """Returns each token's experts' results, weighted and summed, with no words for a refusal."""
    if not gradient_needed(input, weights, gate, up, down):
        fused_arguments = input, indices, weights, gate, up, down, tensor_core
        if is_dynamo_compiling():
            return fused_experts_op(*fused_arguments)
        with below_autograd():
            return fused_experts_op(*fused_arguments)
    values, expert_offsets, *_, slot_rows = dispatch_op(input, indices, down.shape[0])
    arguments = values, expert_offsets, gate, up, down, tensor_core
    trained = gradient_needed(input, gate, up, down)
    output = experts_training_op(*arguments)[0] if trained else experts_op(*arguments)
    return combine_op(output, weights, slot_rows)


def check_weights(
    function: str, gate: object, up: object, down: object, *, names: tuple[str, str, str] = ("gate", "up", "down")
) -> torch.Tensor:
    """Raises MoeError unless the expert weights, which the caller knows by `names`, go together, and returns down."""
    check = MoeChecks(function)
    gate_name, up_name, down_name = names
    gates = check.float_tensor(gate_name, gate)
    check.axes(gate_name, gates, "E, I, H")
    experts, rows, hidden = gates.shape
    if gates.numel() == 0:
        check.fail(gate_name, "not be empty", gates)
    if up is None and rows % 2 != 0:
        check.fail(gate_name, f"have an even number of rows for each expert where {up_name} is None", gates)

    def check_like_gate(name: str, weight: object, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = check.float_tensor(name, weight)
        if tensor.dtype != gates.dtype:
            check.fail(name, f"be {dtype_name(gates.dtype)}, as {gate_name} is", tensor)
        if tuple(tensor.shape) != shape:
            whole = " for gate and up" if up is None else ""
            check.fail(name, f"have shape {shape}, to go with {gate_name} of shape {tuple(gates.shape)}{whole}", tensor)
        check.device(name, tensor, gate_name, gates)
        return tensor

    if up is not None:
        check_like_gate(up_name, up, tuple(gates.shape))
    intermediate = rows if up is not None else rows // 2
    return check_like_gate(down_name, down, (experts, hidden, intermediate))


def check_rows(check: MoeChecks, name: str, value: object, down: torch.Tensor) -> torch.Tensor:
    """Requires rows that the experts take, and returns them."""
    rows = check.float_rows(name, value)
    if rows.dtype != down.dtype:
        check.fail(name, f"be {dtype_name(down.dtype)}, as the weights are", rows)
    if rows.shape[1] != down.shape[1]:
        check.fail(name, f"have rows of {down.shape[1]} elements, as the weights ask", rows)
    check.device(name, rows, "down", down)
    return rows


def check_offsets(check: MoeChecks, name: str, value: object, down: torch.Tensor) -> None:
    """Requires the first row of each expert, and the end."""
    check.map(name, value, (down.shape[0] + 1,), "down", down)


def check_mix(function: str, input: object, indices: object, weights: object, down: torch.Tensor) -> None:
    """Raises MoeError unless tokens, their experts and their weights go together."""
    check = MoeChecks(function)
    rows = check_rows(check, "input", input, down)
    chosen = check.indices("indices", indices, "input", rows)
    check.fewer_than_int32("indices", chosen)
    factors = check.float_tensor("weights", weights)
    if factors.shape != chosen.shape:
        check.fail("weights", f"have the shape {tuple(chosen.shape)} of indices", factors)
    check.device("weights", factors, "input", rows)


def _setup_experts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.tensor_core = inputs
    ctx.save_for_backward(*tensors)


def _backward_experts(ctx: Any, grad: torch.Tensor) -> Gradients:
    tensors = ctx.saved_tensors
    _, *projections = experts_training_op(*tensors, ctx.tensor_core)
    return _gradients(grad, tensors, projections, ctx.tensor_core, ctx.needs_input_grad)


def _setup_experts_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.tensor_core = inputs
    _, *projections = output
    ctx.mark_non_differentiable(*projections)
    ctx.save_for_backward(*tensors, *projections)


def _backward_experts_training(ctx: Any, grad: torch.Tensor, *_: object) -> Gradients:
    # Unpacked once: hooks on saved tensors, such as checkpointing's, allow no more.
    saved = ctx.saved_tensors
    return _gradients(grad, saved[:-2], saved[-2:], ctx.tensor_core, ctx.needs_input_grad)


def _gradients(grad: torch.Tensor, tensors: Any, projections: Any, tensor_core: bool, needed: Any) -> Gradients:
    """Returns the gradients of the arguments of the ops `experts` and `experts_training`, the flag's included."""
    need_values, _, need_gate, need_up, need_down, _ = needed
    grad_values, grad_gate, grad_up, grad_down = experts_backward_op(
        grad, *tensors, *projections, tensor_core, False, need_values, need_gate, need_up, need_down
    )
    return (
        grad_values if need_values else None,
        None,
        grad_gate if need_gate else None,
        grad_up if need_up else None,
        grad_down if need_down else None,
        None,
    )


def _setup_fused_experts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.tensor_core = inputs
    ctx.save_for_backward(*tensors)


def _backward_fused_experts(ctx: Any, grad: torch.Tensor) -> Gradients:
    input, indices, weights, gate, up, down = ctx.saved_tensors
    need_input, _, need_weights, *need_experts, _ = ctx.needs_input_grad
    values, expert_offsets, _, _, row_slots, slot_rows = dispatch_op(input, indices, down.shape[0])
    tensors = values, expert_offsets, gate, up, down
    output, *projections = experts_training_op(*tensors, ctx.tensor_core)
    need_output = need_input or any(need_experts)
    grad_output, grad_weights = combine_backward_op(
        grad, output, weights, row_slots, slot_rows, False, need_output, need_weights
    )
    needed = need_input, False, *need_experts, False
    gradients: Gradients = (None,) * 6
    if need_output:
        gradients = _gradients(grad_output, tensors, projections, ctx.tensor_core, needed)
    grad_values, _, *grad_experts, _ = gradients
    return (
        None if grad_values is None else dispatch_backward_op(grad_values, slot_rows),
        None,
        grad_weights.to(weights.dtype) if need_weights else None,
        *grad_experts,
        None,
    )


register_gradient(experts_op, _setup_experts, _backward_experts)
register_gradient(experts_training_op, _setup_experts_training, _backward_experts_training)
register_gradient(fused_experts_op, _setup_fused_experts, _backward_fused_experts)
register_last_derivative(experts_backward_op)


def _check_experts(
    op: str,
    values: torch.Tensor,
    expert_offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
) -> MoeChecks:
    check = MoeChecks(op)
    check_weights(op, gate, up, down)
    check_rows(check, "values", values, down)
    check_offsets(check, "expert_offsets", expert_offsets, down)
    return check


@torch.library.register_fake(add_op_namespace_prefix("experts"))
def _(
    values: torch.Tensor,
    expert_offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    tensor_core: bool,
) -> torch.Tensor:
    _check_experts("experts", values, expert_offsets, gate, up, down)
    return values.new_empty(values.shape)


@torch.library.register_fake(add_op_namespace_prefix("experts_training"))
def _(
    values: torch.Tensor,
    expert_offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    tensor_core: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_experts("experts_training", values, expert_offsets, gate, up, down)
    shape = values.shape[0], down.shape[2]
    return values.new_empty(values.shape), values.new_empty(shape), values.new_empty(shape)


@torch.library.register_fake(add_op_namespace_prefix("experts_backward"))
def _(
    grad: torch.Tensor,
    values: torch.Tensor,
    expert_offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    gate_projection: torch.Tensor,
    up_projection: torch.Tensor,
    tensor_core: bool,
    float32_weights: bool,
    need_values: bool,
    need_gate: bool,
    need_up: bool,
    need_down: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check = _check_experts("experts_backward", values, expert_offsets, gate, up, down)
    check.like("grad", grad, "values", values)
    for name, projection in (("gate_projection", gate_projection), ("up_projection", up_projection)):
        check.dtype(name, projection, values.dtype)
        check.shape(name, projection, (values.shape[0], down.shape[2]))
        check.device(name, projection, "values", values)

    def gradient(needed: bool, weight: torch.Tensor | None) -> torch.Tensor:
        shape = weight.shape if needed and weight is not None else (0,)
        return values.new_empty(shape, dtype=torch.float32 if float32_weights else values.dtype)

    grad_weights = gradient(need_gate, gate), gradient(need_up, up), gradient(need_down, down)
    return values.new_empty(values.shape if need_values else (0,)), *grad_weights


@torch.library.register_fake(add_op_namespace_prefix("fused_experts"))
def _(
    input: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    tensor_core: bool,
) -> torch.Tensor:
    check_weights("fused_experts", gate, up, down)
    check_mix("fused_experts", input, indices, weights, down)
    return input.new_empty(input.shape)
