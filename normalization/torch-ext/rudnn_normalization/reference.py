"""The definition of each operator in plain, differentiable PyTorch: the specification that tests and benchmarks use.

Every function works on the last axis, of length H, and computes in `compute_dtype` from the given inputs. With
the default, `torch.float32`, the result is rounded once, to the input's dtype. With `torch.float64` it is the
exact result for every purpose here and stays float64. Arguments are not checked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rms_norm",
    "rms_norm_gated",
    "softmax_last_axis",
]


def layer_norm(
    input: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + epsilon) * gamma + beta` with the biased variance.

    input is `[..., H]`, gamma and beta are `[H]`, the result is `[..., H]`. Ba, Kiros, Hinton: Layer
    Normalization (2016).
    """
    x = input.to(compute_dtype)
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    result = centered / (variance + epsilon).sqrt() * gamma.to(compute_dtype)
    if beta is not None:
        result = result + beta.to(compute_dtype)
    return _round(result, input.dtype)


def rms_norm(
    input: Tensor,
    gamma: Tensor,
    epsilon: float = 1e-6,
    *,
    zero_centered: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * gamma`, or `* (1 + gamma)` if zero_centered.

    input is `[..., H]`, gamma is `[H]`, the result is `[..., H]`. Zhang, Sennrich: Root Mean Square Layer
    Normalization (2019); zero_centered is the form of Gemma and Qwen3.5.
    """
    return _round(_rms_norm(input, gamma, epsilon, zero_centered, compute_dtype), input.dtype)


def rms_norm_gated(
    input: Tensor,
    gate: Tensor,
    gamma: Tensor,
    epsilon: float = 1e-6,
    *,
    activation: str = "silu",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`rms_norm(input) * silu(gate)`, or `* sigmoid(gate)`: the output norm of gated linear attention.

    input and gate are `[..., H]`, gamma is `[H]`, the result is `[..., H]`. Qwen3-Next has silu, Kimi-Linear
    sigmoid.
    """
    activate = torch.sigmoid if activation == "sigmoid" else F.silu
    normalised = _rms_norm(input, gamma, epsilon, False, compute_dtype)
    return _round(normalised * activate(gate.to(compute_dtype)), input.dtype)


def softmax_last_axis(input: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """`exp(x - max(x)) / sum(exp(x - max(x)))`; input and result are `[..., H]`.

    A row with NaN or +inf, or with only -inf, gives NaN.
    """
    return _round(torch.softmax(input.to(compute_dtype), -1), input.dtype)


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    gamma: Tensor,
    epsilon: float = 1e-6,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` with `total = input + residual`, rounded to the input's dtype before the norm.

    input, residual and both results are `[..., H]`, gamma is `[H]`. The rounding has derivative 1.
    """
    total = input + residual
    return rms_norm(total, gamma, epsilon, compute_dtype=compute_dtype), total


def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(total), total)` with `total = input + residual`, rounded to the input's dtype before the norm.

    input, residual and both results are `[..., H]`, gamma and beta are `[H]`. The rounding has derivative 1.
    """
    total = input + residual
    return layer_norm(total, gamma, beta, epsilon, compute_dtype=compute_dtype), total


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float, zero_centered: bool, compute_dtype: torch.dtype) -> Tensor:
    x = input.to(compute_dtype)
    scale = gamma.to(compute_dtype)
    if zero_centered:
        scale = 1 + scale
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * scale


def _round(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result if result.dtype == torch.float64 else result.to(dtype)
