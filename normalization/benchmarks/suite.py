"""The cases of `./dev bench normalization`: rows and widths of models, all dtypes, both directions, 1 and 2 threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from devtools.benchmarking import Case

ROWS = (1, 16, 4096)
WIDTHS = (576, 4096, 4097, 32768)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = 1e-6

Call = Callable[..., Tensor]


class Operator:
    """One operator: what to call, its peers, and its float64 definition, all with the same tensors."""

    def __init__(self, name: str, tensors: int, ours: Call, exact: Call, eager: Call) -> None:
        self.name = name
        self.tensors = tensors
        """How many of (input, gamma, beta) the calls take."""
        self.ours = ours
        self.exact = exact
        self.eager = eager
        self.compiled = cache(lambda: torch.compile(eager, dynamic=True))


def operators(kernel: ModuleType) -> list[Operator]:
    """Return the operators to measure."""
    exact = {"epsilon": EPSILON, "compute_dtype": torch.float64}
    return [
        Operator(
            "rms_norm",
            2,
            lambda x, gamma: kernel.rms_norm(x, gamma, EPSILON),
            lambda x, gamma: kernel.reference.rms_norm(x, gamma, **exact),
            lambda x, gamma: F.rms_norm(x, x.shape[-1:], gamma, EPSILON),
        ),
        Operator(
            "layer_norm",
            3,
            lambda x, gamma, beta: kernel.layer_norm(x, gamma, beta, EPSILON),
            lambda x, gamma, beta: kernel.reference.layer_norm(x, gamma, beta, **exact),
            lambda x, gamma, beta: F.layer_norm(x, x.shape[-1:], gamma, beta, EPSILON),
        ),
        Operator(
            "softmax_last_axis",
            1,
            kernel.softmax_last_axis,
            lambda x: kernel.reference.softmax_last_axis(x, compute_dtype=torch.float64),
            lambda x: F.softmax(x, -1),
        ),
    ]


def cases(kernel: ModuleType, quick: bool) -> Iterator[Case]:
    """Generate the cases, those of one shape one after the other."""
    shapes: Iterable[tuple[int, int]] = [(1, 576), (4096, 4096)] if quick else itertools.product(ROWS, WIDTHS)
    threads = (2,) if quick else (1, 2)
    dtypes = DTYPES[:2] if quick else DTYPES
    for operator, (rows, width), dtype, count in itertools.product(operators(kernel), shapes, dtypes, threads):
        yield forward(operator, rows, width, dtype, count)
        yield forward_backward(operator, rows, width, dtype, count)


def make_tensors(operator: Operator, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the operator's tensors, parameters in the input's dtype as PyTorch's own functions want them."""
    generator = torch.Generator().manual_seed(rows * width)
    shapes = [(rows, width), (width,), (width,)][: operator.tensors]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def forward(operator: Operator, rows: int, width: int, dtype: torch.dtype, threads: int) -> Case:
    """Return the case of a call without gradients, beside a plain copy of the input."""
    tensors = make_tensors(operator, rows, width, dtype)
    peers = {
        "clone": tensors[0].clone,
        "PyTorch": lambda: operator.eager(*tensors),
        "torch.compile": lambda: operator.compiled()(*tensors),
    }
    if operator.name == "rms_norm":
        module = LlamaRMSNorm(width, EPSILON).to(dtype).requires_grad_(False)
        peers["Transformers"] = lambda: module(tensors[0])
    return Case(
        op=operator.name,
        shape=f"{rows} x {width}",
        dtype=dtype,
        threads=threads,
        ours=lambda: operator.ours(*tensors),
        peers=peers,
        check=lambda: is_right(operator, tensors, None),
        bytes=sum(tensor.nbytes for tensor in tensors) + tensors[0].nbytes,
    )


def forward_backward(operator: Operator, rows: int, width: int, dtype: torch.dtype, threads: int) -> Case:
    """Return the case of a call and the gradients of all its tensors."""
    tensors = make_tensors(operator, rows, width, dtype)
    grad = torch.randn_like(tensors[0])

    def with_gradients(call: Call) -> Callable[[], object]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad)

    return Case(
        op=operator.name,
        shape=f"{rows} x {width}",
        dtype=dtype,
        direction="forward+backward",
        threads=threads,
        ours=with_gradients(operator.ours),
        peers={
            "PyTorch": with_gradients(operator.eager),
            "torch.compile": with_gradients(lambda *leaves: operator.compiled()(*leaves)),
        },
        check=lambda: is_right(operator, tensors, grad),
        # The forward reads the input and writes the output; the backward reads the input, or for softmax the output,
        # and the gradient, and writes a gradient.
        bytes=5 * tensors[0].nbytes,
    )


def is_right(operator: Operator, tensors: list[Tensor], grad: Tensor | None) -> bool:
    """Tell whether results, or with `grad` gradients, lose at most twice what PyTorch's own lose against float64."""
    exact = results(operator.exact, [tensor.double() for tensor in tensors[1:]], tensors[0], grad, torch.float64)
    ours = results(operator.ours, tensors[1:], tensors[0], grad, tensors[0].dtype)
    plain = results(operator.eager, tensors[1:], tensors[0], grad, tensors[0].dtype)
    for ours_one, plain_one, exact_one in zip(ours, plain, exact, strict=True):
        floor = 2 * torch.finfo(ours_one.dtype).eps * exact_one.abs().max()
        allowed = 2 * (plain_one - exact_one).abs().max() + floor
        if not (ours_one - exact_one).abs().max() <= allowed:
            return False
    return True


def results(
    call: Call, parameters: list[Tensor], input: Tensor, grad: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return a call's output, or the gradients of its input and parameters.

    In float64 in blocks of rows, for the whole would not fit in memory; the parameters' gradients are summed over them.
    """
    step = max(1, 2**22 // input.shape[-1]) if dtype == torch.float64 else len(input)
    row_results, parameter_gradients = [], [torch.zeros_like(parameter) for parameter in parameters]
    for begin in range(0, len(input), step):
        rows = input[begin : begin + step].to(dtype)
        if grad is None:
            row_results.append(call(rows, *parameters))
            continue
        leaves = [tensor.detach().requires_grad_() for tensor in (rows, *parameters)]
        gradients = torch.autograd.grad(call(*leaves), leaves, grad[begin : begin + step].to(dtype))
        row_results.append(gradients[0])
        for total, gradient in zip(parameter_gradients, gradients[1:], strict=True):
            total += gradient
    rows_together = torch.cat(row_results)
    return [rows_together] if grad is None else [rows_together, *parameter_gradients]
