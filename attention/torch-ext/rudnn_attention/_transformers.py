"""sdpa_attention_forward, for the attention interface of Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._attention import attention, check_attention
from ._checks import FLOAT_DTYPES
from ._errors import REFUSALS, AttentionChecks, is_zero
from ._options import AttentionOptions

_CHECKS = AttentionChecks("sdpa_attention_forward", anywhere=True)
_A_MASK = (
    "be a dense tensor of bool, True where a key takes part, or of float32, float16 or bfloat16, added to the scores"
)


def sdpa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Runs the attention of a Transformers model, as `AttentionInterface.register` wants it, with the masks of sdpa.

        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        AttentionInterface.register("rudnn", attention.sdpa_attention_forward)
        AttentionMaskInterface.register("rudnn", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("rudnn")

    Beyond sdpa it serves softcap (Gemma-2) and sinks (GPT-OSS). Keys and values are not repeated for the query heads
    that share them.

    Args:
        module: the model's attention; read are `is_causal` and, with a cache, `layer_idx`.
        query: `[B, Hq, Sq, D]`, float32, float16 or bfloat16.
        key: `[B, Hkv, Sk, D]` of the query's dtype.
        value: `[B, Hkv, Sk, Dv]` of the query's dtype.
        attention_mask: bool, True where a key takes part, or float, added to the scores; it broadcasts to
            `[B, Hq, Sq, Sk]`. None if all or, with causality, all that precede take part.
        dropout: 0; nothing is dropped here.
        scaling: what the products are multiplied by, by default `1 / sqrt(D)`.
        is_causal: whether, without a mask, a query sees only the keys before it; by default what the module says, and
            True if that says nothing.
        position_bias: float, added to the scores.
        cache: a paged cache, which is given the keys and values and says which to attend to.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`.
        s_aux: `[Hq]`, one more score for each head, without a value.
        kwargs: what else models hand over; a window is in the mask.

    Returns:
        `[B, Sq, Hq, Dv]`, contiguous, and None. Differentiable once in the tensors of float dtype.

    Raises:
        AttentionSetupError: for an argument that is not as described.
    """
    if not is_zero(dropout):
        _CHECKS.fail("dropout", "be 0: nothing is dropped here", dropout)
    if cache is not None:
        _CHECKS.float_tensor("key", key)
        _CHECKS.float_tensor("value", value)
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    if is_dynamo_compiling():
        _check(query, key, value, attention_mask, scaling, position_bias, softcap, s_aux)
    try:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        queries = query.shape[2]
        causal = causal and attention_mask is None and queries > 1
        keys, values, bias = key, value, position_bias
        if causal and key.shape[2] > queries:
            # A static cache at its first use: behind the queries' own there are no keys yet.
            keys, values = key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
        mask = attention_mask
        if isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool:
            mask, bias = None, attention_mask if bias is None else _sum(attention_mask, bias)
        output = attention(query, keys, values, mask, bias, AttentionOptions(scaling, softcap, causal), sinks=s_aux)
    except REFUSALS:
        _check(query, key, value, attention_mask, scaling, position_bias, softcap, s_aux)
        raise
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def _sum(attention_mask: Tensor, position_bias: object) -> Tensor:
    return _CHECKS.float_tensor("attention_mask", attention_mask) + _CHECKS.float_tensor("position_bias", position_bias)


def _check(
    query: object,
    key: object,
    value: object,
    attention_mask: object,
    scaling: object,
    position_bias: object,
    softcap: object,
    s_aux: object,
) -> None:
    """Raises AttentionSetupError unless `sdpa_attention_forward` takes the arguments."""
    for name, number in (("scaling", scaling), ("softcap", softcap)):
        if number is not None:
            _CHECKS.positive_float32(name, number)
    if attention_mask is not None:
        _CHECKS.dense_tensor("attention_mask", _A_MASK, attention_mask, (torch.bool, *FLOAT_DTYPES))
    added = isinstance(attention_mask, Tensor) and attention_mask.dtype in FLOAT_DTYPES
    mask, bias = (None, attention_mask) if added else (attention_mask, None)
    names = {"bias_name": "attention_mask", "mask_name": "attention_mask", "sinks_name": "s_aux"}
    check_attention(_CHECKS, query, key, value, mask, bias, s_aux, **names)
    if position_bias is not None:
        check_attention(_CHECKS, query, key, value, None, position_bias, None, bias_name="position_bias")
