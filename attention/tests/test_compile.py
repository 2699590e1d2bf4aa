"""torch.compile of every public function: one graph, dynamic lengths, the results of the eager run."""

import functools
import shutil

import pytest
import torch
from conftest import assert_bits_equal
from operations import (
    BF16,
    CAUSAL,
    EVERYTHING,
    F32,
    PLAIN,
    VARIANTS,
    Shape,
    by_strategy,
    for_each,
    gradients,
    normal,
    random_gradient,
)
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.isa_independent

# Every size another one, or the graph would be made for those that are equal.
SIZES = (Shape(3, 6, 2, 5, 7, 16, 24), Shape(4, 6, 2, 9, 12, 16, 24))


@pytest.fixture(autouse=True)
def fresh_compiler(kernel, monkeypatch):
    monkeypatch.setattr(kernel._autotune, "TUNER", kernel._autotune.Tuner("off", kernel._autotune.measure))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run_of(kernel, variant, strategy):
    options = kernel.AttentionOptions(**variant.options)

    def run(inputs):
        return kernel.attention(**inputs, options=options, strategy=strategy)

    return run


def assert_same(run, compiled, inputs):
    output, expected = compiled(inputs), run(inputs)
    assert_bits_equal(output.detach(), expected.detach())
    grad = random_gradient(expected)
    found = gradients(output, inputs, grad)
    for name, gradient in gradients(expected, inputs, grad).items():
        assert_bits_equal(found[name], gradient)


@by_strategy
@for_each(PLAIN, CAUSAL, EVERYTHING)
def test_forward_and_backward(kernel, device, variant, dtype, strategy):
    run = run_of(kernel, variant, strategy)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in SIZES:
        assert_same(run, compiled, variant.inputs(shape, dtype, device=device, requires_grad=True))


@for_each(*VARIANTS)
def test_autotune_takes_the_rule(kernel, device, variant):
    run = run_of(kernel, variant, "autotune")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(run, compiled, variant.inputs(dtype=BF16, device=device, requires_grad=True))


@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
@for_each(PLAIN, EVERYTHING)
def test_another_length_does_not_compile_again(kernel, device, variant, strategy):
    counter = CompileCounterWithBackend("aot_eager")
    run = run_of(kernel, variant, strategy)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for shape in SIZES:
        inputs = variant.inputs(shape, device=device)
        assert_bits_equal(compiled(inputs), run(inputs))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[0] == counts[1]


@functools.cache
def why_inductor_cannot_run(device):
    """Its compiler, for a GPU Triton, may be missing: plain PyTorch code tells, which is no concern of the kernels."""
    if device == "cpu" and shutil.which("g++"):
        return None
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:
        return f"inductor cannot compile for {device} here: {str(error).splitlines()[0]}"
    return None


@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
def test_inductor(kernel, device, strategy):
    if reason := why_inductor_cannot_run(device):
        pytest.skip(reason)
    run = run_of(kernel, EVERYTHING, strategy)
    assert_same(run, torch.compile(run, fullgraph=True), EVERYTHING.inputs(device=device, requires_grad=True))


def test_some_gradients_only(kernel, device):
    """The graph holds the choice of gradients that the eager call would make."""
    run = run_of(kernel, EVERYTHING, "flash_unit")
    inputs = EVERYTHING.inputs(device=device)
    inputs["value"].requires_grad_()
    inputs["sinks"].requires_grad_()
    assert_same(run, torch.compile(run, fullgraph=True, backend="aot_eager"), inputs)


def test_the_log_sum_exp(kernel, device):
    """Detached, since a graph cannot tell whether its gradient will be asked for."""

    def run(inputs):
        return kernel.attention(**inputs, strategy="flash_unit", return_lse=True)

    inputs = PLAIN.inputs(device=device, requires_grad=True)
    output, lse = torch.compile(run, fullgraph=True, backend="aot_eager")(inputs)
    expected, expected_lse = run(inputs)
    assert_bits_equal(output.detach(), expected.detach())
    assert_bits_equal(lse, expected_lse.detach())
    assert not lse.requires_grad
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    for name, gradient in gradients(expected, inputs, grad).items():
        assert_bits_equal(found[name], gradient)


def test_options_made_inside(kernel, device):
    def run(inputs):
        options = kernel.AttentionOptions(is_causal=True, window=(3, 0), softcap=2.0)
        return kernel.attention(**inputs, options=options, strategy="flash_unit")

    assert_same(
        run,
        torch.compile(run, fullgraph=True, backend="aot_eager"),
        PLAIN.inputs(device=device, requires_grad=True),
    )


