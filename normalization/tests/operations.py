"""The public functions as a table, and the two checks that every test of their numbers makes.

An operation says which arguments a function takes and how PyTorch and models compute the same thing. Shapes, widths
and dtypes are named by the code path they take.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close_to_exact
from torch import Tensor

Inputs = dict[str, Tensor]


def llama_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Two roundings: the normalised row is rounded to the input's dtype before it meets the weight (Llama, Qwen3)."""
    return (gamma * _normalised(input, epsilon).to(input.dtype)).to(input.dtype)


def olmo_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """One rounding, after the weight (OLMo, GPT-OSS)."""
    return (gamma * _normalised(input, epsilon)).to(input.dtype)


def qwen_zero_centered_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6, *, zero_centered: bool) -> Tensor:
    """One rounding, and the weight is an offset from 1 (Qwen3.5, Gemma)."""
    assert zero_centered
    return (_normalised(input, epsilon) * (1 + gamma.float())).to(input.dtype)


def qwen_rms_norm_gated(input: Tensor, gate: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Rounded before the weight, after it and after the gate (Qwen3-Next)."""
    return (llama_rms_norm(input, gamma, epsilon) * F.silu(gate.float())).to(input.dtype)


def kimi_rms_norm_gated(
    input: Tensor, gate: Tensor, gamma: Tensor, epsilon: float = 1e-6, *, activation: str = "silu"
) -> Tensor:
    """One rounding, at the end (Kimi-Linear, whose activation is sigmoid)."""
    activate = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation]
    return (gamma.float() * _normalised(input, epsilon) * activate(gate.float())).to(input.dtype)


def torch_layer_norm(input: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """PyTorch's own, in the input's dtype, parameters included."""
    parameters = [None if parameter is None else parameter.to(input.dtype) for parameter in (gamma, beta)]
    return F.layer_norm(input, gamma.shape, *parameters, epsilon)


def float32_layer_norm(input: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """PyTorch's own in float32, rounded once."""
    parameters = [None if parameter is None else parameter.float() for parameter in (gamma, beta)]
    return F.layer_norm(input.float(), gamma.shape, *parameters, epsilon).to(input.dtype)


def torch_softmax(input: Tensor) -> Tensor:
    return torch.softmax(input, -1)


def after_addition(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The residual addition of models in front of a norm."""

    def add_and_norm(input: Tensor, residual: Tensor, *parameters: Tensor, **options) -> tuple[Tensor, Tensor]:
        total = input + residual
        return norm(total, *parameters, **options), total

    return add_and_norm


def _normalised(input: Tensor, epsilon: float) -> Tensor:
    x = input.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


@dataclass(frozen=True)
class Operation:
    """One public function.

    name: of the function, of its reference and of its registered op.
    rows: the arguments of the input's shape and dtype, in order.
    parameters: the arguments of shape `[H]` that follow them.
    plain: the ways in which PyTorch and models compute it; the kernel must stand the comparison with each.
    """

    id: str
    name: str
    rows: tuple[str, ...]
    parameters: tuple[str, ...]
    plain: tuple[Callable[..., Tensor | tuple[Tensor, Tensor]], ...]
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id

    def inputs(
        self,
        shape: Iterable[int],
        dtype: torch.dtype = torch.float32,
        parameter_dtype: torch.dtype | None = None,
        *,
        device: str = "cpu",
        requires_grad: bool = False,
        seed: int = 0,
    ) -> Inputs:
        """Normally distributed arguments by name; the parameters are float32 unless parameter_dtype says otherwise."""
        generator = torch.Generator().manual_seed(seed)
        shape = tuple(shape)

        def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            values = torch.randn(shape, generator=generator).to(dtype).to(device)
            return values.requires_grad_(requires_grad)

        inputs = {name: normal(shape, dtype) for name in self.rows}
        for name in self.parameters:
            inputs[name] = normal(shape[-1:], parameter_dtype or torch.float32)
        return inputs

    def run(self, module: ModuleType, inputs: Inputs, **options) -> tuple[Tensor, ...]:
        """The results of the function of that name in `module`, the kernel or its reference."""
        return as_tuple(getattr(module, self.name)(**inputs, **self.options, **options))

    def run_plain(self, plain: Callable, inputs: Inputs, **options) -> tuple[Tensor, ...]:
        return as_tuple(plain(*inputs.values(), **self.options, **options))

    def run_exact(self, kernel: ModuleType, inputs: Inputs, **options) -> tuple[tuple[Tensor, ...], Inputs]:
        """The results in float64 on the CPU, and the float64 leaves that they were computed from."""
        leaves = {
            name: tensor.detach().cpu().double().requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()
        }
        arguments = dict(leaves)
        if "residual" in self.rows:
            # The sum is rounded to the input's dtype, which float64 leaves do not show: the residual absorbs it.
            total = (inputs["input"] + inputs["residual"]).detach().cpu().double()
            rounding = total - (leaves["input"] + leaves["residual"]).detach()
            arguments["residual"] = leaves["residual"] + rounding.where(~rounding.isnan(), 0)  # inf - inf
        return self.run(kernel.reference, arguments, compute_dtype=torch.float64, **options), leaves


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


RMS_NORM = Operation("rms_norm", "rms_norm", ("input",), ("gamma",), (llama_rms_norm, olmo_rms_norm))
RMS_NORM_ZERO_CENTERED = Operation(
    "rms_norm_zero_centered",
    "rms_norm",
    ("input",),
    ("gamma",),
    (qwen_zero_centered_rms_norm,),
    {"zero_centered": True},
)
RMS_NORM_GATED = Operation(
    "rms_norm_gated", "rms_norm_gated", ("input", "gate"), ("gamma",), (qwen_rms_norm_gated, kimi_rms_norm_gated)
)
RMS_NORM_SIGMOID_GATED = Operation(
    "rms_norm_sigmoid_gated",
    "rms_norm_gated",
    ("input", "gate"),
    ("gamma",),
    (kimi_rms_norm_gated,),
    {"activation": "sigmoid"},
)
FUSED_ADD_RMS_NORM = Operation(
    "fused_add_rms_norm",
    "fused_add_rms_norm",
    ("input", "residual"),
    ("gamma",),
    (after_addition(llama_rms_norm), after_addition(olmo_rms_norm)),
)
LAYER_NORM = Operation(
    "layer_norm", "layer_norm", ("input",), ("gamma", "beta"), (torch_layer_norm, float32_layer_norm)
)
LAYER_NORM_WITHOUT_BETA = Operation(
    "layer_norm_without_beta", "layer_norm", ("input",), ("gamma",), (torch_layer_norm, float32_layer_norm)
)
FUSED_ADD_LAYER_NORM = Operation(
    "fused_add_layer_norm",
    "fused_add_layer_norm",
    ("input", "residual"),
    ("gamma", "beta"),
    (after_addition(torch_layer_norm), after_addition(float32_layer_norm)),
)
FUSED_ADD_LAYER_NORM_WITHOUT_BETA = Operation(
    "fused_add_layer_norm_without_beta",
    "fused_add_layer_norm",
    ("input", "residual"),
    ("gamma",),
    (after_addition(torch_layer_norm), after_addition(float32_layer_norm)),
)
SOFTMAX_LAST_AXIS = Operation("softmax_last_axis", "softmax_last_axis", ("input",), (), (torch_softmax,))

RMS_NORMS = (RMS_NORM, RMS_NORM_ZERO_CENTERED, RMS_NORM_GATED, RMS_NORM_SIGMOID_GATED, FUSED_ADD_RMS_NORM)
LAYER_NORMS = (
    LAYER_NORM,
    LAYER_NORM_WITHOUT_BETA,
    FUSED_ADD_LAYER_NORM,
    FUSED_ADD_LAYER_NORM_WITHOUT_BETA,
)
NORMS = (*RMS_NORMS, *LAYER_NORMS)
OPERATIONS = (*NORMS, SOFTMAX_LAST_AXIS)


def for_each(*operations: Operation):
    """Parametrises `operation`."""
    return pytest.mark.parametrize("operation", operations, ids=str)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

DTYPES = {"f32": (F32, F32), "f16": (F16, F32), "bf16": (BF16, F32)}
MODEL_DTYPES = {"f16_parameters_f16": (F16, F16), "bf16_parameters_bf16": (BF16, BF16)}

by_input_dtype = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
by_dtypes = pytest.mark.parametrize("dtypes", [*DTYPES.values(), *MODEL_DTYPES.values()], ids=[*DTYPES, *MODEL_DTYPES])


def for_each_with_dtypes(*operations: Operation):
    """Parametrises `operation` and `dtypes`: float32 parameters for all, those of models for the plain functions."""
    cases = [(operation, dtypes, id) for operation in (RMS_NORM, LAYER_NORM) for id, dtypes in MODEL_DTYPES.items()]
    cases += [(operation, dtypes, id) for operation in operations for id, dtypes in DTYPES.items()]
    return pytest.mark.parametrize(
        "operation, dtypes",
        [pytest.param(operation, dtypes, id=f"{operation}-{id}") for operation, dtypes, id in cases],
    )


def _small(value, id: str):
    return pytest.param(value, id=id, marks=pytest.mark.small)


# A vector has 4 (generic), 8 (AVX2) or 16 (AVX-512) float32 lanes; loops over rows take up to 4 of them at a time.
_AROUND_VECTORS = [
    _small(width, f"{place}_{vector}")
    for vector in (4, 8, 16, 32, 64)
    for width, place in ((vector - 1, "one_below"), (vector, "exactly"), (vector + 1, "one_past"))
]

# A GPU gives a row to a warp, to a block or to a larger block, reads it in vectors of 16 bytes if they divide it, and
# reads again what its threads cannot hold in registers. Where one begins depends on dtype and direction.
GPU_WIDTHS = {
    35: "warp_of_elements",
    72: "warp_of_vectors",
    257: "block_of_elements",
    1000: "block_of_vectors",
    1027: "large_block_of_elements_backward",
    2056: "large_block_of_vectors_backward",
    2051: "large_block_of_elements",
    4104: "large_block_of_vectors_in_both",
    4103: "elements_not_held",
    8224: "large_block_of_vectors",
    16400: "vectors_not_held",
}
by_width = pytest.mark.parametrize(
    "width",
    [
        _small(1, "single_element"),
        _small(2, "pair"),
        *_AROUND_VECTORS,
        *(
            pytest.param(width, id=id, marks=[pytest.mark.small, pytest.mark.simt_checked])
            for width, id in GPU_WIDTHS.items()
        ),
        pytest.param(576, id="model_width"),
        pytest.param(4097, id="long_row"),
        pytest.param(8192 + 17, id="two_accumulation_blocks"),
        pytest.param(32768 + 1, id="very_long_row"),
    ],
)

by_shape = pytest.mark.parametrize(
    "shape",
    [
        _small((19,), "rank_1"),
        _small((3, 19), "rank_2"),
        _small((2, 3, 19), "rank_3"),
        _small((2, 1, 3, 19), "rank_4"),
        _small((2, 1, 2, 3, 19), "rank_5"),
        _small((0, 19), "no_rows"),
        _small((0, 3, 19), "empty_first_axis"),
        _small((3, 0, 19), "empty_middle_axis"),
        _small((1, 19), "single_row"),
        pytest.param((300, 33), id="many_rows"),
        pytest.param((1000, 96), id="several_gradient_chunks"),
    ],
)


def check_forward(kernel: ModuleType, operation: Operation, inputs: Inputs, **options) -> None:
    """The results meet the tolerance rule, are contiguous in the input's dtype, and the inputs are as they were."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    outputs = operation.run(kernel, inputs, **options)
    exact, _ = operation.run_exact(kernel, inputs, **options)
    for plain in operation.plain:
        plain_outputs = operation.run_plain(plain, inputs, **options)
        for output, exact_output, plain_output in zip(outputs, exact, plain_outputs, strict=True):
            assert_close_to_exact(output, exact_output, plain_output)
    for output in outputs:
        assert output.dtype == inputs["input"].dtype
        assert output.device == inputs["input"].device
        assert output.is_contiguous()
        assert all(not shares_storage(output, tensor) for tensor in inputs.values())
    for name, tensor in inputs.items():
        assert torch.equal(_bits(tensor), _bits(before[name])), f"{name} was changed"


def check_gradients(kernel: ModuleType, operation: Operation, inputs: Inputs, **options) -> None:
    """The gradients of the inputs that require one meet the tolerance rule and have their input's dtype."""
    outputs = operation.run(kernel, inputs, **options)
    grads = random_gradients(outputs)
    found = gradients(outputs, inputs, grads)
    exact_outputs, leaves = operation.run_exact(kernel, inputs, **options)
    exact = gradients(exact_outputs, leaves, [grad.cpu().double() for grad in grads])
    for plain in operation.plain:
        plain_found = gradients(operation.run_plain(plain, inputs, **options), inputs, grads)
        for name, grad in found.items():
            assert grad.dtype == inputs[name].dtype, name
            assert_close_to_exact(grad, exact[name], plain_found[name])


def check_rows_of_any_scale(
    kernel: ModuleType, operation: Operation, inputs: Inputs, scale: float, gradient_scale: float
) -> None:
    """Results and gradients of rows that are `scale` times the usual, where PyTorch itself would overflow.

    The norm of a row does not change with its scale, so PyTorch computes from rows divided by a power of two. The
    incoming gradient is `gradient_scale` times the usual; the input's is of the order of gradient_scale / scale.
    """
    factor = 2.0 ** round(math.log2(scale) - 10)
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    usual = {**inputs, "input": (inputs["input"].detach() / factor).requires_grad_()}
    outputs = operation.run(kernel, inputs)
    exact_outputs, leaves = operation.run_exact(kernel, inputs)
    grads = [grad * gradient_scale for grad in random_gradients(outputs[:1])]
    found = gradients(outputs[:1], inputs, grads)
    exact = gradients(exact_outputs[:1], leaves, [grad.cpu().double() for grad in grads])
    for output, exact_output in zip(outputs[1:], exact_outputs[1:], strict=True):
        assert_close_to_exact(output, exact_output)
    for plain in operation.plain:
        plain_outputs = operation.run_plain(plain, usual)
        assert_close_to_exact(outputs[0], exact_outputs[0], plain_outputs[0])
        plain_found = gradients(plain_outputs[:1], usual, grads)
        for name, grad in found.items():
            shrunk = 1 / factor if name in ("input", "residual") else 1
            assert_close_to_exact(grad, exact[name], (plain_found[name].double() * shrunk).to(grad.dtype))


def gradients(outputs: Iterable[Tensor], inputs: Inputs, grads: Iterable[Tensor]) -> Inputs:
    """The gradients of the inputs that require one, by name."""
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(tuple(outputs), tuple(wanted.values()), tuple(grads)), strict=True))


def random_gradients(outputs: Iterable[Tensor], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device) for out in outputs]


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0 and b.numel() > 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
