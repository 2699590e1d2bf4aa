"""The cases of `./dev bench normalization`: rows and widths of models, forward and backward, on the CPU or a GPU.

Every call makes fresh outputs, the kernel's as its peers', and no gradient is wanted where only the forward is timed.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from devtools.benchmarking import Case

try:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
except ImportError:  # a peer where it is installed
    LlamaRMSNorm = None

ROWS = (1, 16, 4096)
WIDTHS = (576, 4096, 4097, 32768)
ONE_TOKEN = (1, 576)
PREFILL = (4096, 4096)
LARGEST = (4096, 32768)
"""Forward only: PyTorch's backward takes seconds and most of the memory."""

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPSILON = 1e-6

Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Operator:
    """One operator: what to call, its definition and PyTorch's way, all with the same tensors."""

    name: str
    rows: int
    """How many arguments have the shape `[rows, width]`; they come first."""
    parameters: int
    """How many arguments of the shape `[width]` follow."""
    outputs: int
    """How many results of the shape `[rows, width]` there are."""
    traffic: int
    """How many tensors of the shape `[rows, width]` a forward and a backward read or write, each once."""
    ours: Call
    exact: Call
    """The definition, in float64."""
    eager: Call


def operators(kernel: ModuleType) -> dict[str, Operator]:
    """Returns the operators by name."""
    reference, exact = kernel.reference, {"epsilon": EPSILON, "compute_dtype": torch.float64}

    def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gamma, EPSILON)

    def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], gamma, beta, EPSILON)

    def rms_norm_gated(x: Tensor, gate: Tensor, gamma: Tensor) -> Tensor:
        return rms_norm(x, gamma) * F.silu(gate)

    def fused_add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, gamma), total

    def fused_add_layer_norm(x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return layer_norm(total, gamma, beta), total

    def operator(rows: int, parameters: int, outputs: int, traffic: int, eager: Call) -> Operator:
        ours, definition = getattr(kernel, eager.__name__), getattr(reference, eager.__name__)
        return Operator(
            eager.__name__,
            rows,
            parameters,
            outputs,
            traffic,
            lambda *tensors: ours(*tensors, epsilon=EPSILON),
            lambda *tensors: definition(*tensors, **exact),
            eager,
        )

    # A backward reads the gradients of the outputs and what the forward saved, and writes the gradients of the rows,
    # one for both where a residual is added.
    every = [
        operator(rows=1, parameters=1, outputs=1, traffic=5, eager=rms_norm),
        operator(rows=1, parameters=2, outputs=1, traffic=5, eager=layer_norm),
        Operator(
            "softmax_last_axis",
            rows=1,
            parameters=0,
            outputs=1,
            traffic=5,
            ours=kernel.softmax_last_axis,
            exact=lambda x: reference.softmax_last_axis(x, compute_dtype=torch.float64),
            eager=lambda x: F.softmax(x, -1),
        ),
        operator(rows=2, parameters=1, outputs=1, traffic=8, eager=rms_norm_gated),
        operator(rows=2, parameters=1, outputs=2, traffic=8, eager=fused_add_rms_norm),
        operator(rows=2, parameters=2, outputs=2, traffic=8, eager=fused_add_layer_norm),
    ]
    return {each.name: each for each in every}


def cases(kernel: ModuleType, quick: bool, device: str) -> Iterator[Case]:
    """Generates the cases on a device, those of one shape one after the other."""
    forward, forward_backward = partial(forward_case, device=device), partial(forward_backward_case, device=device)
    layer = partial(layer_cases, kernel, device=device)
    by_name = operators(kernel)
    main = [by_name[name] for name in ("rms_norm", "layer_norm", "softmax_last_axis")]
    norms, combined = main[:2], [each for each in by_name.values() if each not in main]
    if quick:
        yield forward(by_name["rms_norm"], ONE_TOKEN, F32)
        yield from layer(by_name["rms_norm"], ONE_TOKEN, F32)
        for dtype in (BF16, F32):
            for operator in by_name.values():
                # A GPU is what torch.compile is best at, and there it is the peer that matters.
                yield forward(operator, PREFILL, dtype, compiled=device != "cpu" and operator in main)
            yield from (forward_backward(operator, PREFILL, dtype) for operator in norms)
        return

    for dtype in (F32, BF16):
        yield from layer(by_name["rms_norm"], ONE_TOKEN, dtype)
    shapes = itertools.product(ROWS, WIDTHS)
    for operator, shape, dtype in itertools.product(main, shapes, (F32, BF16, F16)):
        yield forward(operator, shape, dtype, compiled=True)
        if shape != LARGEST:
            yield forward_backward(operator, shape, dtype, compiled=True)
    if device == "cpu":
        for operator, shape, dtype in itertools.product(main, (ONE_TOKEN, (16, 4096), PREFILL), (F32, BF16)):
            yield forward(operator, shape, dtype, threads=1)
            yield forward_backward(operator, shape, dtype, threads=1)
    for operator, dtype, shape in itertools.product(combined, (F32, BF16), (ONE_TOKEN, PREFILL)):
        yield forward(operator, shape, dtype)
        yield forward_backward(operator, shape, dtype)
    for operator in norms:
        yield forward(operator, PREFILL, BF16, parameter_dtype=F32)
        yield forward_backward(operator, PREFILL, BF16, parameter_dtype=F32)


def make_tensors(
    operator: Operator, shape: tuple[int, int], dtype: torch.dtype, parameter_dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Returns the operator's arguments."""
    generator = torch.Generator(device).manual_seed(shape[0] * shape[1])

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows = [normal(shape, dtype) for _ in range(operator.rows)]
    return rows + [normal(shape[-1:], parameter_dtype) for _ in range(operator.parameters)]


def forward_case(
    operator: Operator,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    device: str,
    threads: int = 2,
    parameter_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> Case:
    """Returns the case of a call without gradients, beside a plain copy where that moves as much memory.

    The parameters have the input's dtype, as PyTorch's own functions want them, unless told otherwise.
    """
    tensors = make_tensors(operator, shape, dtype, parameter_dtype or dtype, device)
    peers: dict[str, Callable[[], object]] = {"PyTorch": lambda: operator.eager(*tensors)}
    if operator.rows == operator.outputs == 1:
        peers["clone"] = tensors[0].clone
    if compiled and may_compile(shape, dtype):
        peers["torch.compile"] = lambda: compiled_eager(operator)(*tensors)
    if operator.name == "rms_norm" and LlamaRMSNorm is not None:
        module = llama_module(tensors[1])
        peers["Transformers"] = lambda: module(tensors[0])
    return Case(
        op=title(operator, dtype, parameter_dtype),
        shape=f"{shape[0]} x {shape[1]}",
        dtype=dtype,
        device=device,
        threads=threads,
        ours=lambda: operator.ours(*tensors),
        peers=peers,
        check=lambda: is_right(operator, tensors, None),
        bytes=sum(tensor.nbytes for tensor in tensors) + operator.outputs * tensors[0].nbytes,
    )


def layer_cases(
    kernel: ModuleType, operator: Operator, shape: tuple[int, int], dtype: torch.dtype, *, device: str
) -> Iterator[Case]:
    """Generates the case of RMSNorm as kernelize puts it into a model, beside the module that it replaces.

    None where Transformers, whose module that is, is not installed.
    """
    if LlamaRMSNorm is None:
        return
    tensors = make_tensors(operator, shape, dtype, dtype, device)
    input, gamma = tensors
    module, ours = llama_module(gamma), llama_module(gamma)
    ours.forward = types.MethodType(kernel.layers.RMSNorm.forward, ours)
    yield Case(
        op="RMSNorm layer",
        shape=f"{shape[0]} x {shape[1]}",
        dtype=dtype,
        device=device,
        threads=2,
        ours=lambda: ours(input),
        peers={"Transformers": lambda: module(input), "PyTorch": lambda: operator.eager(input, gamma)},
        check=lambda: is_right(operator, tensors, None) and torch.equal(ours(input), operator.ours(input, gamma)),
        bytes=2 * input.nbytes + gamma.nbytes,
    )


def forward_backward_case(
    operator: Operator,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    device: str,
    threads: int = 2,
    parameter_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> Case:
    """Returns the case of a call and the gradients of all its tensors."""
    tensors = make_tensors(operator, shape, dtype, parameter_dtype or dtype, device)
    grads = [torch.randn_like(tensors[0]) for _ in range(operator.outputs)]

    def with_gradients(call: Call) -> Callable[[], object]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        return lambda: torch.autograd.grad(as_tuple(call(*leaves)), leaves, grads)

    peers = {"PyTorch": with_gradients(operator.eager)}
    if compiled and may_compile(shape, dtype):
        peers["torch.compile"] = with_gradients(lambda *leaves: compiled_eager(operator)(*leaves))
    return Case(
        op=title(operator, dtype, parameter_dtype),
        shape=f"{shape[0]} x {shape[1]}",
        dtype=dtype,
        direction="forward+backward",
        device=device,
        threads=threads,
        ours=with_gradients(operator.ours),
        peers=peers,
        check=lambda: is_right(operator, tensors, grads),
        bytes=operator.traffic * tensors[0].nbytes,
    )


def title(operator: Operator, dtype: torch.dtype, parameter_dtype: torch.dtype | None) -> str:
    """Returns what the table calls an operator, with the parameters' dtype where it is not the input's."""
    if parameter_dtype in (None, dtype):
        return operator.name
    return f"{operator.name}, {str(parameter_dtype).removeprefix('torch.')} parameters"


def llama_module(gamma: Tensor) -> torch.nn.Module:
    """Returns Transformers' RMS norm with a weight."""
    module = LlamaRMSNorm(gamma.numel(), EPSILON).to(gamma).requires_grad_(False)
    module.weight.copy_(gamma)
    return module


def may_compile(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Tells whether torch.compile takes part: not for one row or one more dtype, where it would compile once more."""
    return shape[0] > 1 and dtype is not F16


@cache
def compiled_eager(operator: Operator) -> Call:
    """Returns PyTorch's way compiled for any shape."""
    return torch.compile(operator.eager, dynamic=True)


def is_right(operator: Operator, tensors: list[Tensor], grads: list[Tensor] | None) -> bool:
    """Tells whether results, or with `grads` gradients, lose at most twice what PyTorch's own lose against float64."""
    rows, parameters = tensors[: operator.rows], tensors[operator.rows :]
    exact = results(operator.exact, rows, [parameter.double() for parameter in parameters], grads, torch.float64)
    ours = results(operator.ours, rows, parameters, grads, rows[0].dtype)
    plain = results(operator.eager, rows, parameters, grads, rows[0].dtype)
    for ours_one, plain_one, exact_one in zip(ours, plain, exact, strict=True):
        floor = 2 * torch.finfo(ours_one.dtype).eps * exact_one.abs().max()
        allowed = 2 * (plain_one - exact_one).abs().max() + floor
        if not (ours_one - exact_one).abs().max() <= allowed:
            return False
    return True


def results(
    call: Call, rows: list[Tensor], parameters: list[Tensor], grads: list[Tensor] | None, dtype: torch.dtype
) -> list[Tensor]:
    """Returns a call's outputs, or with `grads` the gradients of its rows and parameters.

    In float64 in blocks of rows, for the whole would not fit in memory; the parameters' gradients are summed over them.
    """
    count, width = rows[0].shape
    step = max(1, 2**22 // width) if dtype == torch.float64 else count
    blocks, parameter_gradients = [], [torch.zeros_like(parameter) for parameter in parameters]
    for begin in range(0, count, step):
        part = [tensor[begin : begin + step].to(dtype) for tensor in rows]
        if grads is None:
            blocks.append(as_tuple(call(*part, *parameters)))
            continue
        leaves = [tensor.detach().requires_grad_() for tensor in (*part, *parameters)]
        incoming = [grad[begin : begin + step].to(dtype) for grad in grads]
        gradients = torch.autograd.grad(as_tuple(call(*leaves)), leaves, incoming)
        blocks.append(gradients[: len(rows)])
        for total, gradient in zip(parameter_gradients, gradients[len(rows) :], strict=True):
            total += gradient
    whole = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
    return whole if grads is None else [*whole, *parameter_gradients]


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns one or several results as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
