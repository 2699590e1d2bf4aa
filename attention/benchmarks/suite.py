"""The cases of `./dev bench attention`: prefill, decoding and training of models' attention.

The peers are PyTorch's scaled_dot_product_attention, which cannot bound scores nor take sinks, and the eager attention
of Transformers' models. Every call makes fresh outputs, the kernel's as its peers', and no gradient is wanted where
only the forward is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from devtools.benchmarking import Case

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

CHECKED_QUERIES = 64
"""So many last queries are compared with float64; queries do not depend on each other."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """The sizes of one layer's attention, and its options.

    addend: what is given beside causality, which is then left out: `mask`, a causal boolean mask, or `bias`, a bias of
        each head. Empty for neither.
    """

    name: str
    heads: int
    key_heads: int
    width: int
    value_width: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    addend: str = ""

    @property
    def plain(self) -> bool:
        """Whether scaled_dot_product_attention can compute it."""
        return not self.sinks and "softcap" not in self.options

    @property
    def causal(self) -> bool:
        """Whether causality is an option of the call."""
        return not self.addend

    def inputs(self, batch: int, queries: int, keys: int, dtype: torch.dtype, device: str) -> Inputs:
        """Returns query, key and value, then what there is of sinks, mask and bias, by their names."""
        generator = torch.Generator().manual_seed(queries + keys)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        inputs = {
            "query": normal(batch, self.heads, queries, self.width),
            "key": normal(batch, self.key_heads, keys, self.width),
            "value": normal(batch, self.key_heads, keys, self.value_width or self.width),
        }
        if self.sinks:
            inputs["sinks"] = normal(self.heads)
        if self.addend == "mask":
            inputs["mask"] = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        if self.addend == "bias":
            inputs["attn_bias"] = normal(1, self.heads, queries, keys)
        return inputs


HEADS_128 = Model("16 heads", 16, 16, 128)
HEADS_64 = Model("16 heads", 16, 16, 64)
LLAMA = Model("Llama-3 8B", 32, 8, 128)
MODELS = (
    Model("SmolLM2 135M", 9, 3, 64),
    Model("Phi-2", 32, 32, 80),
    Model("DeepSeek-V3 / 8", 16, 16, 192, 128),
    Model("Gemma-2 9B", 16, 8, 256, options={"softcap": 50.0}),
    Model("GPT-OSS", 64, 8, 64, options={"window": (127, 0)}, sinks=True),
)
"""With `/ 8`, there is an eighth of the model's heads."""


def cases(kernel: ModuleType, quick: bool, device: str) -> Iterator[Case]:
    """Generates the cases on a device."""
    for dtype in (BF16, F32):
        yield forward_case(kernel, HEADS_128, 1, 1024, 1024, dtype, device)
        yield forward_case(kernel, HEADS_64, 1, 2048, 2048, dtype, device)
        for addend in ("mask", "bias"):
            yield forward_case(kernel, replace(HEADS_128, addend=addend), 1, 1024, 1024, dtype, device)
        yield forward_case(kernel, LLAMA, 8, 1, 4096, dtype, device)
        yield training_case(kernel, HEADS_128, 1, 1024, dtype, device)
    if quick:
        return
    yield forward_case(kernel, HEADS_128, 1, 4096, 4096, BF16, device)
    yield forward_case(kernel, HEADS_128, 1, 1024, 1024, BF16, device, compiled=True)
    for length in (128, 512, 2048, 8192):
        yield forward_case(kernel, LLAMA, 1, length, length, BF16, device)
    for keys in (1024, 4096, 32768):
        yield forward_case(kernel, LLAMA, 1, 1, keys, BF16, device)
    yield forward_case(kernel, LLAMA, 1, 512, 512, F32, device)
    yield forward_case(kernel, LLAMA, 1, 1, 4096, F32, device)
    for dtype in (BF16, F16, F32):
        strategies = ["flash_unit", "fallback"]
        if dtype in kernel._strategies.ACCELERATED_DTYPES:
            strategies.insert(0, "flash_accelerated")
        for strategy in strategies:
            yield forward_case(kernel, LLAMA, 1, 512, 512, dtype, device, strategy=strategy)
            yield forward_case(kernel, LLAMA, 1, 1, 4096, dtype, device, strategy=strategy)
    for model in MODELS:
        yield forward_case(kernel, model, 1, 1024, 1024, BF16, device)
        yield forward_case(kernel, model, 8, 1, 1024, BF16, device)
        yield training_case(kernel, model, 1, 512, BF16, device)
    for dtype in (BF16, F32):
        yield training_case(kernel, LLAMA, 1, 512, dtype, device)
        yield training_case(kernel, HEADS_64, 1, 2048, dtype, device)


