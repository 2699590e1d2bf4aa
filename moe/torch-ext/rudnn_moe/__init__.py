"""Mixture of experts: routing, dispatch, SwiGLU experts and combine, forward and backward.

    from kernels import get_kernel

    moe = get_kernel("rudnn/rudnn-moe", version=1, trust_remote_code=True)
    experts = moe.SwiGluExperts(gate, up, down)
    y = experts.forward(x, logits, moe.RoutingOptions(top_k=4, renormalize=True))

`layers` holds the classes that `kernels.kernelize` puts into models, `reference` the definition of every operator in
plain PyTorch.
"""

from . import layers, reference
from ._dispatch import CombineGradients, DispatchedTokens
from ._errors import MoeError
from ._experts import ExpertGradients, ExpertsCache, ExpertsTraining, SwiGluExperts
from ._gated_activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from ._options import (
    CombineGradientStrategy,
    GroupedStrategy,
    GroupRoutingOptions,
    RouterScoring,
    RouterWeightOptions,
    RoutingOptions,
)
from ._plan import RouterTrainingPlan, RoutingPlan
from ._route import route
from ._route_sigmoid_grouped import route_sigmoid_grouped
from ._selected_router import selected_router_backward, selected_router_weights
from ._strategy import ExpertsPlan, experts_plan
from ._transformers import experts_forward

__all__ = [
    "CombineGradientStrategy",
    "CombineGradients",
    "DispatchedTokens",
    "ExpertGradients",
    "ExpertsCache",
    "ExpertsPlan",
    "ExpertsTraining",
    "GroupRoutingOptions",
    "GroupedStrategy",
    "MoeError",
    "RouterScoring",
    "RouterTrainingPlan",
    "RouterWeightOptions",
    "RoutingOptions",
    "RoutingPlan",
    "SwiGluExperts",
    "experts_forward",
    "experts_plan",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layers",
    "reference",
    "route",
    "route_sigmoid_grouped",
    "selected_router_backward",
    "selected_router_weights",
    "silu_and_mul",
]
