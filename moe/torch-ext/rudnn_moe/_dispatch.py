"""DispatchedTokens: the rows of all tokens, grouped by expert, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, call, register_gradient, register_last_derivative
from ._combine import check_combine, check_combine_backward, combine_backward_op, combine_op
from ._errors import INT32_MAX, REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops
from ._options import CombineGradientStrategy, values_of
from ._saved import Saved

if TYPE_CHECKING:
    from ._plan import RoutingPlan

dispatch_op = ops.dispatch.default
dispatch_backward_op = ops.dispatch_backward.default


class CombineGradients(NamedTuple):
    """What `DispatchedTokens.combine_backward` returns.

    Attributes:
        expert_output: `[R, H]`, in the expert output's dtype.
        weights: float32 `[T, k]`.
    """

    expert_output: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, eq=False)
class DispatchedTokens:
    """The rows of T tokens, one for each of their k experts, grouped by expert; `RoutingPlan.dispatch` makes it.

    A slot whose expert is outside `[0, E)` has no row. The rows from `expert_offsets[E]` on are then nobody's: zeros,
    with -1 in the maps. Slot `t * k + j` is the j-th expert of token t. All maps are int32.

    Attributes:
        values: `[T * k, H]`, the input's rows.
        expert_offsets: `[E + 1]`, the first row of each expert.
        row_experts: `[T * k]`, the expert of each row.
        row_tokens: `[T * k]`, the token of each row.
        row_slots: `[T * k]`, the slot of each row.
        slot_rows: `[T, k]`, the row of each slot, -1 where there is none.
        routing: the plan that this follows.
    """

    values: torch.Tensor
    expert_offsets: torch.Tensor
    row_experts: torch.Tensor
    row_tokens: torch.Tensor
    row_slots: torch.Tensor
    slot_rows: torch.Tensor
    routing: RoutingPlan
    _saved: Saved = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.routing, "weights"):
            MoeChecks("DispatchedTokens").fail("routing", "be a RoutingPlan", self.routing)
        saved = Saved(weights=self.routing.weights, row_slots=self.row_slots, slot_rows=self.slot_rows)
        object.__setattr__(self, "_saved", saved)

    def combine(self, expert_output: torch.Tensor) -> torch.Tensor:
        """Sums each token's rows, weighted, and restores the order of tokens.

        `sum_j weights[t, j] * expert_output[slot_rows[t, j]]` in float32 and in the order of j, rounded once.

        Args:
            expert_output: `[T * k, H]`, float32, float16 or bfloat16, any strides, on the device of the weights.

        Returns:
            A contiguous tensor `[T, H]` of the same dtype. Differentiable once in expert_output and the weights.

        Raises:
            MoeError: for an argument that is not as described.

        Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
        """
        weights = self.routing.weights
        arguments = expert_output, weights, self.slot_rows
        if is_dynamo_compiling():
            check_combine("DispatchedTokens.combine", *arguments)
        try:
            return call(combine_op, arguments, expert_output, weights)
        except REFUSALS:
            check_combine("DispatchedTokens.combine", *arguments)
            raise

    def combine_backward(self, expert_output: torch.Tensor, grad_output: torch.Tensor) -> CombineGradients:
        """Returns the gradients of `combine` with the strategy `serial`.

        Args:
            expert_output: `[T * k, H]`, as `combine` got it.
            grad_output: `[T, H]`, of the same dtype, any strides.

        Returns:
            The gradients of the expert output, in its dtype, and of the weights, float32.

        Raises:
            MoeError: for an argument that is not as described.
            RuntimeError: the plan's weights or a map have been changed in place since the dispatch.
        """
        return self._combine_backward("DispatchedTokens.combine_backward", expert_output, grad_output, False)

    def combine_backward_with_strategy(
        self,
        expert_output: torch.Tensor,
        grad_output: torch.Tensor,
        strategy: CombineGradientStrategy | str,
    ) -> CombineGradients:
        """Returns the gradients of `combine`, computed as the strategy says; see `combine_backward`."""
        function = "DispatchedTokens.combine_backward_with_strategy"
        MoeChecks(function).choice("strategy", strategy, values_of(CombineGradientStrategy))
        plane = strategy == CombineGradientStrategy.PLANE
        return self._combine_backward(function, expert_output, grad_output, plane)

    def dispatch_backward(self, grad_values: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input through `RoutingPlan.dispatch`.

        The sum of each token's rows, not multiplied by any weight, in float32 and in the order of j, rounded once.

        Args:
            grad_values: `[T * k, H]`, float32, float16 or bfloat16, any strides: the gradient of `values`.

        Returns:
            A contiguous tensor `[T, H]` of the same dtype.

        Raises:
            MoeError: for an argument that is not as described.
            RuntimeError: a map has been changed in place since the dispatch.
        """
        function = "DispatchedTokens.dispatch_backward"
        arguments = grad_values, self.slot_rows
        self._saved.check(function)
        if is_dynamo_compiling():
            _check_dispatch_backward(function, *arguments)
        try:
            return call(dispatch_backward_op, arguments, grad_values)
        except REFUSALS:
            _check_dispatch_backward(function, *arguments)
            raise

    def _combine_backward(
        self, function: str, expert_output: torch.Tensor, grad_output: torch.Tensor, plane: bool
    ) -> CombineGradients:
        weights = self.routing.weights
        arguments = grad_output, expert_output, weights, self.row_slots, self.slot_rows
        self._saved.check(function)
        if is_dynamo_compiling():
            check_combine_backward(function, *arguments)
        try:
            grads = call(combine_backward_op, (*arguments, plane, True, True), grad_output, expert_output, weights)
        except REFUSALS:
            check_combine_backward(function, *arguments)
            raise
        return CombineGradients(*grads)


