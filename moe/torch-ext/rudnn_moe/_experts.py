"""SwiGluExperts: the experts themselves, on dispatched rows or from input to output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ._autograd import Gradients, below_autograd, register_gradient
from ._calls import Saved, call, gradient_needed, register_last_derivative
from ._checks import FLOAT_DTYPES, dtype_name
from ._combine import combine_backward_op, combine_op
from ._dispatch import DispatchedTokens, dispatch_backward_op, dispatch_op
from ._errors import DEVICES, REFUSALS, MoeChecks
from ._ops import add_op_namespace_prefix, ops
from ._options import GroupedStrategy, GroupRoutingOptions, RoutingOptions, values_of
from ._route import check_route, choose
from ._route_sigmoid_grouped import check_route_sigmoid_grouped, choose_from_groups

_experts_op = ops.experts.default
_experts_training_op = ops.experts_training.default
_experts_backward_op = ops.experts_backward.default
_fused_experts_op = ops.fused_experts.default

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
    names = " and ".join(map(dtype_name, TENSOR_CORE_DTYPES)) or "no dtype"
    return f"the matrix units here multiply {names}, not {dtype_name(dtype)}"


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
            gradients = call(_experts_backward_op, (*arguments, *flags), grad_output, values, *self._weights)
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
                return _experts_training_op(*arguments)[0]
            return call(_experts_op, arguments, *leaves)
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
            output, *projections = call(_experts_training_op, arguments, *leaves)
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
            return _fused_experts_op(*fused_arguments)
        with below_autograd():
            return _fused_experts_op(*fused_arguments)
    values, expert_offsets, *_, slot_rows = dispatch_op(input, indices, down.shape[0])
    arguments = values, expert_offsets, gate, up, down, tensor_core
    trained = gradient_needed(input, gate, up, down)
    output = _experts_training_op(*arguments)[0] if trained else _experts_op(*arguments)
    return combine_op(output, weights, slot_rows)


def check_weights(function: str, gate: object, up: object, down: object) -> torch.Tensor:
    """Raises MoeError unless the expert weights go together, and returns down."""
    check = MoeChecks(function)
    gates = check.float_tensor("gate", gate)
    check.axes("gate", gates, "E, I, H")
    experts, rows, hidden = gates.shape
    if gates.numel() == 0 or (up is None and rows % 2 != 0):
        check.fail("gate", "not be empty and, without up, have an even number of rows for each expert", gates)
    if up is not None:
        _check_weight(check, "up", up, gates, tuple(gates.shape))
    intermediate = rows if up is not None else rows // 2
    return _check_weight(check, "down", down, gates, (experts, hidden, intermediate))


def _check_weight(
    check: MoeChecks, name: str, weight: object, gate: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    tensor = check.float_tensor(name, weight)
    if tensor.dtype != gate.dtype:
        check.fail(name, f"be {dtype_name(gate.dtype)}, as gate is", tensor)
    if tuple(tensor.shape) != shape:
        check.fail(name, f"have shape {shape}, to go with gate of shape {tuple(gate.shape)}", tensor)
    check.device(name, tensor, "gate", gate)
    return tensor


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


def _check_like_values(function: str, grad_output: object, values: torch.Tensor) -> None:
    check = MoeChecks(function)
    grads = check.float_tensor("grad_output", grad_output)
    check.dtype("grad_output", grads, values.dtype)
    check.shape("grad_output", grads, tuple(values.shape))
    check.device("grad_output", grads, "values", values)


def _setup_experts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.tensor_core = inputs
    ctx.save_for_backward(*tensors)


def _backward_experts(ctx: Any, grad: torch.Tensor) -> Gradients:
    tensors = ctx.saved_tensors
    _, *projections = _experts_training_op(*tensors, ctx.tensor_core)
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
    grad_values, grad_gate, grad_up, grad_down = _experts_backward_op(
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
    output, *projections = _experts_training_op(*tensors, ctx.tensor_core)
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


register_gradient(_experts_op, _setup_experts, _backward_experts)
register_gradient(_experts_training_op, _setup_experts_training, _backward_experts_training)
register_gradient(_fused_experts_op, _setup_fused_experts, _backward_fused_experts)
register_last_derivative(_experts_backward_op)


def _check_op(
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
    _check_op("experts", values, expert_offsets, gate, up, down)
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
    _check_op("experts_training", values, expert_offsets, gate, up, down)
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
    check = _check_op("experts_backward", values, expert_offsets, gate, up, down)
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
