"""Numbers: output, log-sum-exp and gradients of every strategy against the definition in float64."""

import math

import pytest
import torch
from conftest import (
    LAYOUTS,
    assert_bits_equal,
    assert_close_to_exact,
    guards_intact,
    in_layout,
    poisoned,
)
from operations import (
    BF16,
    CAUSAL,
    EVERYTHING,
    F16,
    F32,
    PLAIN,
    SMALL,
    TILE_PAST_A_SPLIT,
    VARIANTS,
    WITH_GRADIENT_OF_ALL,
    Shape,
    Variant,
    by_dtype,
    by_forward_shape,
    by_shape,
    by_strategy,
    check_forward,
    check_gradients,
    for_each,
    gradients,
    normal,
    random_gradient,
)

TILES = Shape(1, 2, 1, 70, 130, 16, 24)

by_size = pytest.mark.parametrize(
    "shape", [pytest.param(SMALL, id="small", marks=pytest.mark.small), pytest.param(TILES, id="tiles")]
)


def poisoned_inputs(inputs):
    return {name: poisoned(t) if t.is_floating_point() else t for name, t in inputs.items()}


@by_forward_shape
@by_strategy
@for_each(PLAIN, CAUSAL, EVERYTHING)
def test_forward(kernel, device, variant, dtype, strategy, shape):
    inputs = poisoned_inputs(variant.inputs(shape, dtype, device=device))
    check_forward(kernel, variant, inputs, strategy)
    assert all(guards_intact(tensor) for tensor in inputs.values() if tensor.is_floating_point())


@by_shape
@by_strategy
@for_each(*WITH_GRADIENT_OF_ALL)
def test_gradients(kernel, device, variant, dtype, strategy, shape):
    inputs = poisoned_inputs(variant.inputs(shape, dtype, device=device, requires_grad=True))
    check_gradients(kernel, variant, inputs, strategy)
    assert all(guards_intact(tensor) for tensor in inputs.values() if tensor.is_floating_point())


@by_size
@by_strategy
@for_each(*VARIANTS)
def test_every_option(kernel, device, variant, dtype, strategy, shape):
    inputs = variant.inputs(shape, dtype, device=device, requires_grad=True)
    check_forward(kernel, variant, inputs, strategy)
    check_gradients(kernel, variant, inputs, strategy)


HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (9, 3), (5, 1)]


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("heads, key_heads", HEADS, ids=lambda count: str(count))
@pytest.mark.parametrize("queries", [1, 4], ids=["one_query", "several_queries"])
def test_heads_that_share_keys(kernel, device, dtype, strategy, heads, key_heads, queries):
    inputs = CAUSAL.inputs(Shape(2, heads, key_heads, queries, 9, 16, 8), dtype, device=device, requires_grad=True)
    check_forward(kernel, CAUSAL, inputs, strategy)
    check_gradients(kernel, CAUSAL, inputs, strategy)


WIDTHS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 80, 96, 127, 128, 129]


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("width", WIDTHS)
def test_any_head_dim(kernel, device, dtype, strategy, width):
    """Of keys and of values, each beside another."""
    for sizes in ((width, 16), (24, width)):
        inputs = PLAIN.inputs(Shape(1, 2, 1, 3, 5, *sizes), dtype, device=device, requires_grad=True)
        check_forward(kernel, PLAIN, inputs, strategy)
        check_gradients(kernel, PLAIN, inputs, strategy)


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("layout", [*LAYOUTS, "tokens_first", "packed", "expanded_heads"])
def test_strides(kernel, device, dtype, strategy, layout):
    """The bits of the run on dense copies."""
    inputs = EVERYTHING.inputs(dtype=dtype, device=device, requires_grad=True)
    views = {name: strided(tensor, layout) for name, tensor in inputs.items()}
    dense = {
        name: view.detach().contiguous().clone().requires_grad_(view.requires_grad) for name, view in views.items()
    }
    output, lse = EVERYTHING.run(kernel, views, strategy)
    expected, expected_lse = EVERYTHING.run(kernel, dense, strategy)
    assert_bits_equal(output.detach(), expected.detach())
    assert_bits_equal(lse.detach(), expected_lse.detach())
    grad = random_gradient(output)
    found = gradients(output, views, grad)
    for name, gradient in gradients(expected, dense, grad).items():
        assert_bits_equal(found[name].contiguous(), gradient)


