"""attention and attention_plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from . import _autotune, _strategies
from ._autograd import Gradients, needs_autograd, register_gradient, register_last_derivative
from ._checks import dtype_name
from ._errors import REFUSALS, AttentionChecks
from ._fallback import (
    attention_fallback_backward_name,
    attention_fallback_backward_op,
    attention_fallback_name,
    attention_fallback_op,
)
from ._ops import add_op_namespace_prefix
from ._options import AttentionOptions, AttentionStrategy, values_of
from ._strategies import PREFERENCE, Arguments, attention_backward_op, attention_op, run, serving, why_not

DEFAULT_OPTIONS = AttentionOptions()

MAX_HEAD_DIM = 1024

_STRATEGIES = values_of(AttentionStrategy)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    strategy: AttentionStrategy | str = "autotune",
    *,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns for each query the mean of the values, weighted by the softmax of its products with the keys.

    In float32 arithmetic, rounded once: `s = scale * q.k`; with a softcap `s = softcap * tanh(s / softcap)`; mask,
    causality and window exclude keys; the bias is added; softmax, with the sink's score in its sum; times the values.
    Causality and window align the last query with the last key: query i has the position `i + Sk - Sq`.

    What an excluded key, its value or its bias holds never shows, NaN neither. A query that is left no key gives 0.

    Args:
        query: `[B, Hq, Sq, D]`, float32, float16 or bfloat16, any strides, 1 <= D <= 1024.
        key: `[B, Hkv, Sk, D]` of the query's dtype and device, any strides; Hq is a multiple of Hkv, and query head h
            uses key head `h // (Hq / Hkv)`.
        value: `[B, Hkv, Sk, Dv]` of the query's dtype and device, any strides, 1 <= Dv <= 1024.
        mask: bool, broadcastable to `[B, Hq, Sq, Sk]`, True where a key takes part.
        attn_bias: float32 or the query's dtype, broadcastable to `[B, Hq, Sq, Sk]`, added to the scores; -inf excludes
            a key.
        options: scale, softcap, causality and window.
        strategy: `flash_accelerated` and `flash_unit` go over the keys in one pass and keep no Sq x Sk matrix; each
            raises where it cannot serve the call. `fallback` has that matrix in memory and serves every device.
            `autotune` measures them once for a kind of call (see `RUDNN_AUTOTUNE` in the README), waiting for the
            device then; it takes the first of them that serves the call where nothing may be measured, as in
            torch.compile.
        sinks: `[Hq]`, float32 or the query's dtype: one more score for each head, without a value; -inf for none. What
            +inf and NaN do to their heads is not defined.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        `[B, Hq, Sq, Dv]`, contiguous, of the query's dtype; with return_lse also the natural log-sum-exp of the scores
        and the sink, float32 `[B, Hq, Sq]`, -inf where there is neither key nor sink. Differentiable once in query,
        key, value, attn_bias and sinks. The log-sum-exp has no gradient: asking for one raises, and in torch.compile it
        is detached.

    Raises:
        AttentionSetupError: for an argument that is not as described, or a strategy that cannot serve the call.

    Source: Vaswani et al., "Attention Is All You Need", 2017; in one pass as in Dao, "FlashAttention-2", 2023. Grouped
    heads are those of Ainslie et al., "GQA", 2023, the softcap Gemma 2's, the sinks GPT-OSS's.
    """
    if type(return_lse) is not bool:
        AttentionChecks("attention").flag("return_lse", return_lse)
    if type(options) is not AttentionOptions:
        AttentionChecks("attention").instance("options", options, AttentionOptions)
    if is_dynamo_compiling():
        _check("attention", query, key, value, mask, attn_bias, options, strategy, sinks)
    try:
        arguments = _arguments(query, key, value, mask, attn_bias, options, sinks)
        chosen = _choose("attention", arguments, strategy)
        if chosen == AttentionStrategy.FALLBACK:
            # PyTorch's own operators would broadcast what does not fit.
            _check("attention", query, key, value, mask, attn_bias, options, strategy, sinks)
        output, lse = run(chosen, arguments)
    except REFUSALS:
        _check("attention", query, key, value, mask, attn_bias, options, strategy, sinks)
        raise
    if not return_lse:
        return output
    return output, lse.detach() if is_dynamo_compiling() else lse


