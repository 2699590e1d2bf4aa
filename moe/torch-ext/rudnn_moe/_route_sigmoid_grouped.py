"""route_sigmoid_grouped."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, call, register_gradient
from ._errors import REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops
from ._options import MAX_GROUPED_EXPERTS, GroupRoutingOptions, RouterScoring
from ._plan import RoutingPlan, plan_of_router

_route_sigmoid_grouped_op = ops.route_sigmoid_grouped.default


def route_sigmoid_grouped(logits: torch.Tensor, bias: torch.Tensor | None, options: GroupRoutingOptions) -> RoutingPlan:
    """Chooses the experts of each token from the best groups, by sigmoid scores.

    Scores are `sigmoid(logits)`, corrected scores have the bias added. A group's score is the sum of its two best
    corrected scores, or its best one. From the selected groups come the top_k experts with the largest corrected
    scores, in descending order; among equals the lower id comes first, for groups and for experts. Their weights are
    the scores without the bias, divided by their sum plus 1e-20 with `renormalize`, times the scale. In float32
    arithmetic, rounded once. The weights of a row with NaN are NaN; its experts are valid and distinct all the same.

    Args:
        logits: `[T, E]`, float32, float16 or bfloat16, any strides, with E <= 1024.
        bias: float32 `[E]`, or None. It takes part in the selection only and has no gradient.
        options: the sizes; groups divides E, with `group_top_two` E / groups >= 2, and top_k is at most
            selected_groups * E / groups.

    Returns:
        A plan with int32 indices and with weights in the logits' dtype, `[T, top_k]` each. The weights are
        differentiable once in the logits; the choice itself is fixed.

    Raises:
        MoeError: for an argument that is not as described.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    function = "route_sigmoid_grouped"
    if is_dynamo_compiling():
        check_route_sigmoid_grouped(function, logits, bias, options)
    try:
        indices, weights = choose_from_groups(logits, bias, options)
    except REFUSALS:
        check_route_sigmoid_grouped(function, logits, bias, options)
        raise
    return plan_of_router(indices, weights, logits.shape[1])


def choose_from_groups(
    logits: torch.Tensor, bias: torch.Tensor | None, options: GroupRoutingOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns indices and weights as `route_sigmoid_grouped` does, with no words for a refusal."""
    if not isinstance(options, GroupRoutingOptions):
        raise TypeError("options must be GroupRoutingOptions")
    sizes = options.top_k, options.groups, options.selected_groups
    flags = options.group_top_two, options.renormalize
    return call(_route_sigmoid_grouped_op, (logits, bias, *sizes, *flags, options.scale), logits)


def check_route_sigmoid_grouped(function: str, logits: object, bias: object, options: object) -> torch.Tensor:
    """Raises MoeError unless `route_sigmoid_grouped` takes the arguments, and returns the logits."""
    check = MoeChecks(function)
    check.instance("options", options, GroupRoutingOptions)
    assert isinstance(options, GroupRoutingOptions)
    rows = check.float_rows("logits", logits, "T, E")
    _check_sizes(check, rows, options.top_k, options.groups, options.selected_groups, options.group_top_two)
    _check_bias(check, rows, bias)
    return rows


def _check_sizes(
    check: MoeChecks, logits: torch.Tensor, top_k: int, groups: int, selected_groups: int, group_top_two: bool
) -> None:
    experts = logits.shape[1]
    if not 1 <= experts <= MAX_GROUPED_EXPERTS:
        check.fail("logits", f"have 1 to {MAX_GROUPED_EXPERTS} experts", logits)
    if experts % groups != 0:
        check.fail("options.groups", f"divide the {experts} experts of logits", groups)
    size = experts // groups
    if group_top_two and size < 2:
        check.fail("options.groups", f"leave at least 2 of logits' {experts} experts to a group_top_two group", groups)
    if top_k > selected_groups * size:
        check.fail("options.top_k", f"be at most {selected_groups * size}, the experts of the selected groups", top_k)


def _check_bias(check: MoeChecks, logits: torch.Tensor, bias: object) -> None:
    if bias is not None:
        tensor = check.float_tensor("bias", bias)
        check.dtype("bias", tensor, torch.float32)
        if tensor.shape != logits.shape[1:]:
            check.fail("bias", f"have shape {tuple(logits.shape[1:])}, one for each expert of logits", tensor)
        check.device("bias", tensor, "logits", logits)


def _setup_route_sigmoid_grouped(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, *_, ctx.renormalize, ctx.scale = inputs
    ctx.save_for_backward(logits, output[0])


def _backward_route_sigmoid_grouped(ctx: Any, _: object, grad_weights: torch.Tensor) -> Gradients:
    logits, indices = ctx.saved_tensors
    MoeChecks("route_sigmoid_grouped_backward").memory("grad_weights", grad_weights)
    sigmoid = RouterScoring.SIGMOID.value
    grad = ops.selected_router_backward(logits, indices, grad_weights.float(), sigmoid, ctx.renormalize, ctx.scale)
    return grad, *[None] * 7


register_gradient(_route_sigmoid_grouped_op, _setup_route_sigmoid_grouped, _backward_route_sigmoid_grouped)


@torch.library.register_fake(add_op_namespace_prefix("route_sigmoid_grouped"))
def _(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    groups: int,
    selected_groups: int,
    group_top_two: bool,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    check = MoeChecks("route_sigmoid_grouped")
    check.float_rows("logits", logits, "T, E")
    _check_sizes(check, logits, top_k, groups, selected_groups, group_top_two)
    _check_bias(check, logits, bias)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
