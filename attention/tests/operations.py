"""Calls of attention as a table, and the two checks that every test of their numbers makes.

A variant says which optional arguments and options a call has. Shapes are named by the code path they take.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType

import pytest
import torch
from conftest import assert_close_to_exact, load_kernel, on_the_bench
from torch import Tensor

Inputs = dict[str, Tensor]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}

by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def strategies() -> list:
    """Each dtype with each strategy that the loaded build has for it on the hardware at hand.

    On the bench not `fallback`, which has no kernels.
    """
    supported = load_kernel()._strategies.ACCELERATED_DTYPES
    cases = []
    for name, dtype in DTYPES.items():
        cases += [(dtype, "flash_accelerated", f"{name}_flash_accelerated")] if dtype in supported else []
        cases += [(dtype, "flash_unit", f"{name}_flash_unit")]
        cases += [] if on_the_bench() else [(dtype, "fallback", f"{name}_fallback")]
    return [pytest.param(dtype, strategy, id=id) for dtype, strategy, id in cases]


by_strategy = pytest.mark.parametrize("dtype, strategy", strategies())


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys


SMALL = Shape(2, 4, 2, 5, 7, 16, 24)
TILE_PAST_A_SPLIT = Shape(1, 2, 1, 10, 1100, 16, 24)


def _small(id: str, *sizes: int):
    return pytest.param(Shape(*sizes), id=id, marks=pytest.mark.small)


def _checked(id: str, *sizes: int):
    return pytest.param(Shape(*sizes), id=id, marks=[pytest.mark.small, pytest.mark.simt_checked])


# A tile has 64 rows, which are the queries of a group's heads, and 64 to 256 keys; few queries share a reading of 1024
# keys at a time; where a head has more than a MiB of keys and values, tiles of queries take turns. A vector has 4, 8 or
# 16 float32 lanes; bfloat16 comes in pairs, and 32 of them in a row of AMX.
SHAPES = [
    _small("one_of_everything", 1, 1, 1, 1, 1, 1, 1),
    _small("one_key", 2, 2, 2, 3, 1, 16, 16),
    _small("one_query", 2, 4, 2, 1, 9, 16, 16),
    _checked("one_query_of_many_heads", 1, 8, 1, 1, 33, 32, 32),
    _small("whole_vectors", 1, 2, 2, 16, 16, 32, 32),
    _small("one_past_vectors", 1, 2, 1, 17, 33, 33, 17),
    _checked("odd_head_dims", 2, 3, 3, 5, 6, 19, 7),
    _small("head_dim_of_two_and_one", 1, 2, 1, 4, 5, 2, 1),
    _small("narrow_keys_wide_values", 1, 2, 2, 6, 10, 3, 65),
    _small("more_queries_than_keys", 1, 2, 1, 9, 4, 16, 16),
    _small("one_below_a_tile", 1, 1, 1, 63, 63, 16, 16),
    _small("whole_tiles", 1, 2, 1, 64, 128, 64, 64),
    _checked("one_past_a_tile", 1, 2, 2, 65, 65, 24, 40),
    _small("groups_past_a_tile", 1, 6, 2, 33, 70, 16, 16),
    _small("one_query_past_a_split", 1, 4, 2, 1, 1025, 8, 8),
    _small("few_stationary_rows", 1, 1, 1, 17, 33, 520, 24),
    pytest.param(Shape(1, 2, 1, 130, 257, 32, 32), id="several_tiles"),
    pytest.param(Shape(1, 2, 1, 33, 40, 80, 96), id="head_dims_of_models"),
    pytest.param(Shape(1, 1, 1, 70, 70, 192, 128), id="head_dims_of_deepseek"),
    pytest.param(Shape(1, 1, 1, 20, 140, 256, 256), id="wide_heads"),
    pytest.param(Shape(1, 1, 1, 9, 20, 513, 257), id="odd_wide_heads"),
    pytest.param(Shape(1, 1, 1, 3, 9, 1024, 1024), id="widest_heads"),
    pytest.param(Shape(1, 4, 1, 2, 2100, 40, 24), id="few_queries_of_several_splits"),
    pytest.param(TILE_PAST_A_SPLIT, id="tile_past_a_split"),
]
by_shape = pytest.mark.parametrize("shape", SHAPES)
# Only the forward splits keys, on a GPU from 257 or 1025 on, takes them in parts, and has its own way with one query of
# a head, on a CPU.
PAST_A_PART = Shape(1, 1, 1, 40, 300, 1024, 1024)
by_forward_shape = pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        _checked("splits_and_slices_on_a_gpu", 1, 2, 1, 1, 257, 8, 136),
        pytest.param(PAST_A_PART, id="keys_past_a_part"),
        pytest.param(Shape(1, 2, 2, 1, 300, 80, 72), id="one_query_of_a_head"),
        pytest.param(Shape(1, 3, 3, 1, 1100, 33, 129), id="one_query_of_a_head_past_a_split"),
        pytest.param(Shape(1, 1, 1, 1, 140, 520, 257), id="one_query_of_a_wide_head"),
    ],
)


@dataclass(frozen=True)
class Variant:
    """Which optional arguments and options a call has.

    mask, bias: what they are, by a name of `MASKS` or `BIASES`; None for none.
    """

    id: str
    mask: str | None = None
    bias: str | None = None
    sinks: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id

    def inputs(
        self,
        shape: Shape = SMALL,
        dtype: torch.dtype = F32,
        *,
        device: str = "cpu",
        requires_grad: bool = False,
        seed: int = 0,
    ) -> Inputs:
        """Arguments by name; the floating-point ones can be differentiated."""
        batch, heads, key_heads = shape.batch, shape.heads, shape.key_heads
        inputs = {
            "query": normal((batch, heads, shape.queries, shape.width), dtype, device=device, seed=seed),
            "key": normal((batch, key_heads, shape.keys, shape.width), dtype, device=device, seed=seed + 1),
            "value": normal((batch, key_heads, shape.keys, shape.value_width), dtype, device=device, seed=seed + 2),
        }
        if self.mask is not None:
            sizes = MASKS[self.mask](*shape.scores)
            inputs["mask"] = (normal(sizes, F32, seed=seed + 3) > -0.7).to(device)
        if self.bias is not None:
            sizes = BIASES[self.bias](*shape.scores)
            bias_dtype = F32 if self.bias.startswith("float32") else dtype
            inputs["attn_bias"] = normal(sizes, bias_dtype, device=device, seed=seed + 4)
        if self.sinks:
            inputs["sinks"] = normal((heads,), dtype, device=device, seed=seed + 5)
        for tensor in differentiable(inputs).values():
            tensor.requires_grad_(requires_grad)
        return inputs

    def run(self, kernel: ModuleType, inputs: Inputs, strategy: str = "flash_unit") -> tuple[Tensor, Tensor]:
        """The kernel's output and log-sum-exp."""
        options = kernel.AttentionOptions(**self.options)
        return kernel.attention(**inputs, options=options, strategy=strategy, return_lse=True)

    def run_exact(self, kernel: ModuleType, inputs: Inputs) -> tuple[Tensor, Tensor, Inputs]:
        """The definition's results in float64 on the CPU, and the arguments that they were computed from."""
        leaves = {
            name: tensor.detach().cpu().double().requires_grad_(tensor.requires_grad)
            if tensor.is_floating_point()
            else tensor.cpu()
            for name, tensor in inputs.items()
        }
        options = kernel.AttentionOptions(**self.options)
        return *kernel.reference.attention(**leaves, options=options, compute_dtype=torch.float64), leaves

    def run_plain(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What a model computes in the inputs' dtype."""
        detached = {name: tensor.detach() for name, tensor in inputs.items()}
        return eager_attention(**inputs, options=self.options), eager_lse(**detached, options=self.options)


MASKS = {
    "full": lambda batch, heads, queries, keys: (batch, heads, queries, keys),
    "of_keys": lambda batch, heads, queries, keys: (batch, 1, 1, keys),
    "of_pairs": lambda batch, heads, queries, keys: (queries, keys),
    "of_heads": lambda batch, heads, queries, keys: (heads, 1, keys),
    "of_queries": lambda batch, heads, queries, keys: (batch, 1, queries, 1),
}
BIASES = {
    "full": MASKS["full"],
    "float32_full": MASKS["full"],
    "of_heads": lambda batch, heads, queries, keys: (1, heads, queries, keys),
    "float32_of_keys": lambda batch, heads, queries, keys: (batch, 1, 1, keys),
    "of_one_key": lambda batch, heads, queries, keys: (heads, queries, 1),
}

PLAIN = Variant("plain")
CAUSAL = Variant("causal", options={"is_causal": True})
EVERYTHING = Variant(
    "everything",
    mask="of_keys",
    bias="of_heads",
    sinks=True,
    options={"is_causal": True, "window": (40, -1), "softcap": 3.0, "scale": 0.4},
)
VARIANTS = (
    PLAIN,
    CAUSAL,
    Variant("scale", options={"scale": 0.7}),
    Variant("window", options={"window": (3, 2)}),
    Variant("causal_window", options={"is_causal": True, "window": (70, 0)}),
    Variant("left_window", options={"window": (2, -1)}),
    Variant("softcap", options={"softcap": 2.0}),
    Variant("mask_full", mask="full"),
    Variant("mask_of_keys", mask="of_keys", options={"is_causal": True}),
    Variant("mask_of_pairs", mask="of_pairs"),
    Variant("mask_of_heads", mask="of_heads"),
    Variant("mask_of_queries", mask="of_queries"),
    Variant("bias_full", bias="full"),
    Variant("bias_full_softcap", bias="full", options={"softcap": 2.0}),
    Variant("float32_bias_full", bias="float32_full"),
    Variant("bias_of_heads", bias="of_heads", options={"is_causal": True}),
    Variant("float32_bias_of_keys", bias="float32_of_keys"),
    Variant("bias_of_one_key", bias="of_one_key", sinks=True, options={"softcap": 2.0}),
    Variant("sinks", sinks=True),
    Variant("sinks_causal_window", sinks=True, options={"is_causal": True, "window": (4, 0)}),
    EVERYTHING,
)
WITH_GRADIENT_OF_ALL = (PLAIN, CAUSAL, replace(EVERYTHING, options={"softcap": 3.0}, id="bias_and_sinks"), EVERYTHING)


def for_each(*variants: Variant):
    """Parametrises `variant`."""
    return pytest.mark.parametrize("variant", variants, ids=str)


def normal(shape: Iterable[int], dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def differentiable(inputs: Inputs) -> Inputs:
    return {name: tensor for name, tensor in inputs.items() if tensor.is_floating_point()}


# How models compute the same.


def eager_scores(query, key, mask, attn_bias, options) -> tuple[Tensor, Tensor]:
    """In the inputs' dtype, each result rounded to it, and which keys are seen (`eager_attention_forward`)."""
    kernel = load_kernel()
    groups = query.shape[1] // key.shape[1]
    scale = options.get("scale", query.shape[-1] ** -0.5)
    scores = query @ key.repeat_interleave(groups, 1).mT * scale
    if "softcap" in options:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if attn_bias is not None:
        scores = scores + attn_bias
    visible = kernel.reference.visible_keys(query, key, mask, attn_bias, kernel.AttentionOptions(**options))
    return scores.where(visible, torch.finfo(scores.dtype).min), visible


def eager_attention(query, key, value, mask=None, attn_bias=None, sinks=None, *, options) -> Tensor:
    scores, visible = eager_scores(query, key, mask, attn_bias, options)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=F32).to(query.dtype)[..., : key.shape[2]].where(visible, 0)
    return weights @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)


