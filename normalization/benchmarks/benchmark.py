"""Benchmarks for `kernels benchmark`, which checks each result and times each call.

Its check is coarse and its reference is timed once; the figures in the README come from `./dev bench`.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

EPSILON = 1e-6


class NormalizationBenchmark(Benchmark):
    """The public functions on rows of one width."""

    seed = 0
    rows = 512
    width = 4096

    def setup(self) -> None:
        shape = (self.rows, self.width)
        self.input = torch.randn(shape, device=self.device)
        self.residual = torch.randn(shape, device=self.device)
        self.gate = torch.randn(shape, device=self.device)
        self.gamma = torch.randn(self.width, device=self.device)
        self.beta = torch.randn(self.width, device=self.device)

    def benchmark_rms_norm(self) -> None:
        self.out = self.kernel.rms_norm(self.input, self.gamma, EPSILON)

    def verify_rms_norm(self) -> torch.Tensor:
        return F.rms_norm(self.input, (self.width,), self.gamma, EPSILON)

    def benchmark_rms_norm_gated(self) -> None:
        self.out = self.kernel.rms_norm_gated(self.input, self.gate, self.gamma, EPSILON)

    def verify_rms_norm_gated(self) -> torch.Tensor:
        return F.rms_norm(self.input, (self.width,), self.gamma, EPSILON) * F.silu(self.gate)

    def benchmark_fused_add_rms_norm(self) -> None:
        self.out, _ = self.kernel.fused_add_rms_norm(self.input, self.residual, self.gamma, EPSILON)

    def verify_fused_add_rms_norm(self) -> torch.Tensor:
        return F.rms_norm(self.input + self.residual, (self.width,), self.gamma, EPSILON)

    def benchmark_layer_norm(self) -> None:
        self.out = self.kernel.layer_norm(self.input, self.gamma, self.beta, EPSILON)

    def verify_layer_norm(self) -> torch.Tensor:
        return F.layer_norm(self.input, (self.width,), self.gamma, self.beta, EPSILON)

    def benchmark_fused_add_layer_norm(self) -> None:
        self.out, _ = self.kernel.fused_add_layer_norm(self.input, self.residual, self.gamma, self.beta, EPSILON)

    def verify_fused_add_layer_norm(self) -> torch.Tensor:
        return F.layer_norm(self.input + self.residual, (self.width,), self.gamma, self.beta, EPSILON)

    def benchmark_softmax_last_axis(self) -> None:
        self.out = self.kernel.softmax_last_axis(self.input)

    def verify_softmax_last_axis(self) -> torch.Tensor:
        return F.softmax(self.input, -1)


class SmallNormalizationBenchmark(NormalizationBenchmark):
    """One token of SmolLM2."""

    rows = 1
    width = 576
