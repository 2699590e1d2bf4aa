"""experts_forward, for the experts interface of Transformers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ._errors import REFUSALS, MoeChecks
from ._experts_ops import check_weights, mix
from ._options import GroupedStrategy
from ._strategy import uses_tensor_core

_FUNCTION = "experts_forward"

_SILU = ("SiLU", "SiLUActivation")
"""The classes by which models name it."""

_REQUIRED = (("has_gate", True), ("has_bias", False), ("has_post_expert_norm", False))

_READ = ("gate_up_proj", "down_proj", "act_fn", "is_concatenated", "is_transposed")

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


class Experts(Protocol):
    """What is read of a module of experts; `use_experts_implementation` of Transformers sets the flags."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: nn.Module
    is_concatenated: bool
    is_transposed: bool


def experts_forward(
    self: Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Runs the experts of a Transformers model, as `ExpertsInterface.register` wants it.

        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register("rudnn", moe.experts_forward)
        model.set_experts_implementation("rudnn")

    Serves experts with `gate_up_proj [E, 2 I, H]` and `down_proj [E, H, I]`, SiLU and no bias, in place: Mixtral,
    Qwen3-MoE, DeepSeek-V3 and their kin. Weights that are transposed or interleaved are served with a copy at every
    call. Under expert parallelism an index of E or more marks a choice to skip.

    Args:
        self: the module with the weights.
        hidden_states: `[T, H]`, float32, float16 or bfloat16, any strides; computed with in the weights' dtype.
        top_k_index: `[T, k]`, int64 or int32.
        top_k_weights: `[T, k]`, float32, float16 or bfloat16.

    Returns:
        A tensor `[T, H]` of the dtype of hidden_states. Differentiable once in all but the indices.

    Raises:
        MoeError: for an argument that is not as described, or experts with a bias, another activation, no gate, a gate
            of their own or a norm behind.
    """
    if is_dynamo_compiling():
        _check(self, hidden_states, top_k_index, top_k_weights)
    try:
        gate, up, down = _weights(self)
        tensor_core = uses_tensor_core(_FUNCTION, GroupedStrategy.AUTO, down.dtype)
        if hidden_states.dtype == down.dtype:
            return mix(hidden_states, top_k_index, top_k_weights, gate, up, down, tensor_core)
        _check(self, hidden_states, top_k_index, top_k_weights)
        input = hidden_states.to(down.dtype)
        return mix(input, top_k_index, top_k_weights, gate, up, down, tensor_core).to(hidden_states.dtype)
    except REFUSALS:
        _check(self, hidden_states, top_k_index, top_k_weights)
        raise


def _weights(module: Experts) -> Weights:
    """Returns the weights as the ops take them: views where that is possible."""
    _require_served(module)
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    if module.is_concatenated:
        return gate_up, None, down
    return gate_up[:, ::2], gate_up[:, 1::2], down


def _require_served(module: Experts) -> None:
    for flag, value in _REQUIRED:
        if getattr(module, flag, value) is not value:
            MoeChecks(_FUNCTION).fail("self", f"have {flag} {value}", getattr(module, flag))
    require_silu(_FUNCTION, module)
    gating = getattr(module, "_apply_gate", None)
    if gating is not None and getattr(gating, "__name__", "") != "_default_apply_gate":
        MoeChecks(_FUNCTION).fail("self", "have no _apply_gate of its own", gating)


def require_silu(function: str, module: Experts) -> None:
    """Raises MoeError unless the activation of a module of experts is SiLU."""
    activation = type(module.act_fn).__name__
    if activation not in _SILU:
        MoeChecks(function).fail("act_fn", "be SiLU", activation)


def _check(module: Experts, hidden_states: object, top_k_index: object, top_k_weights: object) -> None:
    for name in _READ:
        if not hasattr(module, name):
            MoeChecks(_FUNCTION).fail("self", f"have the attribute {name}", type(module).__name__)
    gate, up, down = _weights(module)
    check_weights(_FUNCTION, gate, up, down, names=("gate_up_proj", "gate_up_proj", "down_proj"))
    check = MoeChecks(_FUNCTION)
    rows = check.float_rows("hidden_states", hidden_states)
    if rows.shape[1] != down.shape[1]:
        check.fail("hidden_states", f"have rows of {down.shape[1]} elements, as the weights ask", rows)
    check.device("hidden_states", rows, "the weights", down)
    chosen = check.indices("top_k_index", top_k_index, "hidden_states", rows)
    factors = check.float_tensor("top_k_weights", top_k_weights)
    if factors.shape != chosen.shape:
        check.fail("top_k_weights", f"have the shape {tuple(chosen.shape)} of top_k_index", factors)
    check.device("top_k_weights", factors, "hidden_states", rows)
