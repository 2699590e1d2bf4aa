"""Load the kernel, normalise, differentiate.

With a local build: LOCAL_KERNELS=rudnn/rudnn-normalization=normalization python normalization/example.py
"""

import torch
from kernels import get_kernel

normalization = get_kernel("rudnn/rudnn-normalization", version=1, trust_remote_code=True)
x = torch.randn(4, 576, dtype=torch.bfloat16, requires_grad=True)
gamma = torch.ones(576, requires_grad=True)
y = normalization.rms_norm(x, gamma)
y.sum().backward()
print(y.shape, y.dtype, x.grad.dtype, gamma.grad.dtype)