def forward_case(
    kernel: ModuleType,
    model: Model,
    batch: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    device: str,
    *,
    strategy: str | None = None,
    compiled: bool = False,
) -> Case:
    """Returns the case of a call without gradients."""
    inputs = model.inputs(batch, queries, keys, dtype, device)
    ours = ours_with(kernel, model, strategy or "autotune")
    peers: dict[str, Callable[..., Tensor]] = {}
    if model.plain:
        peers["sdpa"] = sdpa
    if model.heads * queries * keys * batch <= 1 << 28:
        peers["eager"] = eager_of(kernel, model)
    if compiled:
        peers["torch.compile"] = torch.compile(eager_of(kernel, model))
    return Case(
        op="attention" if strategy is None else f"attention, {strategy}",
        shape=title(model, batch, queries, keys),
        dtype=dtype,
        device=device,
        threads=2,
        ours=without_gradients(lambda: ours(**inputs)),
        peers={name: without_gradients(lambda call=call: call(**inputs)) for name, call in peers.items()},
        check=lambda: forward_is_right(kernel, model, ours, inputs),
        bytes=bytes_of(inputs, model),
        flops=flops_of(model, batch, queries, keys),
    )


def training_case(kernel: ModuleType, model: Model, batch: int, queries: int, dtype: torch.dtype, device: str) -> Case:
    """Returns the case of a causal call and the gradients of all its tensors."""
    inputs = model.inputs(batch, queries, queries, dtype, device)
    ours = ours_with(kernel, model, "autotune")
    eager = eager_of(kernel, model)
    grad = torch.randn_like(ours(**inputs))

    def step(call: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: gradients(call, inputs, grad)

    peers = {"eager": step(eager)}
    if model.plain:
        peers = {"sdpa": step(sdpa), **peers}
    return Case(
        op="attention",
        shape=title(model, batch, queries, queries),
        dtype=dtype,
        direction="forward+backward",
        device=device,
        threads=2,
        ours=step(ours),
        peers=peers,
        check=lambda: gradients_are_right(kernel, model, ours, eager, inputs, grad),
        bytes=3 * bytes_of(inputs, model),
        flops=7 * flops_of(model, batch, queries, queries) // 2,
    )


def title(model: Model, batch: int, queries: int, keys: int) -> str:
    """Returns what the table calls a shape."""
    widths = f"{model.width}" if not model.value_width else f"{model.width}/{model.value_width}"
    heads = f"{model.heads}/{model.key_heads} heads of {widths}"
    return f"B={batch}, {queries} x {keys}, {model.name}: {heads}{model.addend and ', ' + model.addend}"


def bytes_of(inputs: Inputs, model: Model) -> int:
    """Returns the bytes of inputs and output."""
    query, value = inputs["query"], inputs["value"]
    output = query.numel() // query.shape[3] * value.shape[3] * query.dtype.itemsize
    return sum(tensor.nbytes for tensor in inputs.values()) + output


def flops_of(model: Model, batch: int, queries: int, keys: int) -> int:
    """Returns the operations of both products over the pairs that causality, a mask and the window leave."""
    if model.addend == "bias":
        return 2 * batch * model.heads * queries * keys * (model.width + (model.value_width or model.width))
    left, _ = model.options.get("window", (-1, -1))
    pairs = sum(min(position + 1, left + 1 if left >= 0 else keys) for position in range(keys - queries, keys))
    return 2 * batch * model.heads * pairs * (model.width + (model.value_width or model.width))


def options_of(kernel: ModuleType, model: Model) -> Any:
    """Returns the options of a model's calls."""
    return kernel.AttentionOptions(is_causal=model.causal, **model.options)


def ours_with(kernel: ModuleType, model: Model, strategy: str) -> Callable[..., Tensor]:
    """Returns the kernel's call."""
    return partial(kernel.attention, options=options_of(kernel, model), strategy=strategy)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None
) -> Tensor:
    """Computes with PyTorch's operator; a single last query needs no causality."""
    grouped = query.shape[1] != key.shape[1]
    addend = attn_bias if mask is None else mask
    causal = addend is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(query, key, value, addend, is_causal=causal, enable_gqa=grouped)


