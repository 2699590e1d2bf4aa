"""The definition of each operator in plain PyTorch: the specification that tests and benchmarks use.

Every function computes in `compute_dtype` from the given inputs. With the default, `torch.float32`, the result is
rounded once, to the dtype that the operator returns. With `torch.float64` it is the exact result for every purpose here
and stays float64; which experts are chosen is decided in float32 all the same. Arguments are not checked.

T tokens, each with k of E experts, give R = T * k rows of H elements; I is an expert's intermediate size. Slot
`t * k + j` is the j-th choice of token t.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ._options import GroupRoutingOptions, RouterScoring, RouterWeightOptions, RoutingOptions

__all__ = [
    "combine",
    "dispatch",
    "experts",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "mixture",
    "route",
    "route_sigmoid_grouped",
    "selected_router_backward",
    "selected_router_weights",
    "silu_and_mul",
]

RENORMALIZE_EPSILON = 1e-20
"""Added to the sum that the chosen scores are divided by, so that 0 / 0 is 0 (DeepSeek-V3)."""


def route(
    logits: Tensor, options: RoutingOptions, *, compute_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The top_k largest of `softmax(logits)`, in descending order; among equal scores the lower expert comes first.

    logits is `[T, E]`; the results are the experts int32 and their weights in the logits' dtype, `[T, top_k]` each. The
    weights of a row with NaN or +inf, or with only -inf, are NaN. Shazeer et al.: Outrageously Large Neural Networks
    (2017); with `renormalize` Mixtral's and Qwen3-MoE's.
    """
    chosen = _descending(torch.softmax(logits.detach().float(), -1))[:, : options.top_k]
    weights = torch.softmax(logits.to(compute_dtype), -1).gather(1, chosen)
    return chosen.int(), _round(_normalised(weights, options.renormalize, 1.0), logits.dtype)


