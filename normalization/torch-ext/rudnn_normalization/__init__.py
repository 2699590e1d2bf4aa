"""Normalization over the last axis, forward and backward.

    from kernels import get_kernel

    normalization = get_kernel("rudnn/rudnn-normalization", version=1, trust_remote_code=True)
    y = normalization.rms_norm(x, gamma)

`layers` holds the classes that `kernels.kernelize` puts into models, `reference` the definition of every function in
plain PyTorch.
"""

from . import layers, reference
from ._layer_norm import fused_add_layer_norm, layer_norm
from ._rms_norm import fused_add_rms_norm, rms_norm, rms_norm_gated
from ._rows import NormalizationError
from ._softmax_last_axis import softmax_last_axis

__all__ = [
    "NormalizationError",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "layers",
    "reference",
    "rms_norm",
    "rms_norm_gated",
    "softmax_last_axis",
]