class AttentionPlan(NamedTuple):
    """What `attention_plan` returns.

    Attributes:
        strategy: the one that runs.
        reasons: why each of the others does not.
    """

    strategy: AttentionStrategy
    reasons: dict[AttentionStrategy, str]


def attention_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    strategy: AttentionStrategy | str = "autotune",
    *,
    sinks: torch.Tensor | None = None,
) -> AttentionPlan:
    """Tells which strategy `attention` runs a call with, and why not with the others.

    With `autotune` it measures, if the call would. `return_lse` plays no part in it: every strategy computes the
    log-sum-exp, whether it is returned or not.

    Args:
        query: as `attention` takes it; so are the others.
        key: see there.
        value: see there.
        mask: see there.
        attn_bias: see there.
        options: see there.
        strategy: see there.
        sinks: see there.

    Returns:
        The strategy, and the reasons against the others.

    Raises:
        AttentionSetupError: for an argument that is not as described, or a strategy that cannot serve the call.
    """
    _check("attention_plan", query, key, value, mask, attn_bias, options, strategy, sinks)
    if strategy != AttentionStrategy.AUTOTUNE:
        chosen = AttentionStrategy(strategy)
        asked = {other: f"{chosen.value} was asked for" for other in PREFERENCE if other != chosen}
        return AttentionPlan(chosen, asked)
    arguments = _arguments(query, key, value, mask, attn_bias, options, sinks)
    choice = _autotune.choose(arguments, trained=_trained(arguments))
    reasons = {
        other: why_not(other, query.dtype, query.device) or _why_another(other, choice)
        for other in PREFERENCE
        if other != choice.strategy
    }
    return AttentionPlan(choice.strategy, reasons)


def _why_another(strategy: AttentionStrategy, choice: _autotune.Choice) -> str:
    if not choice.seconds:
        return f"{choice.strategy.value} {choice.why}"
    if strategy in choice.seconds:
        slow, fast = (1e3 * choice.seconds[each] for each in (strategy, choice.strategy))
        return f"it took {slow:.3g} ms where {choice.strategy.value} took {fast:.3g} ms"
    return f"its score matrix has more than the {_autotune.LARGEST_MEASURED_FALLBACK} elements that are measured"


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> Arguments:
    """Returns the arguments of the op, but for the strategy."""
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    left, right = options.window or (-1, -1)
    softcap = options.softcap or 0.0
    mask = None if mask is None else _with_four_axes(mask)
    bias = None if attn_bias is None else _with_four_axes(attn_bias)
    return query, key, value, mask, bias, sinks, scale, softcap, options.is_causal, left, right


