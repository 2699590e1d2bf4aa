"""The layers that `kernels.kernelize` puts in place of a model's own.

Each has only a `forward`, which reads the parameters of the module that it replaces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ._experts import SwiGluExperts
from ._gated_activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from ._options import RoutingOptions
from ._plan import RoutingPlan
from ._route import route
from ._transformers import Experts, require_silu


class SiluAndMul(nn.Module):
    """`silu(a) * b` for the halves a, b of the last axis."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[..., d]` for `x` `[..., 2 d]`."""
        return silu_and_mul(x)


class GeluAndMul(nn.Module):
    """`gelu(a) * b` for the halves a, b of the last axis, with the error function."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[..., d]` for `x` `[..., 2 d]`."""
        return gelu_and_mul(x)


class GeluTanhAndMul(nn.Module):
    """`gelu(a) * b` for the halves a, b of the last axis, with the tanh approximation."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[..., d]` for `x` `[..., 2 d]`."""
        return gelu_tanh_and_mul(x)


class SoftmaxTopKRouter(nn.Module):
    """The router of Qwen3.5-MoE: `weight` `[E, H]`, `top_k` and `hidden_dim`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    weight: torch.Tensor
    top_k: int
    hidden_dim: int

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits `[T, E]`, weights that add up to 1 and int64 indices, `[T, top_k]` each."""
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        plan = route(logits, RoutingOptions(self.top_k, renormalize=True))
        return logits, plan.weights, plan.expert_indices.long()


class Llama4TextMoe(nn.Module):
    """The mixture of Llama 4: `router`, `experts`, `shared_expert`, `top_k` and `hidden_dim`.

    A token is multiplied by its score before the expert, not after. The experts' weights are transposed, so they are
    copied at every call.
    """

    can_torch_compile: bool = True
    has_backward: bool = True
    router: nn.Module
    experts: Experts
    shared_expert: nn.Module
    top_k: int
    hidden_dim: int

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the router's logits, `[T, H]` and `[T, E]`, for `hidden_states` `[..., H]`."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(tokens)
        indices = logits.topk(self.top_k, dim=1).indices
        chosen = scores.gather(1, indices)
        scaled = (tokens.unsqueeze(1) * chosen.unsqueeze(2)).reshape(-1, self.hidden_dim)
        require_silu("Llama4TextMoe", self.experts)
        experts = SwiGluExperts(self.experts.gate_up_proj.mT, None, self.experts.down_proj.mT)
        # One row for each choice, scaled already, so each is a token of its own with the weight 1.
        plan = RoutingPlan(indices.view(-1, 1), torch.ones_like(chosen).view(-1, 1), logits.shape[1])
        dispatched = plan.dispatch(scaled)
        routed = experts.forward_dispatched(dispatched)[dispatched.slot_rows.view_as(indices).long()].sum(1)
        return self.shared_expert(tokens) + routed, logits
