"""SwiGluExperts: the experts themselves, on dispatched rows or from input to output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import call, gradient_needed
from ._dispatch import DispatchedTokens
from ._errors import REFUSALS, MoeChecks
from ._experts_ops import (
    check_offsets,
    check_rows,
    check_weights,
    experts_backward_op,
    experts_op,
    experts_training_op,
    mix,
)
from ._options import GroupedStrategy, GroupRoutingOptions, RoutingOptions
from ._route import check_route, choose
from ._route_sigmoid_grouped import check_route_sigmoid_grouped, choose_from_groups
from ._saved import Saved
from ._strategy import uses_tensor_core


class ExpertGradients(NamedTuple):
    """What `ExpertsCache.backward` returns.

    Attributes:
        values: `[R, H]`, the gradient of the dispatched rows, in their dtype.
        gate: float32, of the shape of gate.
        up: float32, of the shape of up; None where gate holds both.
        down: float32, of the shape of down.
    """

    values: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor


class ExpertsCache:
    """What the backward of the experts needs of the forward; `SwiGluExperts.forward_dispatched_training` makes it."""

    def __init__(
        self,
        experts: SwiGluExperts,
        dispatched: DispatchedTokens,
        projections: tuple[torch.Tensor, torch.Tensor],
        strategy: GroupedStrategy | str,
    ) -> None:
        self._weights = experts.gate, experts.up, experts.down
        self._rows = dispatched.values, dispatched.expert_offsets
        self._projections = tuple(projection.detach() for projection in projections)
        self._strategy = strategy
        self._saved = Saved(
            **dict(zip(("gate", "up", "down"), self._weights, strict=True)),
            **dict(zip(("values", "expert_offsets"), self._rows, strict=True)),
        )

    def backward(self, grad_output: torch.Tensor) -> ExpertGradients:
        """Returns the gradients of `SwiGluExperts.forward_dispatched_training` with the forward's strategy.

        Args:
            grad_output: `[R, H]`, the gradient of the output, in its dtype, any strides.

        Raises:
            MoeError: for an argument that is not as described.
            RuntimeError: a weight or the dispatched rows have been changed in place since the forward.
        """
        return self._backward("ExpertsCache.backward", grad_output, self._strategy)

    def backward_with_strategy(self, grad_output: torch.Tensor, strategy: GroupedStrategy | str) -> ExpertGradients:
        """Returns the gradients, computed as the strategy says, whatever the forward's was; see `backward`."""
        return self._backward("ExpertsCache.backward_with_strategy", grad_output, strategy)

    def _backward(self, function: str, grad_output: torch.Tensor, strategy: object) -> ExpertGradients:
        values, expert_offsets = self._rows
        tensor_core = uses_tensor_core(function, strategy, values.dtype)
        self._saved.check(function)
        if is_dynamo_compiling():
            _check_like_values(function, grad_output, values)
        arguments = grad_output, values, expert_offsets, *self._weights, *self._projections
        try:
            flags = tensor_core, True, True, True, True, True
            gradients = call(experts_backward_op, (*arguments, *flags), grad_output, values, *self._weights)
        except REFUSALS:
            _check_like_values(function, grad_output, values)
            raise
        grad_values, grad_gate, grad_up, grad_down = gradients
        return ExpertGradients(grad_values, grad_gate, None if self._weights[1] is None else grad_up, grad_down)


class ExpertsTraining(NamedTuple):
    """What `SwiGluExperts.forward_dispatched_training` returns.

    Attributes:
        output: `[R, H]`, the experts' output for the dispatched rows.
        cache: what has the backward.
    """

    output: torch.Tensor
    cache: ExpertsCache


