"""The layers that `kernels.kernelize` puts in place of a model's own.

Each has only a `forward`, which reads the parameters of the module that it replaces.
"""

from __future__ import annotations

import torch
from torch import nn

from . import _rows
from ._layer_norm import layer_norm
from ._rms_norm import rms_norm, rms_norm_gated


class RMSNorm(nn.Module):
    """The RMS norm of Llama and its kin: `weight` `[H]` and `variance_epsilon`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states` `[..., H]`."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """The RMS norm of Qwen3.5, which multiplies by `1 + weight`: `weight` `[H]` and `eps`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises `x` `[..., H]`."""
        return rms_norm(x, self.weight, self.eps, zero_centered=True)


class RMSNormGated(nn.Module):
    """The gated RMS norm of Qwen3-Next and its kin: `weight` `[H]`, `variance_epsilon` and `activation`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    weight: torch.Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises `hidden_states` `[..., H]` and multiplies it by `activation(gate)`, if there is a gate."""
        if gate is None:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon, activation=self.activation)


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm`, with any `normalized_shape` and with or without `weight` and `bias`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    normalized_shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises `input` `[..., *normalized_shape]`."""
        weight, bias = self.weight, self.bias
        axes = len(self.normalized_shape)
        if axes == 1 and weight is not None:
            return layer_norm(input, weight, bias, self.eps)
        check = _rows.checks("layer_norm")
        check.float_tensor("input", input)
        if tuple(input.shape[-axes:]) != tuple(self.normalized_shape):
            check.fail("input", f"have a shape that ends in {tuple(self.normalized_shape)}", input)
        for name, parameter in (("gamma", weight), ("beta", bias)):
            if parameter is not None and not parameter.is_contiguous():
                # Then `flatten` reads it.
                check.float_tensor(name, parameter)
        rows = input.flatten(-axes)
        gamma = rows.new_ones(rows.shape[-1]) if weight is None else weight.flatten()
        beta = None if bias is None else bias.flatten()
        return layer_norm(rows, gamma, beta, self.eps).view(input.shape)