def strided(tensor, layout):
    if not tensor.is_floating_point():
        return tensor
    if layout == "tokens_first":
        view = tensor.detach().transpose(0, -2).contiguous().transpose(0, -2) if tensor.dim() > 1 else tensor.detach()
    elif layout == "packed":
        # As the parts of one projection lie.
        width = tensor.shape[-1]
        view = tensor.detach().new_full((*tensor.shape[:-1], 3 * width), torch.nan)[..., width : 2 * width]
        view.copy_(tensor.detach())
    elif layout == "expanded_heads":
        view = tensor.detach()[:, :1].expand(tensor.shape) if tensor.dim() == 4 else tensor.detach()
    else:
        return in_layout(tensor, layout)
    return view.requires_grad_(tensor.requires_grad)


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("mask_layout", ["expanded", "transposed", "every_second"])
def test_strides_of_masks_and_biases(kernel, device, dtype, strategy, mask_layout):
    variant = Variant("mask_and_bias", mask="full", bias="full")
    inputs = variant.inputs(dtype=dtype, device=device, requires_grad=True)

    def view(tensor):
        values = tensor.detach()
        if mask_layout == "expanded":
            return values[:, :, :1, :].expand(tensor.shape)
        if mask_layout == "transposed":
            return values.transpose(0, 3).contiguous().transpose(0, 3)
        return values.new_zeros(*tensor.shape[:3], 2 * tensor.shape[3])[..., ::2].copy_(values)

    views = {**inputs, "mask": view(inputs["mask"]), "attn_bias": view(inputs["attn_bias"]).requires_grad_()}
    dense = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in views.items()}
    dense = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in dense.items()}
    output, expected = (variant.run(kernel, each, strategy)[0] for each in (views, dense))
    assert_bits_equal(output.detach(), expected.detach())
    grad = random_gradient(output)
    found = gradients(output, views, grad)
    for name, gradient in gradients(expected, dense, grad).items():
        assert_bits_equal(found[name].contiguous(), gradient)


