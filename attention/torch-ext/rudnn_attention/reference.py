"""The definition of attention in plain, differentiable PyTorch: the specification that tests and benchmarks use.

It computes in `compute_dtype` from the given inputs. With the default, `torch.float32`, the result is rounded once, to
the query's dtype. With `torch.float64` it is the exact result for every purpose here and stays float64. Arguments are
not checked, and the whole score matrix is in memory; where an input is not finite, each pair of query and key is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._options import AttentionOptions

__all__ = ["attention", "visible_keys"]

_DEFAULT_OPTIONS = AttentionOptions()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    options: AttentionOptions = _DEFAULT_OPTIONS,
    *,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`softmax(softcap(scale * q k^T) + bias) v` over the keys that each query sees, and the log of the softmax's sum.

    query is `[B, Hq, Sq, D]`, key `[B, Hkv, Sk, D]`, value `[B, Hkv, Sk, Dv]`, with Hq a multiple of Hkv; mask and bias
    broadcast to `[B, Hq, Sq, Sk]`, sinks are `[Hq]`. The results are the output `[B, Hq, Sq, Dv]` and the natural
    log-sum-exp `[B, Hq, Sq]` in compute_dtype, which has no gradient. A sink is a score that takes part in the sum and
    has no value. What a key that is not seen, its value or its bias holds never shows, in gradients neither, whatever
    it is. A query that sees no key gives 0 and has zero gradients.

    Vaswani et al.: Attention Is All You Need (2017); grouped heads: Ainslie et al., GQA (2023); softcap: Gemma 2
    (2024);
    sinks: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023), in the form of GPT-OSS.
    """
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    q = query.to(compute_dtype)
    k = key.to(compute_dtype).repeat_interleave(groups, 1)
    v = value.to(compute_dtype).repeat_interleave(groups, 1)
    visible = visible_keys(query, key, mask, attn_bias, options)

    # Whatever an invisible pair holds is replaced before anything is computed from it, so no gradient passes there.
    scores = (scale * _products(q, k, visible)).where(visible, 0)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if attn_bias is not None:
        scores = scores + attn_bias.to(compute_dtype).expand(visible.shape).where(visible, 0)
    scores = scores.where(visible, -torch.inf)

    sink = scores.new_full((1, 1, 1, 1), -torch.inf) if sinks is None else sinks.to(compute_dtype).view(1, -1, 1, 1)
    sink = sink.expand(*scores.shape[:3], 1)
    largest = torch.cat([scores, sink], -1).detach().amax(-1, keepdim=True)
    shift = largest.where(largest != -torch.inf, 0)
    exponentials = torch.exp(scores - shift).where(visible, 0)
    total = exponentials.sum(-1, keepdim=True) + torch.exp(sink - shift)
    weights = exponentials / total.where(total != 0, 1)
    output = _weighted_sum(weights, v, visible)
    lse = (total.log() + shift).squeeze(-1).detach()
    return output if compute_dtype == torch.float64 else output.to(query.dtype), lse


def visible_keys(
    query: Tensor, key: Tensor, mask: Tensor | None, attn_bias: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Which key each query sees: bool `[B, Hq, Sq, Sk]`.

    The last query is aligned with the last key: query i has the position `i + Sk - Sq` among the keys. Causality
    excludes keys behind it, a window those further away than its bounds, mask False and a bias of -inf any.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    positions = torch.arange(queries, device=query.device) + keys - queries
    distances = torch.arange(keys, device=query.device) - positions[:, None]
    visible = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=query.device)
    if options.is_causal:
        visible = visible & (distances <= 0)
    left, right = options.window or (-1, -1)
    if left >= 0:
        visible = visible & (distances >= -left)
    if right >= 0:
        visible = visible & (distances <= right)
    if mask is not None:
        visible = visible & mask
    if attn_bias is not None:
        visible = visible & (attn_bias.detach() != -torch.inf)
    return visible


def _products(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Returns `q k^T`, in which a pair that is not visible has no part in the gradients."""
    if q.isfinite().all() and k.isfinite().all():
        return q @ k.mT
    pairs = visible.unsqueeze(-1)
    return (q.unsqueeze(3).where(pairs, 0) * k.unsqueeze(2).where(pairs, 0)).sum(-1)


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Returns `weights v`, to which a pair that is not visible adds nothing."""
    if weights.isfinite().all() and v.isfinite().all():
        return weights @ v
    pairs = visible.unsqueeze(-1)
    return (weights.unsqueeze(-1).where(pairs, 0) * v.unsqueeze(2).where(pairs, 0)).sum(3)
