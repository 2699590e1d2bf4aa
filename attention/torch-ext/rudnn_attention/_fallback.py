"""The strategy `fallback` as an op: products and softmax one after the other, in PyTorch's own operators.

It is registered for every device, has a backward of its own and keeps only the log-sum-exp between the two. Whatever
the dtype, everything is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._errors import AttentionChecks
from ._ops import add_op_namespace_prefix, ops

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks, float scale, float softcap, "
    "bool is_causal, int window_left, int window_right"
)

_TERMS = 256
"""Of a sum that is computed at once."""

_CHECKS = AttentionChecks("attention_fallback", anywhere=True)
_BACKWARD_CHECKS = AttentionChecks("attention_fallback_backward", anywhere=True)

library = torch.library.Library(ops.name, "FRAGMENT")
library.define(f"attention_fallback({_ARGUMENTS}) -> (Tensor output, Tensor lse)")
library.define(
    "attention_fallback_backward(Tensor grad, "
    + _ARGUMENTS.replace("Tensor? sinks, ", "Tensor? sinks, Tensor lse, ")
    + ", bool need_query, bool need_key, bool need_value, bool need_bias, bool need_sinks) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_sinks)"
)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    _require_memory(_CHECKS, query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks)
    with torch.autocast(query.device.type, enabled=False):
        dtype = query.dtype
        # A product's bits may depend on strides, so they are made the same.
        query, key, value = (tensor.float().contiguous() for tensor in (query, key, value))
        heads = _Heads(query, key)
        visible = _visible(query, key, mask, bias, is_causal, window_left, window_right)
        scores, _ = _scores(heads, query, key, bias, visible, scale, softcap)
        largest = scores.new_full(scores.shape[:3], -torch.inf) if scores.shape[3] == 0 else scores.amax(3)
        if sinks is not None:
            largest = torch.maximum(largest, sinks.float().view(1, -1, 1))
        shift = largest.masked_fill(largest == -torch.inf, 0).unsqueeze(3)
        weights = scores.sub_(shift).exp_()
        total = weights.sum(3, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - shift)
        weights.div_(total.masked_fill(total == 0, 1))
        if visible is not None:
            weights.masked_fill_(~visible, 0)
        output = _weighted_sum(heads.grouped(weights), value, visible, heads.pairs)
        return heads.ungrouped(output).to(dtype), (total.log() + shift).squeeze(3)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    need_query: bool,
    need_key: bool,
    need_value: bool,
    need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require_memory(
        _BACKWARD_CHECKS, grad=grad, query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks, lse=lse
    )
    with torch.autocast(query.device.type, enabled=False):
        dtype = query.dtype
        query, key, value, grad = (tensor.float().contiguous() for tensor in (query, key, value, grad))
        heads = _Heads(query, key)
        visible = _visible(query, key, mask, bias, is_causal, window_left, window_right)
        scores, bounded = _scores(heads, query, key, bias, visible, scale, softcap)
        shift = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(3)
        weights = scores.sub_(shift).exp_()
        # 1 but for the rounding of the log-sum-exp, which would be in all weights of a row.
        total = weights.sum(3, keepdim=True)
        sink_weights = None if sinks is None else torch.exp(sinks.float().view(1, -1, 1, 1) - shift)
        if sink_weights is not None:
            total = total + sink_weights
        total = total.masked_fill(total == 0, 1)
        weights.div_(total)
        if visible is not None:
            weights.masked_fill_(~visible, 0)
        grads = heads.grouped(grad)

        need_scores = need_query or need_key or need_bias
        grad_query, grad_key, grad_value, grad_bias, grad_sinks = (query.new_empty(0, dtype=dtype) for _ in range(5))
        if need_value:
            columns = heads.grouped(weights).mT
            summed = _weighted_sum(columns, grads, visible, lambda visible: heads.pairs(visible).mT)
            grad_value = summed.to(dtype)
        if need_scores or need_sinks:
            grad_weights = heads.ungrouped(_product(grads, value.mT))
            if visible is not None:
                grad_weights.masked_fill_(~visible, 0)
            # Of each query: its output times the gradient of that.
            delta = (weights * grad_weights).sum(3)
        if need_sinks:
            assert sinks is not None
            assert sink_weights is not None
            grad_sinks = -((sink_weights / total).squeeze(3) * delta).sum((0, 2)).to(sinks.dtype)
        if need_scores:
            grad_scores = grad_weights.sub_(delta.unsqueeze(3)).mul_(weights)
            if visible is not None:
                grad_scores.masked_fill_(~visible, 0)
            if need_bias:
                assert bias is not None
                grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype)
            if bounded is not None:
                grad_scores = grad_scores * (1 - bounded.square())
                if visible is not None:
                    grad_scores.masked_fill_(~visible, 0)
            grad_products = heads.grouped(grad_scores).mul(scale)
            if need_query:
                grad_query = heads.ungrouped(_product(grad_products, _finite(key))).to(dtype)
            if need_key:
                grad_key = _product(grad_products.mT, _finite(heads.grouped(query))).to(dtype)
        return grad_query, grad_key, grad_value, grad_bias, grad_sinks


def _require_memory(check: AttentionChecks, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            check.memory(name, tensor)


class _Heads:
    """How the query heads that share keys are multiplied with them at once."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, self.heads, self.queries, _ = query.shape
        self.key_heads = key.shape[1]

    def grouped(self, tensor: Tensor) -> Tensor:
        """Makes `[B, Hkv, (Hq / Hkv) Sq, X]` of `[B, Hq, Sq, X]`."""
        rows = self.heads // self.key_heads * self.queries
        return tensor.reshape(self.batch, self.key_heads, rows, tensor.shape[3])

    def ungrouped(self, tensor: Tensor) -> Tensor:
        """Is the inverse of `grouped`."""
        return tensor.view(self.batch, self.heads, self.queries, tensor.shape[3])

    def pairs(self, visible: Tensor) -> Tensor:
        """Groups which key each query sees, also where that is the same for all of a batch, of its heads or queries."""
        return self.grouped(visible.expand(self.batch, self.heads, self.queries, visible.shape[3]))


