"""Load the kernel, run a mixture of experts, differentiate.

With a local build: LOCAL_KERNELS=rudnn/rudnn-moe=moe python moe/example.py
"""

import torch
from kernels import get_kernel

moe = get_kernel("rudnn/rudnn-moe", version=1, trust_remote_code=True)
gate, up = (torch.randn(8, 64, 128).div(12).requires_grad_() for _ in range(2))
down = torch.randn(8, 128, 64).div(8).requires_grad_()
x = torch.randn(4, 128, requires_grad=True)
logits = torch.randn(4, 8, requires_grad=True)

experts = moe.SwiGluExperts(gate, up, down)
y = experts.forward(x, logits, moe.RoutingOptions(top_k=2, renormalize=True))
y.square().sum().backward()
print(y.shape, x.grad.shape, logits.grad.shape, down.grad.shape)
