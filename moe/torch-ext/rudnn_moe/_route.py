"""route."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import reference
from ._autograd import Gradients, call, register_gradient
from ._errors import INT32_MAX, REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops
from ._options import RouterScoring, RouterWeightOptions, RoutingOptions
from ._plan import RoutingPlan, plan_of_router
from ._selected_router import MAX_SELECTED

_route_op = ops.route.default


def route(logits: torch.Tensor, options: RoutingOptions) -> RoutingPlan:
    """Chooses the experts of each token by a softmax over all of them.

    The top_k largest scores, in descending order; among equal ones the lower expert comes first. In float32
    arithmetic, rounded once. With `renormalize` the chosen scores are divided by their sum plus 1e-20. The weights of a
    row with NaN or +inf, or with only -inf, are NaN; its experts are valid and distinct all the same.

    Args:
        logits: `[T, E]`, float32, float16 or bfloat16, any strides, with E >= top_k.
        options: how many experts, and whether their weights are normalised.

    Returns:
        A plan with int32 indices and with weights in the logits' dtype, `[T, top_k]` each. The weights are
        differentiable once in the logits; the choice itself is fixed.

    Raises:
        MoeError: for an argument that is not as described.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; the routers of Mixtral and Qwen3-MoE.
    """
    if is_dynamo_compiling():
        check_route("route", logits, options)
    try:
        indices, weights = choose(logits, options)
    except REFUSALS:
        check_route("route", logits, options)
        raise
    return plan_of_router(indices, weights, logits.shape[1])


def choose(logits: torch.Tensor, options: RoutingOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns indices and weights as `route` does, with no words for a refusal."""
    if not isinstance(options, RoutingOptions):
        raise TypeError("options must be RoutingOptions")
    return call(_route_op, (logits, options.top_k, options.renormalize), logits)


def check_route(function: str, logits: object, options: object) -> torch.Tensor:
    """Raises MoeError unless `route` takes the arguments, and returns the logits."""
    check = MoeChecks(function)
    check.instance("options", options, RoutingOptions)
    assert isinstance(options, RoutingOptions)
    return _check_op(function, logits, options.top_k)


def _check_op(function: str, logits: object, top_k: int) -> torch.Tensor:
    check = MoeChecks(function)
    rows = check.float_rows("logits", logits, "T, E")
    if rows.shape[1] > INT32_MAX:
        check.fail("logits", "have fewer than 2^31 experts", rows)
    if rows.shape[1] < max(top_k, 1):
        check.fail("logits", f"have at least {max(top_k, 1)} experts, the options' top_k", rows)
    return rows


def _setup_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, ctx.renormalize = inputs
    ctx.save_for_backward(logits, output[0])


def _backward_route(ctx: Any, _: object, grad_weights: torch.Tensor) -> Gradients:
    logits, indices = ctx.saved_tensors
    check = MoeChecks("route_backward")
    check.memory("grad_weights", grad_weights)
    grads = grad_weights.float()
    if indices.shape[1] <= MAX_SELECTED:
        softmax = RouterScoring.SOFTMAX.value
        return ops.selected_router_backward(logits, indices, grads, softmax, ctx.renormalize, 1.0), None, None
    check.memory("logits", logits)
    check.memory("indices", indices)
    options = RouterWeightOptions(RouterScoring.SOFTMAX, ctx.renormalize)
    return reference.selected_router_backward(logits, indices, grads, options), None, None


register_gradient(_route_op, _setup_route, _backward_route)


@torch.library.register_fake(add_op_namespace_prefix("route"))
def _(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check_op("route", logits, top_k)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