def _visible(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor | None:
    """Returns which key each query sees, `[B or 1, Hq or 1, Sq or 1, Sk]`, or None if each sees every one."""
    queries, keys = query.shape[2], key.shape[2]
    visible = None if mask is None else mask.expand(*mask.shape[:3], keys)
    if bias is not None:
        allowed = bias != -torch.inf
        visible = allowed if visible is None else visible & allowed
        visible = visible.expand(*visible.shape[:3], keys)
    if is_causal or window_left >= 0 or window_right >= 0:
        positions = torch.arange(queries, device=query.device) + keys - queries
        distances = torch.arange(keys, device=query.device) - positions[:, None]
        if is_causal:
            window_right = 0 if window_right < 0 else min(window_right, 0)
        near = distances <= window_right if window_right >= 0 else torch.ones_like(distances, dtype=torch.bool)
        if window_left >= 0:
            near &= distances >= -window_left
        visible = near.view(1, 1, queries, keys) if visible is None else visible & near
    return visible


def _scores(
    heads: _Heads,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    visible: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """Returns the scores `[B, Hq, Sq, Sk]`, -inf where a key is not seen, and the tanh that bounds them, or None."""
    scores = heads.ungrouped(_product(heads.grouped(query), key.mT)).mul_(scale)
    bounded = None
    if softcap > 0:
        bounded = scores.div_(softcap).tanh_()
        scores = bounded * softcap
    if bias is not None:
        scores.add_(bias)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    return scores, bounded


def _weighted_sum(weights: Tensor, rows: Tensor, visible: Tensor | None, group: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `weights rows`, to which a pair that is not visible adds nothing: not even 0 times infinity or NaN.

    weights are not negative, and 0 where not visible; `group` gives visible their shape. Where a device works by
    itself, nothing is asked of it, so that no call waits: what is not finite is then looked for by a second product.
    """
    if visible is None:
        return _product(weights, rows)
    finite = rows.isfinite()
    if rows.device.type == "cpu" and finite.all():
        return _product(weights, rows)
    result = _product(weights, rows.masked_fill(~finite, 0))
    kinds = torch.cat([rows == torch.inf, rows == -torch.inf, rows.isnan()], 3)
    positive, negative, nan = (group(visible).float() @ kinds.float() > 0).chunk(3, 3)
    result = result.masked_fill(positive, torch.inf).masked_fill(negative, -torch.inf)
    return result.masked_fill(nan | (positive & negative), torch.nan)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a b`. On a CPU sums have fixed parts: of a long one, PyTorch's threads would each take a share."""
    if a.device.type != "cpu" or a.shape[3] <= _TERMS:
        return a @ b
    first, *others = zip(a.split(_TERMS, 3), b.split(_TERMS, 2), strict=True)
    result = first[0] @ first[1]
    for one, other in others:
        result += one @ other
    return result


def _finite(rows: Tensor) -> Tensor:
    """Returns rows with 0 for what is not finite: the scores of a pair that sees it are not finite either."""
    return rows.masked_fill(~rows.isfinite(), 0)


library.impl("attention_fallback", _forward, "CompositeExplicitAutograd")
library.impl("attention_fallback_backward", _backward, "CompositeExplicitAutograd")

attention_fallback_op = ops.attention_fallback.default
attention_fallback_backward_op = ops.attention_fallback_backward.default
attention_fallback_name = add_op_namespace_prefix("attention_fallback")
attention_fallback_backward_name = add_op_namespace_prefix("attention_fallback_backward")
