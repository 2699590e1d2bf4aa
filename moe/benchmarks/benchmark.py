"""Benchmarks for `kernels benchmark`, which checks each result and times each call.

Its check is coarse and its reference is timed once; the figures in the README come from `./dev bench`.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class MoeBenchmark(Benchmark):
    """A layer of experts, its router and a gated activation."""

    seed = 0
    tokens = 128
    experts = 16
    top_k = 4
    hidden = 512
    intermediate = 256

    def setup(self) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device) * shape[-1] ** -0.5

        self.input = torch.randn(self.tokens, self.hidden, device=self.device)
        self.logits = torch.randn(self.tokens, self.experts, device=self.device)
        self.gate = weight(self.experts, self.intermediate, self.hidden)
        self.up = weight(self.experts, self.intermediate, self.hidden)
        self.down = weight(self.experts, self.hidden, self.intermediate)
        self.layer = self.kernel.SwiGluExperts(self.gate, self.up, self.down)
        self.options = self.kernel.RoutingOptions(self.top_k, True)

    def benchmark_route(self) -> None:
        self.out = self.kernel.route(self.logits, self.options).weights

    def verify_route(self) -> torch.Tensor:
        return self._choose()[0]

    def benchmark_experts(self) -> None:
        self.out = self.layer.forward(self.input, self.logits, self.options)

    def verify_experts(self) -> torch.Tensor:
        weights, indices = self._choose()
        output = torch.zeros_like(self.input)
        for expert in range(self.experts):
            token, choice = torch.where(indices == expert)
            rows = self.input[token]
            hidden = F.silu(F.linear(rows, self.gate[expert])) * F.linear(rows, self.up[expert])
            output.index_add_(0, token, F.linear(hidden, self.down[expert]) * weights[token, choice, None])
        return output

    def benchmark_silu_and_mul(self) -> None:
        self.out = self.kernel.silu_and_mul(self.input)

    def verify_silu_and_mul(self) -> torch.Tensor:
        first, second = self.input.chunk(2, -1)
        return F.silu(first) * second

    def _choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = torch.softmax(self.logits, -1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), indices


class OneTokenMoeBenchmark(MoeBenchmark):
    """What decoding one token asks for."""

    tokens = 1