GARBAGE = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("what", ["key", "value", "attn_bias"])
@pytest.mark.parametrize("by", ["mask", "bias", "bias_and_softcap", "causal", "window"])
def test_what_is_excluded_never_shows(kernel, device, dtype, strategy, garbage, what, by):
    """The bits of the run with 0 in its place, in the output and in all gradients."""
    by_bias = by.startswith("bias")
    if by_bias and what == "attn_bias":
        pytest.skip("the bias is what excludes")
    options = {"causal": {"is_causal": True}, "window": {"window": (2, 0)}, "bias_and_softcap": {"softcap": 2.0}}
    variant = Variant("excluding", bias="full", options=options.get(by, {}))
    # By a bias also all of the keys that are looked at together.
    excluded = {"causal": slice(70, 75), "window": slice(0, 3), "mask": slice(40, 43)}.get(by, slice(0, 66))
    # Those that causality leaves without garbage: later queries have it in their gradients and in those of all keys.
    queries = slice(0, 65 if by == "causal" else 70)
    results = []
    for filling in (0.0, garbage):
        inputs = variant.inputs(Shape(2, 4, 2, 70, 75, 16, 24), dtype, device=device)
        if by == "mask":
            inputs["mask"] = torch.ones(1, 1, 1, 75, dtype=torch.bool, device=device)
            inputs["mask"][..., excluded] = False
        if by_bias:
            inputs["attn_bias"][..., excluded] = -torch.inf
        if what == "attn_bias":
            inputs[what][:, :, queries, excluded] = filling
        else:
            inputs[what][:, :, excluded] = filling
        inputs = {name: t.requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
        output, lse = variant.run(kernel, inputs, strategy)
        part = output[:, :, queries]
        found = gradients(part, inputs, normal(part.shape, dtype, device=device, seed=7))
        if by == "causal":
            found = {"query": found["query"][:, :, queries]}
        assert all(gradient.isfinite().all() for gradient in found.values())
        results.append([part.detach(), lse[:, :, queries].detach(), *found.values()])
    for one, other in zip(*results, strict=True):
        assert_bits_equal(other, one)


@pytest.mark.small
@by_strategy
def test_a_visible_nan_shows(kernel, device, dtype, strategy):
    """In the rows that see it, and in no others."""
    inputs = CAUSAL.inputs(Shape(1, 2, 1, 6, 6, 16, 16), dtype, device=device)
    for name in ("key", "value"):
        broken = {key: tensor.clone() for key, tensor in inputs.items()}
        broken[name][0, 0, 3, 5] = torch.nan
        output, _ = CAUSAL.run(kernel, broken, strategy)
        clean, _ = CAUSAL.run(kernel, inputs, strategy)
        assert_bits_equal(output[:, :, :3], clean[:, :, :3])
        shown = output[:, :, 3:] if name == "key" else output[:, :, 3:, 5]
        assert shown.isnan().all()


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("keys", [300, 1100])
@pytest.mark.parametrize("where", ["query", "last_keys"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_visible_nan_shows_among_many_keys(kernel, device, dtype, strategy, keys, where, key_heads):
    """Where keys are split, some splits have no score but NaN."""
    inputs = PLAIN.inputs(Shape(1, 2, key_heads, 1, keys, 8, 8), dtype, device=device)
    if where == "query":
        inputs["query"][0, 1, 0, 3] = torch.nan
    else:
        inputs["key"][0, :, keys - 40 :] = torch.nan
    output, lse = PLAIN.run(kernel, inputs, strategy)
    broken = slice(1, 2) if where == "query" else slice(0, 2)
    assert output[:, broken].isnan().all()
    assert lse[:, broken].isnan().all()
    assert output[:, : broken.start].isfinite().all()


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("by", ["mask", "bias"])
@pytest.mark.parametrize("heads", [1, 4])
def test_what_is_excluded_never_shows_to_one_query(kernel, device, dtype, strategy, garbage, by, heads):
    """Of a head's own keys, or of those that heads share, near and far."""
    excluded = [3, 127, 128, 200, 299]
    results = []
    for filling in (0.0, garbage):
        inputs = PLAIN.inputs(Shape(2, heads, 1, 1, 300, 40, 72), dtype, device=device)
        if by == "mask":
            inputs["mask"] = torch.ones(300, dtype=torch.bool, device=device)
            inputs["mask"][excluded] = False
        else:
            inputs["attn_bias"] = torch.zeros(300, dtype=dtype, device=device)
            inputs["attn_bias"][excluded] = -torch.inf
        for name in ("key", "value"):
            inputs[name][:, :, excluded] = filling
        results.append(PLAIN.run(kernel, inputs, strategy))
    for clean, found in zip(*results, strict=True):
        assert_bits_equal(found, clean)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="small", marks=pytest.mark.small),
        pytest.param(TILES, id="tiles"),
        pytest.param(TILE_PAST_A_SPLIT, id="tile_past_a_split"),
    ],
)
@by_strategy
@pytest.mark.parametrize("others", ["masked", "excluded", "vanishing"])
def test_rows_of_one_key(kernel, device, dtype, strategy, others, shape):
    """The bits of its value: what weights are rounded to does not show, nor in the gradients of scores."""
    inputs = PLAIN.inputs(shape, dtype, device=device, requires_grad=True)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(shape.keys, (shape.batch, shape.heads, shape.queries), generator=generator).to(device)
    seen = chosen[..., None] == torch.arange(shape.keys, device=device)
    if others == "masked":
        inputs["mask"] = seen
    else:
        term = -torch.inf if others == "excluded" else -60.0
        inputs["attn_bias"] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, term)
    output, _ = PLAIN.run(kernel, inputs, strategy)
    groups = shape.heads // shape.key_heads
    values = inputs["value"].detach().repeat_interleave(groups, 1)
    assert_bits_equal(output.detach(), values.take_along_dim(chosen[..., None], 2))
    found = gradients(output, inputs, random_gradient(output))
    # What e^-60 leaves; but matrix units of GPUs add up grad * value in an order of their own, grad * output does not.
    limit = 1e-20 if device == "cpu" or strategy != "flash_accelerated" else 1e-4
    for name in ("query", "key"):
        assert found[name].float().abs().amax() < limit


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("sinks", [False, True], ids=["without_sinks", "with_sinks"])
def test_rows_without_keys(kernel, device, dtype, strategy, sinks):
    """0, a log-sum-exp of -inf or the sink's score, and no gradient, whatever gradient comes in."""
    variant = Variant("mask", mask="full", sinks=sinks)
    inputs = variant.inputs(Shape(2, 4, 2, 5, 70, 16, 16), dtype, device=device)
    inputs["mask"][:, :, 2] = False
    inputs["mask"][1, 3] = False
    inputs = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in inputs.items()}
    output, lse = variant.run(kernel, inputs, strategy)
    assert not output[:, :, 2].any()
    assert not output[1, 3].any()
    expected = inputs["sinks"].float() if sinks else torch.full((4,), -torch.inf, device=device)
    torch.testing.assert_close(lse[:, :, 2].detach(), expected.detach().expand(2, 4))
    grad = random_gradient(output)
    grad[:, :, 2] = grad[1, 3] = torch.nan
    found = gradients(output, inputs, grad)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert not found["query"][:, :, 2].any()
    assert not found["query"][1, 3].any()


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("score", [-torch.inf, -1e4, 0.0, 1e4])
def test_sinks_of_any_size(kernel, device, dtype, strategy, score):
    """A sink of -inf is none; a large one takes everything."""
    variant = Variant("sinks", sinks=True)
    inputs = variant.inputs(dtype=dtype, device=device)
    inputs["sinks"] = torch.full_like(inputs["sinks"], score, dtype=F32).requires_grad_()
    output, lse = variant.run(kernel, inputs, strategy)
    exact, exact_lse, leaves = variant.run_exact(kernel, inputs)
    plain, plain_lse = variant.run_plain(inputs)
    assert_close_to_exact(output, exact, plain)
    assert_close_to_exact(lse, exact_lse, plain_lse)
    grad = random_gradient(output)
    (found,) = gradients(output, {"sinks": inputs["sinks"]}, grad).values()
    (expected,) = gradients(exact, {"sinks": leaves["sinks"]}, grad.cpu().double()).values()
    assert found.isfinite().all()
    if score == -torch.inf:
        without = {name: tensor for name, tensor in inputs.items() if name != "sinks"}
        assert_bits_equal(output.detach(), PLAIN.run(kernel, without, strategy)[0])
        assert not found.any()
    (plain_found,) = gradients(plain, {"sinks": inputs["sinks"]}, grad).values()
    if expected.isfinite().all():
        assert_close_to_exact(found, expected, plain_found)


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("queries", [1, 5, 17, 40])
def test_scores_that_grow_large(kernel, device, dtype, strategy, queries):
    """Near 45426, which is 2^16 as a power of 2: what came before, a sink among it, keeps its weight."""
    inputs = PLAIN.inputs(Shape(1, 1, 1, queries, 128, 16, 16), F32, device=device)
    inputs = {name: tensor.zero_() for name, tensor in inputs.items()}
    inputs["query"][..., 0] = 64.0
    inputs["query"][..., 1] = 1.0
    inputs["key"][..., 0] = 709.75 if dtype == F32 else 708.0
    inputs["key"][..., 1] = 0.0 if dtype == F32 else 112.5
    inputs["key"][:, :, 64:, 1] += 2.0
    inputs["value"][:, :, 64:] = 1.0
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    first = 709.75 * 64 if dtype == F32 else 708.0 * 64 + 112.5
    sinks = torch.tensor([first], device=device)
    options = kernel.AttentionOptions(scale=1.0)
    output, lse = kernel.attention(**inputs, options=options, strategy=strategy, sinks=sinks, return_lse=True)
    weight = 64 * math.exp(2.0)
    total = 65.0 + weight
    torch.testing.assert_close(output.float(), torch.full_like(output, weight / total, dtype=F32), rtol=1e-2, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, first + math.log(total)), rtol=0, atol=0.02)


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("width", [16, 128])
def test_gradients_of_large_scores_of_one_key(kernel, device, dtype, strategy, width):
    """A probability is at most 1, however its score is rounded on the way back."""
    inputs = PLAIN.inputs(Shape(64, 4, 4, 1, 1, width, 4), dtype, device=device)
    inputs = {name: tensor * (200.0 if name != "value" else 1.0) for name, tensor in inputs.items()}
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    output, _ = Variant("one_key", options={"scale": 100.0}).run(kernel, inputs, strategy)
    (gradient,) = torch.autograd.grad(output, inputs["value"], torch.ones_like(output))
    assert gradient.isfinite().all()
    assert gradient.amax() <= 1.0


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("scale", [30.0, 1000.0], ids=["steep", "one_hot"])
def test_large_scores(kernel, device, dtype, strategy, scale):
    """The largest score of a row comes late, and what came before must vanish without overflow."""
    variant = Variant("steep", options={"scale": scale})
    inputs = variant.inputs(Shape(1, 2, 1, 3, 200, 16, 16), dtype, device=device)
    inputs["key"][:, :, 150] = inputs["key"][:, :, :100].abs().amax() * inputs["query"][:, :1, 0].sign()
    output, lse = variant.run(kernel, inputs, strategy)
    exact, exact_lse, _ = variant.run_exact(kernel, inputs)
    plain, plain_lse = variant.run_plain(inputs)
    assert output.isfinite().all()
    assert_close_to_exact(lse, exact_lse, plain_lse)
    assert_close_to_exact(output[:, 0, 0], exact[:, 0, 0], plain[:, 0, 0])


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize("queries", [1, 40], ids=["one_query", "many_queries"])
@pytest.mark.parametrize("term", [-1e6, -1e9, 1e9, -3e38, 3e38], ids=str)
def test_rows_whose_scores_are_all_large(kernel, device, dtype, strategy, term, queries):
    """As a row of padding with an additive mask has them; other rows have some of them."""
    variant = Variant("large", options={"scale": 0.3})
    inputs = variant.inputs(Shape(1, 2, 2, queries, 70, 16, 16), dtype, device=device)
    bias = torch.zeros(1, 2, queries, 70)
    bias[:, 0, -1] = term
    bias[:, 1, :, :33] = -abs(term)
    inputs["attn_bias"] = bias.to(device)
    inputs = {name: tensor.requires_grad_(name != "attn_bias") for name, tensor in inputs.items()}
    output, lse = variant.run(kernel, inputs, strategy)
    exact, exact_lse, _ = variant.run_exact(kernel, inputs)
    wide = {name: tensor.detach().float().requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()}
    # float16 cannot hold the terms.
    plain, plain_lse = variant.run_plain(wide if dtype is F16 else inputs)
    assert_close_to_exact(output, exact, plain)
    assert_close_to_exact(lse, exact_lse, plain_lse)
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    expected = gradients(variant.run_plain(wide)[0], wide, grad.float())
    for name, gradient in found.items():
        # A float32 log-sum-exp of such size does not hold the number of keys.
        assert gradient.float().abs().max() <= 71 * expected[name].abs().max()