def test_flash_attn_func(kernel, device):
    def run(inputs):
        return kernel.flash_attn_func(**inputs, causal=True, window_size=(3, 3), softcap=2.0)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 9):
        inputs = {
            name: normal((2, count, heads, 16), F32, device=device, seed=heads).requires_grad_()
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        }
        assert_same(run, compiled, inputs)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_flash_attn_varlen_func(kernel, device, paged):
    table = torch.tensor([[2, 0], [1, 3]], device=device) if paged else None

    def run(q, k, v, starts, longest):
        return kernel.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True, block_table=table)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((3, 5), (6, 4)):
        starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
        q = normal((sum(lengths), 4, 16), F32, device=device)
        sizes = (4, 4) if paged else (sum(lengths),)
        k, v = (normal((*sizes, 2, 16), F32, device=device, seed=seed) for seed in (1, 2))
        torch.testing.assert_close(compiled(q, k, v, starts, max(lengths)), run(q, k, v, starts, max(lengths)))


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_appending_and_attention_in_one_graph(kernel, device, paged):
    """The caches change, in the graph as without it."""
    table = torch.tensor([[2, 0], [1, 3]], device=device) if paged else None

    def run(q, k_cache, v_cache, k, v, lengths):
        first = kernel.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, lengths, table, causal=True)
        return first + kernel.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, lengths + 1, table, causal=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads in (2, 4):
        q = normal((2, 1, heads, 16), F32, device=device)
        caches = [normal((4, 4, 2, 16) if paged else (2, 8, 2, 16), F32, device=device, seed=s) for s in (1, 2)]
        new = [normal((2, 1, 2, 16), F32, device=device, seed=s) for s in (3, 4)]
        lengths = torch.tensor([2, 5], device=device)
        copies = [cache.clone() for cache in caches]
        output, expected = compiled(q, *caches, *new, lengths), run(q, *copies, *new, lengths)
        torch.testing.assert_close(output, expected)
        for cache, copy in zip(caches, copies):
            assert_bits_equal(cache, copy)


def test_sdpa_attention_forward(kernel, device):
    module = torch.nn.Identity()
    module.is_causal = True

    def run(inputs):
        return kernel.sdpa_attention_forward(module, **inputs, attention_mask=None)[0]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in SIZES:
        assert_same(run, compiled, PLAIN.inputs(shape, device=device, requires_grad=True))


def test_refused_input_raises_under_compile(kernel, device):
    run = torch.compile(kernel.attention, backend="aot_eager")
    inputs = PLAIN.inputs(device=device)
    with pytest.raises(kernel.AttentionSetupError, match="value"):
        run(inputs["query"], inputs["key"], inputs["value"][:, :, :-1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_expanded_cache_is_refused_under_compile(kernel, device, backend):
    run = torch.compile(kernel.flash_attn_with_kvcache, backend=backend)
    q, k, v = (normal((2, 1, 2, 16), F32, device=device, seed=seed) for seed in range(3))
    cache = torch.zeros(1, 8, 2, 16, device=device).expand(2, 8, 2, 16)
    other = torch.zeros(2, 8, 2, 16, device=device)
    with pytest.raises(TorchRuntimeError, match="v_cache must have strides that give each element a place of its own"):
        run(q, other, cache, k, v, torch.tensor([2, 5], device=device))
    assert not cache.any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_keys_and_values_in_one_cache_under_compile(kernel, device, backend):
    """Refused as in an eager call, unless both are the same."""
    run = torch.compile(kernel.flash_attn_with_kvcache, fullgraph=True, backend=backend)
    q, k, v = (normal((2, 1, 2, 16), F32, device=device, seed=seed) for seed in range(3))
    lengths = torch.tensor([2, 5], device=device)
    memory = torch.zeros(2, 9, 2, 16, device=device)
    for caches in ((memory, memory), (memory[:, 1:], memory[:, :-1])):
        with pytest.raises(TorchRuntimeError, match="v_cache must share no element with k_cache"):
            run(q, *caches, k, v, lengths)
        assert not memory.any()
    other = memory.clone()
    torch.testing.assert_close(
        run(q, memory, memory[..., :10], k, k[..., :10], lengths),
        kernel.flash_attn_with_kvcache(q, other, other[..., :10], k, k[..., :10], lengths),
    )
    assert_bits_equal(memory, other)


@pytest.mark.parametrize("strategy", ["flash_unit", "fallback"])
def test_freed_storage_is_refused_by_the_graph(kernel, device, strategy):
    """The ops look at it, for a trace cannot."""
    run = run_of(kernel, PLAIN, strategy)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = PLAIN.inputs(device=device)
    compiled(inputs)
    inputs["key"].untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="key must have memory for all its elements"):
        compiled(inputs)
