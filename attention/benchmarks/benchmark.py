"""Benchmarks for `kernels benchmark`, which checks each result and times each call.

Its check is coarse and its reference is timed once; the figures in the README come from `./dev bench`.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class AttentionBenchmark(Benchmark):
    """Prefill, by the public function and by the one with flash-attention's arguments."""

    seed = 0
    queries = 512
    keys = 512

    def setup(self) -> None:
        self.query = torch.randn(1, 16, self.queries, 64, device=self.device)
        self.key, self.value = (torch.randn(1, 4, self.keys, 64, device=self.device) for _ in range(2))
        self.options = self.kernel.AttentionOptions(is_causal=True)

    def benchmark_attention(self) -> None:
        self.out = self.kernel.attention(self.query, self.key, self.value, options=self.options)

    def verify_attention(self) -> torch.Tensor:
        causal = self.queries > 1
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=causal, enable_gqa=True)

    def benchmark_flash_attn_func(self) -> None:
        tensors = (tensor.transpose(1, 2) for tensor in (self.query, self.key, self.value))
        self.out = self.kernel.flash_attn_func(*tensors, causal=True)

    def verify_flash_attn_func(self) -> torch.Tensor:
        return self.verify_attention().transpose(1, 2)


class OneQueryAttentionBenchmark(AttentionBenchmark):
    """What decoding one token asks for."""

    queries = 1
    keys = 2048
