"""What can be chosen: options, which check themselves, and strategies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ._errors import MoeChecks


class GroupedStrategy(str, Enum):
    """How the products of the experts are computed."""

    SCALAR = "scalar"
    """Without matrix units, on the vector units all the same; every dtype."""
    AUTO = "auto"
    """`tensor_core` where `experts_plan` says that it is supported, else `scalar`."""
    TENSOR_CORE = "tensor_core"
    """On matrix units; raises where the hardware has none for the dtype."""


class CombineGradientStrategy(str, Enum):
    """How a GPU computes the gradients of the routing weights, which are dot products of rows."""

    SERIAL = "serial"
    """One thread for each dot product."""
    PLANE = "plane"
    """The threads of a warp for each dot product."""


class RouterScoring(str, Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class RoutingOptions:
    """Options of `route`.

    Attributes:
        top_k: how many experts each token gets, at least 1.
        renormalize: whether the chosen weights are divided by their sum.

    Raises:
        MoeError: for an option that is not as described.
    """

    top_k: int
    renormalize: bool = False

    def __post_init__(self) -> None:
        check = MoeChecks("RoutingOptions")
        check.flag("renormalize", self.renormalize)
        _set(self, top_k=check.integer("top_k", self.top_k, 1))


MAX_GROUPED_EXPERTS, MAX_GROUPS, MAX_GROUPED_TOP_K = 1024, 128, 64
"""The most that `route_sigmoid_grouped` takes."""


@dataclass(frozen=True)
class GroupRoutingOptions:
    """Options of `route_sigmoid_grouped`.

    Attributes:
        top_k: how many experts each token gets, 1 to 64.
        groups: how many groups of consecutive experts there are, 1 to 128.
        selected_groups: how many groups a token chooses from, 1 to groups.
        group_top_two: whether a group's score is the sum of its two best corrected scores, not its best one.
        renormalize: whether the chosen weights are divided by their sum.
        scale: what the weights are multiplied by in the end, finite and > 0.

    Raises:
        MoeError: for an option that is not as described.
    """

    top_k: int
    groups: int = 1
    selected_groups: int = 1
    group_top_two: bool = False
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        check = MoeChecks("GroupRoutingOptions")
        check.flag("group_top_two", self.group_top_two)
        check.flag("renormalize", self.renormalize)
        groups = check.integer("groups", self.groups, 1, MAX_GROUPS)
        _set(
            self,
            top_k=check.integer("top_k", self.top_k, 1, MAX_GROUPED_TOP_K),
            groups=groups,
            selected_groups=check.integer("selected_groups", self.selected_groups, 1, groups),
            scale=check.positive_float32("scale", self.scale),
        )


@dataclass(frozen=True)
class RouterWeightOptions:
    """Options of `selected_router_weights` and its backward.

    Attributes:
        scoring: `softmax` over all experts, or `sigmoid` of each.
        renormalize: whether the chosen weights are divided by their sum.
        scale: what the weights are multiplied by in the end, finite and > 0.

    Raises:
        MoeError: for an option that is not as described.
    """

    scoring: RouterScoring = RouterScoring.SOFTMAX
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        check = MoeChecks("RouterWeightOptions")
        check.choice("scoring", self.scoring, values_of(RouterScoring))
        check.flag("renormalize", self.renormalize)
        _set(self, scoring=RouterScoring(self.scoring), scale=check.positive_float32("scale", self.scale))


def values_of(enumeration: type[Enum]) -> tuple[str, ...]:
    """Returns the strings that the members of an enumeration stand for."""
    return tuple(member.value for member in enumeration)


def _set(options: object, **values: object) -> None:
    """Writes checked values, of the types that the ops take, into frozen options."""
    for name, value in values.items():
        object.__setattr__(options, name, value)
