"""RoutingPlan: which experts each token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import call
from ._dispatch import DispatchedTokens, check_dispatch, dispatch_op
from ._errors import INDEX_DTYPES, INT32_MAX, REFUSALS, MoeChecks
from ._options import RouterWeightOptions
from ._saved import Saved
from ._selected_router import gradient_of, weights_of


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Which experts each token goes to, and with which weights; `route` makes one, and callers may make their own.

    Attributes:
        expert_indices: `[T, k]`, int32 or int64, any strides, k >= 1. An index outside `[0, experts)` marks a choice
            that is left out: it adds nothing, and its weight gets the gradient 0.
        weights: `[T, k]`, float32, float16 or bfloat16, any strides, on the device of the indices.
        experts: how many experts there are, 1 to 2^31 - 2.

    Raises:
        MoeError: for an argument that is not as described.
    """

    expert_indices: torch.Tensor
    weights: torch.Tensor
    experts: int

    def __post_init__(self) -> None:
        check = MoeChecks("RoutingPlan")
        indices = check.integers("expert_indices", self.expert_indices, *INDEX_DTYPES)
        check.axes("expert_indices", indices, "T, k")
        if indices.shape[1] < 1:
            check.fail("expert_indices", "have at least one expert for each token", indices)
        weights = check.float_tensor("weights", self.weights)
        if weights.shape != indices.shape:
            check.fail("weights", f"have the shape {tuple(indices.shape)} of expert_indices", weights)
        check.device("weights", weights, "expert_indices", indices)
        check.integer("experts", self.experts, 1, INT32_MAX - 1)

    def dispatch(self, input: torch.Tensor) -> DispatchedTokens:
        """Copies each token's row for each of its experts, grouped by expert.

        No token is dropped for want of capacity. Within an expert the rows are in the order of tokens.

        Args:
            input: `[T, H]`, float32, float16 or bfloat16, any strides, on the device of the plan.

        Returns:
            The rows and the maps between them and the tokens. `values` is differentiable once in input.

        Raises:
            MoeError: for an argument that is not as described.
        """
        function = "RoutingPlan.dispatch"
        arguments = input, self.expert_indices, self.experts
        if is_dynamo_compiling():
            check_dispatch(function, *arguments)
        try:
            values, offsets, *maps = call(dispatch_op, arguments, input)
        except REFUSALS:
            check_dispatch(function, *arguments)
            raise
        row_experts, row_tokens, row_slots, slot_rows = maps
        return DispatchedTokens(values, offsets, row_experts, row_tokens, row_slots, slot_rows, self)

    def into_training(self, logits: torch.Tensor, options: RouterWeightOptions) -> RouterTrainingPlan:
        """Keeps the selection and computes the weights again, in float32, so that they can be differentiated.

        Args:
            logits: `[T, E]`, float32, float16 or bfloat16, any strides; E is `experts`.
            options: how logits become weights; what made this plan, or something else.

        Returns:
            A plan with the new weights, and their backward.

        Raises:
            MoeError: for an argument that is not as described.
        """
        return RouterTrainingPlan(self, logits, options)


def plan_of_router(indices: torch.Tensor, weights: torch.Tensor, experts: int) -> RoutingPlan:
    """Returns the plan that a router's op has made, which needs no check."""
    if is_dynamo_compiling():
        return RoutingPlan(indices, weights, experts)
    plan = object.__new__(RoutingPlan)
    plan.__dict__.update(expert_indices=indices, weights=weights, experts=experts)
    return plan


@dataclass(frozen=True, eq=False)
class RouterTrainingPlan:
    """A routing with weights from `selected_router_weights`; `RoutingPlan.into_training` makes it.

    Attributes:
        selection: the plan whose selection this keeps.
        logits: `[T, E]`.
        options: how logits become weights.
        routing: the plan with the new weights, float32.
    """

    selection: RoutingPlan
    logits: torch.Tensor
    options: RouterWeightOptions
    routing: RoutingPlan = field(init=False)
    _saved: Saved = field(init=False, repr=False)

    def __post_init__(self) -> None:
        function = "RoutingPlan.into_training"
        check = MoeChecks(function)
        check.instance("selection", self.selection, RoutingPlan)
        check.memory("selection.expert_indices", self.selection.expert_indices)
        indices, experts = self.selection.expert_indices.contiguous(), self.selection.experts
        weights = weights_of(function, self.logits, indices, self.options)
        if self.logits.shape[1] != experts:
            check.fail("logits", f"have {experts} experts", self.logits)
        object.__setattr__(self, "routing", plan_of_router(indices, weights, experts))
        object.__setattr__(self, "_saved", Saved(logits=self.logits, expert_indices=indices))

    def backward(self, grad_weights: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the logits: `[T, E]` in their dtype.

        Args:
            grad_weights: float32 `[T, k]`, the gradient of the weights, any strides.

        Raises:
            MoeError: for an argument that is not as described.
            RuntimeError: the logits or the indices have been changed in place since.
        """
        function = "RouterTrainingPlan.backward"
        self._saved.check(function)
        return gradient_of(function, self.logits, self.routing.expert_indices, grad_weights, self.options)