def _with_four_axes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with further axes of 1 in front."""
    return tensor if tensor.dim() >= 4 else tensor[(None,) * (4 - tensor.dim())]


def _choose(function: str, arguments: Arguments, strategy: object) -> AttentionStrategy:
    """Returns the strategy that runs a call; it is checked before anything is measured."""
    query = arguments[0]
    if strategy == "autotune":
        if is_dynamo_compiling():
            return serving(query.dtype, query.device)[0]
        trained = _trained(arguments)
        chosen = _autotune.known(arguments, trained=trained)
        if chosen is None:
            _check_arguments(AttentionChecks(function, anywhere=True), arguments)
            chosen = _autotune.choose(arguments, trained=trained).strategy
        return chosen
    chosen = _named(function, strategy)
    if chosen == AttentionStrategy.FLASH_ACCELERATED and query.dtype not in _strategies.ACCELERATED_DTYPES:
        _check_served(function, chosen, query)
    return chosen


def _named(function: str, strategy: object) -> AttentionStrategy:
    if isinstance(strategy, AttentionStrategy):
        return strategy
    AttentionChecks(function).choice("strategy", strategy, _STRATEGIES)
    return AttentionStrategy(strategy)


def _trained(arguments: Arguments) -> bool:
    query, key, value, _, bias, sinks, *_ = arguments
    return needs_autograd(query, key, value, bias, sinks)


def _check(
    function: str,
    query: object,
    key: object,
    value: object,
    mask: object,
    attn_bias: object,
    options: object,
    strategy: object,
    sinks: object,
) -> None:
    """Raises AttentionSetupError unless `attention` takes the arguments."""
    chosen = _named(function, strategy)
    anywhere = chosen in (AttentionStrategy.AUTOTUNE, AttentionStrategy.FALLBACK)
    check = AttentionChecks(function, anywhere=anywhere)
    check.instance("options", options, AttentionOptions)
    check_attention(check, query, key, value, mask, attn_bias, sinks)
    if not anywhere:
        assert isinstance(query, torch.Tensor)
        _check_served(function, chosen, query)


def _check_served(function: str, strategy: AttentionStrategy, query: torch.Tensor) -> None:
    if reason := why_not(strategy, query.dtype, query.device):
        others = " or ".join(each.value for each in (*serving(query.dtype, query.device), AttentionStrategy.AUTOTUNE))
        AttentionChecks(function).fail("strategy", f"be {others}, for {reason}", strategy.value)


def check_attention(
    check: AttentionChecks,
    query: object,
    key: object,
    value: object,
    mask: object,
    attn_bias: object,
    sinks: object,
    bias_name: str = "attn_bias",
    mask_name: str = "mask",
    sinks_name: str = "sinks",
) -> None:
    """Raises AttentionSetupError unless tensors go together, of which the caller knows some by other names."""
    queries = check.float_tensor("query", query)
    check.axes("query", queries, "B, Hq, Sq, D")
    keys = _check_keys(check, "key", key, "B, Hkv, Sk, D", queries)
    values = _check_keys(check, "value", value, "B, Hkv, Sk, Dv", queries)
    batch, heads, length, width = queries.shape
    if not 1 <= width <= MAX_HEAD_DIM:
        check.fail("query", f"have a last axis of 1 to {MAX_HEAD_DIM} elements", queries)
    if keys.shape[3] != width:
        check.fail("key", f"have a last axis of {width} elements, as query has", keys)
    if not 1 <= values.shape[3] <= MAX_HEAD_DIM:
        check.fail("value", f"have a last axis of 1 to {MAX_HEAD_DIM} elements", values)
    if keys.shape[1] < 1 or heads % keys.shape[1] != 0:
        check.fail("key", f"have a number of heads that divides query's {heads}", keys)
    if values.shape[:3] != keys.shape[:3]:
        check.fail("value", f"have the first three axes {tuple(keys.shape[:3])} of key", values)
    scores = batch, heads, length, keys.shape[2]
    if mask is not None:
        masks = check.boolean_tensor(mask_name, mask)
        check.broadcastable(mask_name, masks, scores)
        check.device(mask_name, masks, "query", queries)
    if attn_bias is not None:
        biases = check.float_tensor(bias_name, attn_bias)
        check.dtype(bias_name, biases, torch.float32, queries.dtype)
        check.broadcastable(bias_name, biases, scores)
        check.device(bias_name, biases, "query", queries)
    if sinks is not None:
        scores_of_heads = check.float_tensor(sinks_name, sinks)
        check.dtype(sinks_name, scores_of_heads, torch.float32, queries.dtype)
        check.shape(sinks_name, scores_of_heads, (heads,))
        check.device(sinks_name, scores_of_heads, "query", queries)


def _check_keys(check: AttentionChecks, name: str, value: object, axes: str, query: torch.Tensor) -> torch.Tensor:
    tensor = check.float_tensor(name, value)
    check.axes(name, tensor, axes)
    check.dtype_of(name, tensor, "query", query)
    check.device(name, tensor, "query", query)
    if tensor.shape[0] != query.shape[0]:
        check.fail(name, f"have a first axis of {query.shape[0]}, as query has", tensor)
    return tensor


def _check_arguments(check: AttentionChecks, arguments: Arguments) -> None:
    query, key, value, mask, bias, sinks, *_ = arguments
    check_attention(check, query, key, value, mask, bias, sinks)


_NO_GRADIENT_OF_LSE = "attention: the log-sum-exp carries no gradient, but one was asked for"


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Gradients:
    if grad_lse is not None:
        raise RuntimeError(_NO_GRADIENT_OF_LSE)
    assert grad is not None
    *tensors, output, lse = ctx.saved_tensors
    *numbers, accelerated = ctx.numbers
    need_query, need_key, need_value, _, need_bias, need_sinks, *_ = ctx.needs_input_grad
    needed = need_query, need_key, need_value, need_bias, need_sinks
    gradients = attention_backward_op(grad, *tensors, output, lse, *numbers, accelerated, *needed)
    return (*_by_argument(gradients, needed), *(None,) * len(ctx.numbers))


def _setup_fallback(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[6:]
    ctx.save_for_backward(*inputs[:6], output[1])


def _backward_fallback(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Gradients:
    if grad_lse is not None:
        raise RuntimeError(_NO_GRADIENT_OF_LSE)
    assert grad is not None
    need_query, need_key, need_value, _, need_bias, need_sinks, *_ = ctx.needs_input_grad
    needed = need_query, need_key, need_value, need_bias, need_sinks
    gradients = attention_fallback_backward_op(grad, *ctx.saved_tensors, *ctx.numbers, *needed)
    return (*_by_argument(gradients, needed), *(None,) * len(ctx.numbers))


def _by_argument(gradients: tuple[torch.Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
    """Returns the gradients of query, key, value, mask, bias and sinks."""
    query, key, value, bias, sinks = (
        gradient if need else None for gradient, need in zip(gradients, needed, strict=True)
    )
    return query, key, value, None, bias, sinks


register_gradient(attention_op, _setup, _backward)
register_gradient(attention_fallback_op, _setup_fallback, _backward_fallback)
register_last_derivative(attention_backward_op)
register_last_derivative(attention_fallback_backward_op)


def _check_op(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> AttentionChecks:
    check = AttentionChecks(op, anywhere=True)
    check_attention(check, query, key, value, mask, bias, sinks, "bias")
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None:
            check.axes(name, tensor, "B, Hq, Sq, Sk")
    return check


def _check_accelerated(check: AttentionChecks, query: torch.Tensor, accelerated: bool) -> None:
    if accelerated and query.dtype not in _strategies.ACCELERATED_DTYPES:
        reason = why_not(AttentionStrategy.FLASH_ACCELERATED, query.dtype, query.device)
        check.fail("accelerated", f"be False for {dtype_name(query.dtype)}: {reason}", accelerated)


def _fake_results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.shape[:3]
    return query.new_empty((*rows, value.shape[3])), query.new_empty(rows, dtype=torch.float32)


def _fake_gradients(
    check: AttentionChecks,
    grad: torch.Tensor,
    lse: torch.Tensor,
    arguments: tuple[torch.Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor, ...]:
    query, _, value, *_ = arguments
    assert query is not None
    assert value is not None
    rows = tuple(query.shape[:3])
    check.dtype_of("grad", grad, "query", query)
    check.shape("grad", grad, (*rows, value.shape[3]))
    check.device("grad", grad, "query", query)
    check.dtype("lse", lse, torch.float32)
    check.shape("lse", lse, rows)
    check.device("lse", lse, "query", query)

    def gradient(name: str, tensor: torch.Tensor | None, need: bool) -> torch.Tensor:
        if not need:
            return query.new_empty(0)
        if tensor is None:
            check.fail(f"need_{name}", f"be False without {name}", need)
        return tensor.new_empty(tensor.shape)

    names = "query", "key", "value", "bias", "sinks"
    return tuple(map(gradient, names, arguments, needed))


@torch.library.register_fake(add_op_namespace_prefix("attention"))
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    accelerated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check = _check_op("attention", query, key, value, mask, bias, sinks)
    _check_accelerated(check, query, accelerated)
    return _fake_results(query, value)


@torch.library.register_fake(attention_fallback_name)
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_op("attention_fallback", query, key, value, mask, bias, sinks)
    return _fake_results(query, value)


@torch.library.register_fake(add_op_namespace_prefix("attention_backward"))
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    accelerated: bool,
    need_query: bool,
    need_key: bool,
    need_value: bool,
    need_bias: bool,
    need_sinks: bool,
) -> tuple[torch.Tensor, ...]:
    check = _check_op("attention_backward", query, key, value, mask, bias, sinks)
    _check_accelerated(check, query, accelerated)
    check.like("output", output, "grad", grad)
    needed = need_query, need_key, need_value, need_bias, need_sinks
    return _fake_gradients(check, grad, lse, (query, key, value, bias, sinks), needed)


@torch.library.register_fake(attention_fallback_backward_name)
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor,
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
) -> tuple[torch.Tensor, ...]:
    check = _check_op("attention_fallback_backward", query, key, value, mask, bias, sinks)
    needed = need_query, need_key, need_value, need_bias, need_sinks
    return _fake_gradients(check, grad, lse, (query, key, value, bias, sinks), needed)