def eager_lse(query, key, value, mask=None, attn_bias=None, sinks=None, *, options) -> Tensor:
    scores, visible = eager_scores(query, key, mask, attn_bias, options)
    scores = scores.float().where(visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.logsumexp(scores, -1)


def recomputed_gradients(inputs: Inputs, grad: Tensor, options: dict) -> Inputs:
    """In float32, with the probabilities recomputed from a log-sum-exp in float32, as in every flash attention."""
    wide = {name: t.detach().float() if t.is_floating_point() else t for name, t in inputs.items()}
    wide = {name: t.requires_grad_(inputs[name].requires_grad) for name, t in wide.items()}
    with torch.no_grad():
        lse = eager_lse(**wide, options=options).unsqueeze(-1)
        output = eager_attention(**wide, options=options).to(grad.dtype).float()
    query, key, value, sinks = (wide.get(name) for name in ("query", "key", "value", "sinks"))
    scores, visible = eager_scores(query, key, wide.get("mask"), wide.get("attn_bias"), options)
    shift = lse.where(lse != -torch.inf, 0)
    weights = torch.exp(scores.detach() - shift).where(visible, 0)
    grad, groups = grad.float(), query.shape[1] // key.shape[1]
    delta = (grad * output).sum(-1, keepdim=True).where(visible.any(-1, keepdim=True), 0)
    grad_scores = weights * (grad @ value.detach().repeat_interleave(groups, 1).mT - delta)
    leaves = {name: wide[name] for name in ("query", "key", "attn_bias") if name in wide and wide[name].requires_grad}
    found = gradients(scores, leaves, grad_scores) if leaves else {}
    found["value"] = (weights.mT @ grad).unflatten(1, (-1, groups)).sum(2)
    if sinks is not None:
        found["sinks"] = -(torch.exp(sinks.detach().view(1, -1, 1, 1) - shift) * delta).sum((0, 2, 3))
    return {name: found[name].to(t.dtype) for name, t in inputs.items() if t.requires_grad}


def check_forward(kernel: ModuleType, variant: Variant, inputs: Inputs, strategy: str) -> None:
    """The results meet the tolerance rule and are contiguous, and the inputs are as they were."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    output, lse = variant.run(kernel, inputs, strategy)
    exact, exact_lse, _ = variant.run_exact(kernel, inputs)
    plain, plain_lse = variant.run_plain(inputs)
    assert output.dtype == inputs["query"].dtype
    assert lse.dtype == F32
    assert_close_to_exact(output, exact, plain)
    assert_close_to_exact(lse, exact_lse, plain_lse)
    for result in (output, lse):
        assert result.is_contiguous()
        assert all(not shares_storage(result, tensor) for tensor in inputs.values())
    for name, tensor in inputs.items():
        assert torch.equal(_bits(tensor), _bits(before[name])), f"{name} was changed"


MANY_ROWS, MANY_ELEMENTS = 64, 256
"""In a gradient of so many elements, and of so many queries, whose rounded log-sum-exps each spoil a row of it, plain
is not exact by luck."""


def check_gradients(kernel: ModuleType, variant: Variant, inputs: Inputs, strategy: str) -> None:
    """The gradients of the inputs that require one meet the tolerance rule and have their input's dtype.

    There are two plain ways: through PyTorch's softmax, and as a flash attention must compute; what loses more is the
    yardstick. Each gradient meets the rule by itself, but where plain may be exact by luck, as with few queries, with
    the few elements of the sinks' gradient, or one that is 0 but for the rounding of float64: there what plain loses is
    the most that it loses in any gradient of the call, whose inputs are all of the order of 1.
    """
    output, _ = variant.run(kernel, inputs, strategy)
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    exact_output, _, leaves = variant.run_exact(kernel, inputs)
    exact = gradients(exact_output, leaves, grad.cpu().double())
    plain = (
        gradients(variant.run_plain(inputs)[0], inputs, grad),
        recomputed_gradients(inputs, grad, variant.options),
    )
    for name, gradient in found.items():
        assert gradient.dtype == inputs[name].dtype, name
        assert gradient.is_contiguous(), name
        assert gradient.shape == inputs[name].shape, name
    for dtype in {gradient.dtype for gradient in found.values()}:
        names = [name for name, gradient in found.items() if gradient.dtype == dtype]
        vectors = (torch.cat([each[name].flatten().cpu() for name in names]) for each in (found, exact, *plain))
        _check_by_worse_way(" and ".join(names), *vectors)
    if output.shape[:-1].numel() < MANY_ROWS:
        return
    largest = max((largest_of(gradient) for gradient in exact.values()), default=0.0)
    for name, gradient in found.items():
        is_zero = largest_of(exact[name]) <= torch.finfo(gradient.dtype).eps * largest
        if gradient.numel() >= MANY_ELEMENTS and not is_zero:
            _check_by_worse_way(name, *(each[name].cpu() for each in (found, exact, *plain)))


def _check_by_worse_way(names: str, out: Tensor, exact: Tensor, *ways: Tensor) -> None:
    try:
        assert_close_to_exact(out, exact, max(ways, key=lambda way: largest_error(way, exact)))
    except AssertionError as error:
        raise AssertionError(f"gradient of {names}: {error}") from None


def largest_of(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def largest_error(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact).abs().max().item() if result.numel() else 0.0


def gradients(output: Tensor, inputs: Inputs, grad: Tensor) -> Inputs:
    """The gradients of the inputs that require one, by name."""
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(output, tuple(wanted.values()), grad), strict=True))


def random_gradient(output: Tensor, seed: int = 101) -> Tensor:
    return normal(output.shape, output.dtype, device=output.device.type, seed=seed)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0 and b.numel() > 0


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])
