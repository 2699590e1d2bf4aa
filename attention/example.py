"""Load the kernel, attend with grouped heads and causality, differentiate.

With a local build: LOCAL_KERNELS=rudnn/rudnn-attention=attention python attention/example.py
"""

import torch
from kernels import get_kernel

kernel = get_kernel("rudnn/rudnn-attention", version=1, trust_remote_code=True)
q = torch.randn(2, 8, 100, 64, requires_grad=True)
k, v = (torch.randn(2, 2, 100, 64, requires_grad=True) for _ in range(2))

y = kernel.attention(q, k, v, options=kernel.AttentionOptions(is_causal=True))
y.square().sum().backward()
print(y.shape, q.grad.shape, k.grad.shape, v.grad.shape)
print(kernel.attention_plan(q, k, v))