def eager_of(kernel: ModuleType, model: Model) -> Callable[..., Tensor]:
    """Returns what Transformers' models do by themselves, every result rounded to the dtype."""
    options = options_of(kernel, model)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        visible = kernel.reference.visible_keys(query[:1, :1], key[:1, :1], mask, None, options)
        scores = query @ key.repeat_interleave(groups, 1).mT * query.shape[3] ** -0.5
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if attn_bias is not None:
            scores = scores + attn_bias
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = torch.softmax(scores, -1, dtype=F32).to(query.dtype)[..., : key.shape[2]]
        return weights @ value.repeat_interleave(groups, 1)

    return run


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a call in inference mode."""
    return torch.inference_mode()(call)


def exact_of(kernel: ModuleType, model: Model) -> Callable[..., Tensor]:
    """Returns the definition in float64."""
    options = options_of(kernel, model)

    def run(query: Tensor, key: Tensor, value: Tensor, **others: Tensor) -> Tensor:
        return kernel.reference.attention(query, key, value, options=options, compute_dtype=torch.float64, **others)[0]

    return run


def forward_is_right(kernel: ModuleType, model: Model, ours: Callable[..., Tensor], inputs: Inputs) -> bool:
    """Tells whether the last queries, of a call with all, lose at most twice what the eager attention loses."""
    of_queries = {"query", "mask", "attn_bias"}
    some = {name: each[..., -CHECKED_QUERIES:, :] if name in of_queries else each for name, each in inputs.items()}
    with torch.inference_mode():
        output = ours(**inputs)[:, :, -CHECKED_QUERIES:]
        return is_close(output, exact_of(kernel, model)(**some), eager_of(kernel, model)(**some))


def gradients(call: Callable[..., Tensor], inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of all inputs."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output = call(**leaves)
    return torch.autograd.grad(output, tuple(leaves.values()), grad.to(output.dtype))


def gradients_are_right(
    kernel: ModuleType,
    model: Model,
    ours: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    inputs: Inputs,
    grad: Tensor,
) -> bool:
    """Tells whether all gradients lose at most twice what the eager attention's do."""
    exact = gradients(exact_of(kernel, model), {name: each.double() for name, each in inputs.items()}, grad)
    found, plain = (gradients(call, inputs, grad) for call in (ours, eager))
    return all(is_close(*triple) for triple in zip(found, exact, plain, strict=True))


def is_close(ours: Tensor, exact: Tensor, plain: Tensor) -> bool:
    """Tells whether a result loses at most twice what PyTorch's own loses against float64."""
    floor = 2 * torch.finfo(ours.dtype).eps * exact.abs().max()
    allowed = 2 * (plain - exact).abs().max() + floor
    return bool((ours - exact).abs().max() <= allowed)