@by_dtype
@pytest.mark.small
def test_the_strategies_agree(kernel, device, dtype):
    inputs = EVERYTHING.inputs(TILES, dtype, device=device)
    names = [plan for plan in ("flash_accelerated", "flash_unit", "fallback") if serves(kernel, plan, inputs)]
    exact, *_ = EVERYTHING.run_exact(kernel, inputs)
    for name in names:
        output, _ = EVERYTHING.run(kernel, inputs, name)
        assert_close_to_exact(output, exact, EVERYTHING.run_plain(inputs)[0])


def serves(kernel, strategy, inputs):
    query = inputs["query"]
    return not kernel._strategies.why_not(kernel.AttentionStrategy(strategy), query.dtype, query.device)


@by_strategy
@pytest.mark.small
def test_an_enumeration_and_its_string_mean_the_same(kernel, device, dtype, strategy):
    inputs = CAUSAL.inputs(dtype=dtype, device=device)
    member = kernel.AttentionStrategy(strategy)
    assert_bits_equal(CAUSAL.run(kernel, inputs, member)[0], CAUSAL.run(kernel, inputs, strategy)[0])


@pytest.mark.small
def test_the_result_is_the_output_unless_asked(kernel, device):
    inputs = PLAIN.inputs(device=device)
    output = kernel.attention(**inputs)
    assert isinstance(output, torch.Tensor)
    both = kernel.attention(**inputs, return_lse=True)
    assert isinstance(both, tuple)
    assert [result.shape for result in both] == [(2, 4, 5, 24), (2, 4, 5)]