class SwiGluExperts:
    """The weights of E bias-free experts, checked once. Expert e computes `down[e] (silu(gate[e] x) * (up[e] x))`.

    In float32 arithmetic; silu times the other factor is rounded to the weights' dtype before it meets down, and the
    result is rounded once. An expert without tokens costs nothing and gets gradients that are exactly 0.

    Args:
        gate: `[E, I, H]`, float32, float16 or bfloat16. Rows that are contiguous are used where they lie, others copied
            at every call.
        up: the same; or None if gate is `[E, 2 I, H]` and holds the rows of gate, followed by those of up, for each
            expert.
        down: `[E, H, I]`, of the same dtype and on the same device.

    Raises:
        MoeError: for an argument that is not as described.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the experts of Mixtral, Qwen3-MoE and DeepSeek-V3.
    """

    def __init__(self, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor) -> None:
        check_weights("SwiGluExperts", gate, up, down)
        self.gate = gate
        self.up = up
        self.down = down

    def forward_dispatched(
        self, dispatched: DispatchedTokens, strategy: GroupedStrategy | str = "auto"
    ) -> torch.Tensor:
        """Returns the experts' output for dispatched rows, `[R, H]` in their dtype.

        A row's result does not depend on the others. Rows that are nobody's give zeros.

        Args:
            dispatched: rows of the weights' dtype, on their device, for as many experts.
            strategy: how the products are computed.

        Returns:
            A contiguous tensor. Differentiable once in the rows and the weights.

        Raises:
            MoeError: for an argument that is not as described.
        """
        function = "SwiGluExperts.forward_dispatched"
        tensor_core = uses_tensor_core(function, strategy, self.down.dtype)
        if is_dynamo_compiling():
            self._check_dispatched(function, dispatched)
        try:
            leaves = dispatched.values, self.gate, self.up, self.down
            arguments = dispatched.values, dispatched.expert_offsets, self.gate, self.up, self.down, tensor_core
            if gradient_needed(*leaves):
                return experts_training_op(*arguments)[0]
            return call(experts_op, arguments, *leaves)
        except REFUSALS:
            self._check_dispatched(function, dispatched)
            raise

    def forward_dispatched_training(
        self, dispatched: DispatchedTokens, strategy: GroupedStrategy | str = "auto"
    ) -> ExpertsTraining:
        """Returns what `forward_dispatched` does, and a cache that has the backward to be called by hand.

        Args:
            dispatched: rows of the weights' dtype, on their device, for as many experts.
            strategy: how the products are computed.

        Returns:
            The output `[R, H]`, and the cache.

        Raises:
            MoeError: for an argument that is not as described.
        """
        function = "SwiGluExperts.forward_dispatched_training"
        tensor_core = uses_tensor_core(function, strategy, self.down.dtype)
        if is_dynamo_compiling():
            self._check_dispatched(function, dispatched)
        try:
            leaves = dispatched.values, self.gate, self.up, self.down
            arguments = dispatched.values, dispatched.expert_offsets, self.gate, self.up, self.down, tensor_core
            output, *projections = call(experts_training_op, arguments, *leaves)
        except REFUSALS:
            self._check_dispatched(function, dispatched)
            raise
        gate_projection, up_projection = projections
        return ExpertsTraining(output, ExpertsCache(self, dispatched, (gate_projection, up_projection), strategy))

    def forward(
        self,
        input: torch.Tensor,
        logits: torch.Tensor,
        options: RoutingOptions,
        strategy: GroupedStrategy | str = "auto",
    ) -> torch.Tensor:
        """Routes with `route`, dispatches, runs the experts, and combines their results.

        Args:
            input: `[T, H]`, of the weights' dtype, on their device, any strides.
            logits: `[T, E]`, float32, float16 or bfloat16, any strides.
            options: how many experts, and whether their weights are normalised.
            strategy: how the products are computed.

        Returns:
            A contiguous tensor `[T, H]` of the input's dtype. Differentiable once in input, logits and the weights.

        Raises:
            MoeError: for an argument that is not as described.
        """
        function = "SwiGluExperts.forward"
        tensor_core = uses_tensor_core(function, strategy, self.down.dtype)
        if is_dynamo_compiling():
            self._check_routed(function, input, check_route(function, logits, options))
        try:
            self._require_fitting(input, logits)
            indices, weights = choose(logits, options)
            return mix(input, indices, weights, self.gate, self.up, self.down, tensor_core)
        except REFUSALS:
            self._check_routed(function, input, check_route(function, logits, options))
            raise

    def forward_sigmoid_grouped(
        self,
        input: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        options: GroupRoutingOptions,
        strategy: GroupedStrategy | str = "auto",
    ) -> torch.Tensor:
        """Routes with `route_sigmoid_grouped`, dispatches, runs the experts, and combines their results.

        Args:
            input: `[T, H]`, of the weights' dtype, on their device, any strides.
            logits: `[T, E]`, float32, float16 or bfloat16, any strides.
            bias: float32 `[E]`, or None; it takes part in the selection only.
            options: the sizes of the router.
            strategy: how the products are computed.

        Returns:
            A contiguous tensor `[T, H]` of the input's dtype. Differentiable once in input, logits and the weights.

        Raises:
            MoeError: for an argument that is not as described.
        """
        function = "SwiGluExperts.forward_sigmoid_grouped"
        tensor_core = uses_tensor_core(function, strategy, self.down.dtype)
        if is_dynamo_compiling():
            self._check_routed(function, input, check_route_sigmoid_grouped(function, logits, bias, options))
        try:
            self._require_fitting(input, logits)
            indices, weights = choose_from_groups(logits, bias, options)
            return mix(input, indices, weights, self.gate, self.up, self.down, tensor_core)
        except REFUSALS:
            self._check_routed(function, input, check_route_sigmoid_grouped(function, logits, bias, options))
            raise

    def _require_fitting(self, input: torch.Tensor, logits: torch.Tensor) -> None:
        """Raises before the router is launched where what follows would refuse, or take other experts for its own."""
        down = self.down
        if (
            logits.dim() != 2
            or logits.shape[1] != down.shape[0]
            or input.shape != (logits.shape[0], down.shape[1])
            or input.dtype is not down.dtype
            or not input.device == logits.device == down.device
        ):
            raise ValueError("input and logits must go with the weights")

    def _check_routed(self, function: str, input: object, logits: torch.Tensor) -> None:
        check = MoeChecks(function)
        rows = check_rows(check, "input", input, self.down)
        if logits.shape != (rows.shape[0], self.down.shape[0]):
            shape = rows.shape[0], self.down.shape[0]
            check.fail("logits", f"have shape {shape}: the rows of input, the experts of the weights", logits)
        check.device("logits", logits, "input", rows)

    def _check_dispatched(self, function: str, dispatched: object) -> None:
        check = MoeChecks(function)
        check.instance("dispatched", dispatched, DispatchedTokens)
        assert isinstance(dispatched, DispatchedTokens)
        check_rows(check, "dispatched.values", dispatched.values, self.down)
        check_offsets(check, "dispatched.expert_offsets", dispatched.expert_offsets, self.down)


def _check_like_values(function: str, grad_output: object, values: torch.Tensor) -> None:
    check = MoeChecks(function)
    grads = check.float_tensor("grad_output", grad_output)
    check.dtype("grad_output", grads, values.dtype)
    check.shape("grad_output", grads, tuple(values.shape))
    check.device("grad_output", grads, "values", values)