def check_dispatch(function: str, input: object, indices: object, experts: int) -> torch.Tensor:
    """Raises MoeError unless the op takes the arguments, and returns the input."""
    check = MoeChecks(function)
    rows = check.float_rows("input", input, "T, H")
    chosen = check.indices("indices", indices, "input", rows)
    check.integer("experts", experts, 1, INT32_MAX - 1)
    check.fewer_than_int32("indices", chosen)
    return rows


def _check_dispatch_backward(function: str, grad_values: object, slot_rows: object) -> torch.Tensor:
    check = MoeChecks(function)
    slot_rows = check.integers("slot_rows", slot_rows, torch.int32)
    check.axes("slot_rows", slot_rows, "T, k")
    grads = check.float_rows("grad_values", grad_values, "R, H")
    if grads.shape[0] != slot_rows.numel():
        check.fail("grad_values", f"have a row for each of the {slot_rows.numel()} slots", grads)
    check.device("slot_rows", slot_rows, "grad_values", grads)
    return grads


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[-1])


def _backward_dispatch(ctx: Any, grad_values: torch.Tensor, *_: object) -> Gradients:
    (slot_rows,) = ctx.saved_tensors
    return dispatch_backward_op(grad_values, slot_rows), None, None


register_gradient(dispatch_op, _setup_dispatch, _backward_dispatch)
register_last_derivative(dispatch_backward_op)


@torch.library.register_fake(add_op_namespace_prefix("dispatch"))
def _(input: torch.Tensor, indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    check_dispatch("dispatch", input, indices, experts)
    rows = indices.numel()
    shapes = (experts + 1,), (rows,), (rows,), (rows,), tuple(indices.shape)
    maps = (input.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return input.new_empty((rows, input.shape[1])), *maps


@torch.library.register_fake(add_op_namespace_prefix("dispatch_backward"))
def _(grad_values: torch.Tensor, slot_rows: torch.Tensor) -> torch.Tensor:
    _check_dispatch_backward("dispatch_backward", grad_values, slot_rows)
    return grad_values.new_empty((slot_rows.shape[0], grad_values.shape[1]))
