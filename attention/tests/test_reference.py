"""The definition against PyTorch's own, in float64, where both define the same."""

import pytest
import torch
import torch.nn.functional as F
from operations import EVERYTHING, SMALL, VARIANTS, Shape, Variant, for_each, gradients, normal
from torch import Tensor

pytestmark = [pytest.mark.isa_independent, pytest.mark.kernels_ci]

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def reference(kernel, variant: Variant, inputs: dict[str, Tensor]):
    options = kernel.AttentionOptions(**variant.options)
    return kernel.reference.attention(**inputs, options=options, compute_dtype=torch.float64)


def sdpa(kernel, variant: Variant, inputs: dict[str, Tensor]) -> Tensor:
    """With the visible keys and the bias in one mask, and 0 for a row without keys."""
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    bias = inputs.get("attn_bias")
    options = kernel.AttentionOptions(**variant.options)
    visible = kernel.reference.visible_keys(query, key, inputs.get("mask"), bias, options)
    additive = torch.zeros(visible.shape, dtype=torch.float64) if bias is None else bias
    additive = additive.expand(visible.shape).where(visible, -torch.inf)
    output = F.scaled_dot_product_attention(
        query, key, value, additive, scale=variant.options.get("scale"), enable_gqa=True
    )
    return output.where(visible.any(-1, keepdim=True), 0)


SDPA = [variant for variant in VARIANTS if not variant.sinks and "softcap" not in variant.options]


@for_each(*SDPA)
@pytest.mark.parametrize("shape", [SMALL, Shape(1, 4, 1, 6, 3, 5, 9)], ids=["small", "more_queries"])
def test_scaled_dot_product_attention(kernel, variant, shape):
    inputs = doubled(variant.inputs(shape, requires_grad=True))
    output, _ = reference(kernel, variant, inputs)
    expected = sdpa(kernel, variant, inputs)
    torch.testing.assert_close(output, expected, **EXACT)
    grad = normal(output.shape, torch.float64, seed=9)
    found = gradients(output, inputs, grad)
    for name, gradient in gradients(expected, inputs, grad).items():
        if gradient.isfinite().all():
            torch.testing.assert_close(found[name], gradient, **EXACT)


def test_causality_of_equal_lengths_is_that_of_pytorch(kernel):
    variant = Variant("causal", options={"is_causal": True})
    inputs = doubled(variant.inputs(Shape(1, 2, 2, 6, 6, 8, 8)))
    expected = F.scaled_dot_product_attention(**inputs, is_causal=True)
    torch.testing.assert_close(reference(kernel, variant, inputs)[0], expected, **EXACT)


def test_a_sink_is_a_key_with_a_fixed_score_and_the_value_0(kernel):
    """The same by another column, as GPT-OSS computes it."""
    variant = Variant("sinks", sinks=True)
    inputs = doubled(variant.inputs())
    query, key, value, sinks = inputs.values()
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    output, lse = reference(kernel, variant, inputs)
    torch.testing.assert_close(output, weights @ value.repeat_interleave(2, 1), **EXACT)
    torch.testing.assert_close(lse, torch.cat([scores, column], -1).logsumexp(-1), **EXACT)


def test_the_log_sum_exp_of_finite_scores(kernel):
    variant = Variant("softcap", options={"softcap": 2.0})
    inputs = doubled(variant.inputs())
    scores = inputs["query"] @ inputs["key"].repeat_interleave(2, 1).mT / 4
    _, lse = reference(kernel, variant, inputs)
    torch.testing.assert_close(lse, (2 * torch.tanh(scores / 2)).logsumexp(-1), **EXACT)


@pytest.mark.parametrize("what", ["key", "value", "attn_bias"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_is_not_seen_does_not_show(kernel, what, garbage):
    """In the output, and in the gradients, which are those of the run on 0."""
    results = []
    for filling in (0.0, garbage):
        inputs = doubled(EVERYTHING.inputs())
        inputs["mask"] = torch.ones(2, 1, 1, 7, dtype=torch.bool)
        inputs["mask"][0, ..., 3] = inputs["mask"][1, ..., 0] = False
        inputs["attn_bias"] = inputs["attn_bias"].expand(2, 4, 5, 7).clone()
        for batch, key in ((0, 3), (1, 0)):
            if what == "attn_bias":
                inputs[what][batch, :, :, key] = filling
            else:
                inputs[what][batch, :, key] = filling
        # Seen by the last query only, whose own gradients are then garbage, and those of all that it sees.
        if what != "attn_bias":
            inputs[what][:, :, 6] = filling
        inputs = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in inputs.items()}
        output, lse = reference(kernel, EVERYTHING, inputs)
        found = gradients(output[:, :, :-1], inputs, normal((2, 4, 4, 24), torch.float64))
        results.append((output[:, :, :-1], lse[:, :, :-1], found["query"][:, :, :-1]))
        inputs["mask"][..., 6] = False
        output, lse = reference(kernel, EVERYTHING, inputs)
        found = gradients(output, inputs, normal(output.shape, torch.float64))
        results[-1] += (output, lse, *found.values())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_rows_without_keys(kernel):
    """0 and no gradient, also where their own query and the gradient that comes in are NaN."""
    inputs = doubled(Variant("mask", mask="full").inputs())
    inputs["mask"][:, :, 2] = False
    inputs["query"][:, :, 2] = torch.nan
    inputs = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in inputs.items()}
    output, lse = reference(kernel, Variant("mask"), inputs)
    assert not output[:, :, 2].any()
    assert lse[:, :, 2].isneginf().all()
    grad = torch.ones_like(output)
    found = gradients(output, inputs, grad)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert not found["query"][:, :, 2].any()


@pytest.mark.parametrize("shape", [Shape(1, 2, 1, 3, 0, 4, 4), Shape(1, 2, 1, 0, 3, 4, 4), Shape(0, 2, 1, 3, 3, 4, 4)])
@for_each(*VARIANTS)
def test_nothing_there(kernel, shape, variant):
    output, lse = reference(kernel, variant, doubled(variant.inputs(shape)))
    assert output.shape == (shape.batch, 2, shape.queries, 4)
    assert not output.any()
    assert lse.shape == output.shape[:3]
    assert variant.sinks or lse.isneginf().all()


def test_one_rounding(kernel):
    inputs = EVERYTHING.inputs(dtype=torch.bfloat16)
    options = kernel.AttentionOptions(**EVERYTHING.options)
    output, lse = kernel.reference.attention(**inputs, options=options)
    wide, _ = kernel.reference.attention(
        **{n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}, options=options
    )
    assert lse.dtype == torch.float32
    assert torch.equal(output, wide.bfloat16())