@pytest.mark.small
@pytest.mark.parametrize("sinks_dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_sinks_of_another_dtype(kernel, device, sinks_dtype):
    """float32 beside any dtype; another one only beside itself."""
    variant = Variant("sinks", sinks=True)
    inputs = variant.inputs(dtype=BF16, device=device)
    inputs["sinks"] = inputs["sinks"].to(sinks_dtype).requires_grad_()
    if sinks_dtype == F16:
        with pytest.raises(
            kernel.AttentionSetupError, match=r"attention: sinks must be float32 or bfloat16, got float16"
        ):
            variant.run(kernel, inputs)
        return
    check_forward(kernel, variant, inputs, "flash_unit")
    check_gradients(kernel, variant, inputs, "flash_unit")


@pytest.mark.small
@by_strategy
@pytest.mark.parametrize(
    "window", [(0, 0), (0, -1), (-1, 0), (2, 1), (1000, 1000), (2**31 - 1, 2**31 - 1)], ids=lambda each: f"{each}"
)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_windows(kernel, device, dtype, strategy, window, causal):
    variant = Variant("window", options={"window": window, "is_causal": causal})
    for queries, keys in ((5, 9), (9, 5), (1, 7), (70, 70)):
        inputs = variant.inputs(Shape(1, 2, 1, queries, keys, 8, 8), dtype, device=device, requires_grad=True)
        check_forward(kernel, variant, inputs, strategy)
        check_gradients(kernel, variant, inputs, strategy)
