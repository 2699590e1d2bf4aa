"""Attention in one pass over the keys, forward and backward: grouped heads, masks, bias, softcap, sinks and windows.

    from kernels import get_kernel

    attention = get_kernel("rudnn/rudnn-attention", version=1, trust_remote_code=True)
    y = attention.attention(q, k, v, options=attention.AttentionOptions(is_causal=True))

`reference` holds the definition in plain PyTorch. The functions named `flash_attn` have the arguments of
flash-attention, by which Transformers calls a kernel of the Hub.
"""

from . import reference
from ._attention import AttentionPlan, attention, attention_plan
from ._errors import AttentionSetupError
from ._flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from ._options import AttentionOptions, AttentionStrategy
from ._transformers import sdpa_attention_forward

__all__ = [
    "AttentionOptions",
    "AttentionPlan",
    "AttentionSetupError",
    "AttentionStrategy",
    "attention",
    "attention_plan",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "reference",
    "sdpa_attention_forward",
]