def route_sigmoid_grouped(
    logits: Tensor,
    bias: Tensor | None,
    options: GroupRoutingOptions,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The top_k experts of the best groups by `sigmoid(logits) + bias`, weighted by `sigmoid(logits)`.

    logits is `[T, E]`, bias `[E]`; the results are the experts int32 and their weights in the logits' dtype,
    `[T, top_k]` each. A group's score is the sum of its two largest corrected scores, or its largest. Among equals the
    lower id comes first, for groups and for experts. The weights of a row with NaN are NaN. DeepSeek-AI: DeepSeek-V3
    Technical Report (2024).
    """
    detached = logits.detach().float()
    corrected = torch.sigmoid(detached)
    if bias is not None:
        corrected = corrected + bias.detach()
    corrected = corrected.where(~corrected.isnan(), -torch.inf)
    grouped = corrected.unflatten(1, (options.groups, -1))
    group_scores = grouped.topk(2 if options.group_top_two else 1, -1).values.sum(-1)
    kept = _descending(group_scores)[:, : options.selected_groups]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    dropped = dropped.repeat_interleave(grouped.shape[-1], 1)
    by_score = _descending(corrected)
    # Dropped experts go to the end, whatever their score, and the others keep their order.
    kept_first = dropped.gather(1, by_score).int().sort(dim=-1, stable=True).indices
    chosen = by_score.gather(1, kept_first)[:, : options.top_k]
    weights = _normalised(torch.sigmoid(logits.to(compute_dtype)).gather(1, chosen), options.renormalize, options.scale)
    weights = weights.masked_fill(detached.isnan().any(-1, keepdim=True), torch.nan)
    return chosen.int(), _round(weights, logits.dtype)


def selected_router_weights(
    logits: Tensor, indices: Tensor, options: RouterWeightOptions, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weights of experts that have been chosen: their scores, normalised by their sum if asked, times the scale.

    logits is `[T, E]`, indices `[T, k]`, the result float32 `[T, k]`. An index that repeats counts each time. A row
    with an index outside `[0, E)` is NaN.
    """
    scores = _scores(logits.to(compute_dtype), options.scoring)
    valid = _valid_rows(indices, logits.shape[1])
    chosen = scores.gather(1, indices.long().where(valid, 0))
    return _normalised(chosen, options.renormalize, options.scale).where(valid, torch.nan)


def selected_router_backward(
    logits: Tensor,
    indices: Tensor,
    grad_weights: Tensor,
    options: RouterWeightOptions,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gradient of logits through `selected_router_weights`, in closed form: `[T, E]` in the logits' dtype.

    A row with an index outside `[0, E)` is NaN.
    """
    widened = logits.to(compute_dtype)
    scores = _scores(widened, options.scoring)
    valid = _valid_rows(indices, logits.shape[1])
    chosen = indices.long().where(valid, 0)
    grads = grad_weights.to(compute_dtype) * options.scale
    if options.renormalize:
        selected = scores.gather(1, chosen)
        total = selected.sum(-1, keepdim=True) + RENORMALIZE_EPSILON
        grads = (grads - (grads * (selected / total)).sum(-1, keepdim=True)) / total
    grad_scores = torch.zeros_like(scores).scatter_add(1, chosen, grads)
    if options.scoring == RouterScoring.SIGMOID:
        grad_logits = grad_scores * (scores * torch.sigmoid(-widened))
    else:
        grad_logits = scores * (grad_scores - (scores * grad_scores).sum(-1, keepdim=True))
    return _round(grad_logits.where(valid, torch.nan), logits.dtype)


def dispatch(input: Tensor, indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows of all tokens, one for each slot, grouped by expert and within an expert in the order of slots.

    input is `[T, H]`, indices `[T, k]`. The results are values `[R, H]`, expert_offsets `[E + 1]`, row_experts,
    row_tokens and row_slots `[R]`, slot_rows `[T, k]`, all but the first int32. A slot whose index is outside `[0, E)`
    has no row: slot_rows has -1 for it, and the rows that are left at the end are zeros with -1 in each map.
    """
    tokens, top_k = indices.shape
    chosen = indices.flatten().long()
    chosen = chosen.where((chosen >= 0) & (chosen < experts), experts)
    row_slots = chosen.sort(stable=True).indices
    taken = chosen[row_slots] < experts
    counts = torch.bincount(chosen, minlength=experts + 1)[:experts]
    expert_offsets = F.pad(counts.cumsum(0), (1, 0))
    values = input[row_slots // top_k].where(taken[:, None], 0)
    rows = torch.arange(chosen.numel(), device=input.device).where(taken, -1)
    slot_rows = torch.empty_like(rows).scatter(0, row_slots, rows).view(tokens, top_k)
    row_experts, row_tokens, row_slots = (
        map.where(taken, -1).int() for map in (chosen[row_slots], row_slots // top_k, row_slots)
    )
    return values, expert_offsets.int(), row_experts, row_tokens, row_slots, slot_rows.int()


def combine(
    expert_output: Tensor, weights: Tensor, slot_rows: Tensor, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Each token's rows, weighted and summed: `sum_j weights[t, j] * expert_output[slot_rows[t, j]]`.

    expert_output is `[R, H]`, weights and slot_rows are `[T, k]`, the result is `[T, H]`. A slot without a row, -1,
    adds nothing.
    """
    taken = (slot_rows >= 0) & (slot_rows < expert_output.shape[0])
    rows = expert_output.to(compute_dtype)[slot_rows.long().where(taken, 0)].where(taken[..., None], 0)
    products = rows * weights.to(compute_dtype).where(taken, 0)[..., None]
    return _round(products.sum(1), expert_output.dtype)


def experts(
    values: Tensor,
    expert_offsets: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`down[e] (silu(gate[e] x) * (up[e] x))` for the rows x of each expert e, which expert_offsets delimits.

    values is `[R, H]`, expert_offsets `[E + 1]`, gate and up are `[E, I, H]`, down is `[E, H, I]`, the result `[R, H]`.
    Without up, gate is `[E, 2 I, H]` and holds the rows of both. Rows of no expert are 0. Shazeer: GLU
    Variants Improve Transformer (2020).
    """
    gate, up = gate.chunk(2, 1) if up is None else (gate, up)
    rows = values.shape[0]
    # Offsets that fall are ranges without rows: no row belongs to two experts.
    bounds = expert_offsets.clamp(0, rows).cummax(0).values.tolist()
    parts = []
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        x = values[begin:end].to(compute_dtype)
        weights = (weight[expert].to(compute_dtype) for weight in (gate, up, down))
        parts.append(_swiglu(x, *weights))
    zeros = values.new_zeros(rows, values.shape[1], dtype=compute_dtype)
    return _round(torch.cat([zeros[: bounds[0]], *parts, zeros[bounds[-1] :]]), values.dtype)


def mixture(
    input: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dispatch, experts and combine with no rounding between them.

    input is `[T, H]`, indices and weights are `[T, k]`, the expert weights as `experts` takes them, the result is
    `[T, H]`. An index outside `[0, E)` adds nothing.
    """
    values, expert_offsets, *_, slot_rows = dispatch(input, indices, down.shape[0])
    output = experts(values.to(compute_dtype), expert_offsets, gate, up, down, compute_dtype=compute_dtype)
    return _round(combine(output, weights, slot_rows, compute_dtype=compute_dtype), input.dtype)


def silu_and_mul(input: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """`silu(a) * b` for the halves a, b of the last axis; input is `[..., 2 d]`, the result `[..., d]`."""
    a, b = input.to(compute_dtype).chunk(2, -1)
    return _round(F.silu(a) * b, input.dtype)


def gelu_and_mul(input: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """`gelu(a) * b` for the halves a, b of the last axis, with the error function."""
    a, b = input.to(compute_dtype).chunk(2, -1)
    return _round(F.gelu(a) * b, input.dtype)


def gelu_tanh_and_mul(input: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """`gelu(a) * b` for the halves a, b of the last axis, with the tanh approximation."""
    a, b = input.to(compute_dtype).chunk(2, -1)
    return _round(F.gelu(a, approximate="tanh") * b, input.dtype)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _scores(logits: Tensor, scoring: RouterScoring) -> Tensor:
    return torch.sigmoid(logits) if scoring == RouterScoring.SIGMOID else torch.softmax(logits, -1)


def _valid_rows(indices: Tensor, experts: int) -> Tensor:
    return ((indices.long() >= 0) & (indices.long() < experts)).all(-1, keepdim=True)


def _normalised(chosen: Tensor, renormalize: bool, scale: float) -> Tensor:
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + RENORMALIZE_EPSILON)
    return chosen * scale


def _descending(scores: Tensor) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices


def _round(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result if result.dtype == torch.float64 else result.to(dtype)
