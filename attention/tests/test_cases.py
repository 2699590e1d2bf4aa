"""Cases from public bug reports on which libraries of this kind went wrong, with their right results."""

import os
import re

import pytest
import torch
from conftest import assert_bits_equal
from operations import F32, by_strategy, normal, strategies

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

IN_FLOAT32 = [case.values[1] for case in strategies() if case.values[0] == F32]
by_float32_strategy = pytest.mark.parametrize("strategy", [*IN_FLOAT32, "autotune"])


def assert_near(output, expected, tolerance=1e-5):
    torch.testing.assert_close(output.cpu(), torch.tensor(expected), rtol=tolerance, atol=1e-6)


@by_float32_strategy
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_a1_a_row_with_every_key_masked(kernel, device, strategy, by):
    """pytorch/pytorch#103749, #41508: such a row became NaN, and in training all shared weights with it."""
    query = normal((1, 2, 6, 8), F32, device=device).requires_grad_()
    key, value = (normal((1, 2, 10, 8), F32, device=device, seed=seed).requires_grad_() for seed in (1, 2))
    mask = torch.zeros(6, 10, dtype=torch.bool, device=device)
    for row in range(5):
        mask[row, : row + 1] = True
    hidden = (
        {"mask": mask} if by == "mask" else {"attn_bias": torch.zeros(6, 10, device=device).where(mask, -torch.inf)}
    )
    options = kernel.AttentionOptions(scale=0.125)

    def run(rows):
        rest = {name: tensor[:rows] for name, tensor in hidden.items()}
        leaf = query.detach()[:, :, :rows].requires_grad_()
        output, lse = kernel.attention(leaf, key, value, options=options, strategy=strategy, return_lse=True, **rest)
        return output, lse, torch.autograd.grad(output.sum(), (leaf, key, value))

    output, lse, (grad_query, grad_key, grad_value) = run(6)
    assert not output[:, :, 5].any()
    assert lse[:, :, 5].isneginf().all()
    assert all(gradient.isfinite().all() for gradient in (grad_query, grad_key, grad_value))
    assert not grad_query[:, :, 5].any()
    assert not grad_key[:, :, 5:].any()
    assert not grad_value[:, :, 5:].any()
    without, _, gradients = run(5)
    torch.testing.assert_close(output[:, :, :5], without)
    torch.testing.assert_close(grad_query[:, :, :5], gradients[0])
    torch.testing.assert_close(grad_key, gradients[1])
    torch.testing.assert_close(grad_value, gradients[2])


@by_strategy
def test_a3_nan_at_a_masked_key(kernel, device, dtype, strategy):
    """pytorch/pytorch#101967: 0 times NaN is NaN, so what the mask excludes showed."""
    tensors = [torch.arange(8.0).view(1, 1, 2, 4).to(dtype).to(device) for _ in range(3)]
    query, key, value = (tensor.clone() for tensor in tensors)
    key[0, 0, 1, 0] = value[0, 0, 1, 0] = torch.nan
    mask = torch.tensor([[True, False], [True, False]], device=device)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = kernel.attention(*leaves, mask, strategy=strategy)
    assert output.tolist() == [[[[0.0, 1, 2, 3], [0, 1, 2, 3]]]]
    gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[1][0, 0, 1].any()
    assert not gradients[2][0, 0, 1].any()


@by_float32_strategy
def test_a4_softcap_against_mask_and_bias(kernel, device, strategy):
    """Dao-AILab/flash-attention#1025, onnx/onnx#7865: the cap comes before mask and bias."""
    query = key = torch.ones(1, 1, 2, 1, device=device)
    value = torch.tensor([[0.0], [1]], device=device).view(1, 1, 2, 1)
    causal = kernel.AttentionOptions(scale=1.0, softcap=1.0, is_causal=True)
    output = kernel.attention(query, key, value, options=causal, strategy=strategy)
    assert output[0, 0, 0] == 0
    assert_near(output.flatten(), [0.0, 0.5])
    bias = torch.tensor([[0.0, 3], [0, 0]], device=device)
    options = kernel.AttentionOptions(scale=1.0, softcap=1.0)
    output = kernel.attention(query, key, value, None, bias, options, strategy)
    assert_near(output.flatten(), [0.952574, 0.5])


@by_float32_strategy
def test_a5_causal_with_other_lengths(kernel, device, strategy):
    """pytorch/pytorch#103082, ml-explore/mlx#2835: decoding attended to the first key only."""
    options = kernel.AttentionOptions(is_causal=True)

    def run(queries, values):
        query = torch.zeros(1, 1, queries, 2, device=device)
        key = torch.zeros(1, 1, len(values), 2, device=device)
        value = torch.tensor(values, device=device).view(1, 1, -1, 1)
        output, lse = kernel.attention(query, key, value, options=options, strategy=strategy, return_lse=True)
        return output.flatten(), lse.flatten()

    output, _ = run(1, [1.0, 2, 3, 6])
    assert_near(output, [3.0])
    output, lse = run(3, [1.0, 3])
    assert_near(output, [0.0, 1, 2])
    assert_near(lse, [-torch.inf, 0.0, 0.693147])


def forward_and_gradients(kernel, strategy, tensors, bias=None, grad=None):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = kernel.attention(*leaves, None, bias, strategy=strategy)
    grad = torch.ones_like(output) if grad is None else grad
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


@by_float32_strategy
@pytest.mark.parametrize("views", ["every_second", "transposed", "only_value_transposed"])
def test_a6_strided_views(kernel, device, strategy, views):
    """pytorch/pytorch#187506, #112577: transposes and a last stride of 2 were read as dense."""
    if views == "every_second":
        tensors = list(normal((3, 1, 2, 40, 64), F32, device=device)[..., ::2])
    else:
        tensors = [normal((1, 40, 2, 32), F32, device=device, seed=seed).transpose(1, 2) for seed in range(3)]
    if views == "only_value_transposed":
        tensors[:2] = [tensor.contiguous() for tensor in tensors[:2]]
    found = forward_and_gradients(kernel, strategy, tensors)
    expected = forward_and_gradients(kernel, strategy, [tensor.contiguous() for tensor in tensors])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@by_float32_strategy
def test_a6_an_expanded_bias(kernel, device, strategy):
    tensors = [normal((1, 2, 40, 32), F32, device=device, seed=seed) for seed in range(3)]
    row = normal((1, 1, 1, 40), F32, device=device, seed=3)
    results = []
    for bias in (row.expand(1, 2, 40, 40), row.expand(1, 2, 40, 40).contiguous(), row):
        bias = bias.requires_grad_()
        output = kernel.attention(*tensors, None, bias, strategy=strategy)
        (gradient,) = torch.autograd.grad(output.square().sum(), bias)
        results.append((output.detach(), gradient.sum_to_size(1, 1, 1, 40)))
    for output, gradient in results[1:]:
        torch.testing.assert_close(output, results[0][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-5, atol=1e-5)


@by_float32_strategy
def test_a7_an_incoming_gradient_with_stride_0_or_2(kernel, device, strategy):
    """Dao-AILab/flash-attention#355: the expanded scalar of `out.sum()` was refused, or read as dense."""
    tensors = [normal((1, 2, 40, 32), F32, device=device, seed=seed) for seed in range(3)]
    dense = forward_and_gradients(kernel, strategy, tensors)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    expanded = torch.autograd.grad(kernel.attention(*leaves, strategy=strategy).sum(), leaves)
    for one, other in zip(expanded, dense[1:]):
        assert_bits_equal(one, other)
    grad = normal((1, 2, 40, 32), F32, device=device, seed=7)
    strided = torch.stack([grad, torch.full_like(grad, torch.nan)], -1)[..., 0]
    one, other = (forward_and_gradients(kernel, strategy, tensors, grad=each) for each in (strided, grad))
    for found, expected in zip(one, other):
        assert_bits_equal(found, expected)


@by_strategy
@pytest.mark.parametrize(
    "sizes", [(1, 3, 0), (1, 0, 3), (0, 3, 3), (0, 0, 0)], ids=lambda sizes: "_".join(map(str, sizes))
)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a9_empty_sequences(kernel, device, dtype, strategy, sizes, causal):
    """Dao-AILab/flash-attention#2470, #2568, #2776: no keys, no queries or no batch divided by zero."""
    batch, queries, keys = sizes
    shapes = (batch, 2, queries, 4), (batch, 2, keys, 4), (batch, 2, keys, 4)
    leaves = [torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    options = kernel.AttentionOptions(is_causal=causal)
    output, lse = kernel.attention(*leaves, options=options, strategy=strategy, return_lse=True)
    assert output.shape == shapes[0]
    assert lse.shape == shapes[0][:3]
    if keys == 0:
        assert not output.any()
        assert lse.isneginf().all()
    output.sum().backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        if 0 in sizes:
            assert not leaf.grad.any()


@by_float32_strategy
def test_p8_the_base_of_the_log_sum_exp(kernel, device, strategy):
    """sgl-project/sglang#40903, vllm-project/vllm#52796: a base-2 one was merged as a natural one."""
    query, key = torch.zeros(1, 1, 1, 4, device=device), torch.zeros(1, 1, 2, 4, device=device)
    _, lse = kernel.attention(query, key, key, strategy=strategy, return_lse=True)
    assert_near(lse.flatten(), [0.693147])


def why_no_matrix_units_for_float32(kernel):
    accelerated = kernel._strategies.ACCELERATED_DTYPES
    ops = kernel._ops.ops
    if accelerated:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in accelerated)
        return f"the matrix units here multiply {names}, not float32"
    if not hasattr(ops, "cpu_isa"):
        return "there are no matrix units here"
    cap = os.environ.get("RUDNN_CPU_ISA")
    why = f" (RUDNN_CPU_ISA is {cap})" if cap else ""
    return f"the instruction set in use, {ops.cpu_isa()}, has no matrix units{why}"


def test_l9_a_named_strategy_says_why_it_cannot(kernel, device):
    """huggingface/kernels#436, huggingface/transformers#41010: it was replaced without a word."""
    tensors = [torch.ones(1, 1, 2, 4, device=device) for _ in range(3)]
    with pytest.raises(
        kernel.AttentionSetupError,
        match=r"^attention: strategy must be .*flash_unit.*, for "
        + re.escape(why_no_matrix_units_for_float32(kernel))
        + ", got ",
    ):
        kernel.attention(*tensors, strategy="flash_accelerated")
    for strategy in ("flash_accelerated", "flash_unit", "fallback", "autotune"):
        with pytest.raises(
            kernel.AttentionSetupError, match=r"^attention: mask must broadcast to .*, got bool \(3, 3\)"
        ):
            kernel.attention(
                *[t.to(torch.bfloat16) for t in tensors],
                torch.ones(3, 3, dtype=torch.bool, device=device),
                strategy=strategy,
            )
        with pytest.raises(kernel.AttentionSetupError, match=r"^attention: query must have a last axis of 1 to 1024"):
            wide = torch.ones(1, 1, 2, 1025, device=device, dtype=torch.bfloat16)
            kernel.attention(wide, wide, wide, strategy=strategy)


@by_strategy
def test_whole_numbers_are_exact(kernel, device, dtype, strategy):
    """Equal scores of four keys: the mean of whole numbers that are divisible by four."""
    query = torch.zeros(1, 2, 3, 8, dtype=dtype, device=device)
    value = 4 * torch.arange(32.0, device=device).view(1, 1, 4, 8).to(dtype)
    output, lse = kernel.attention(query, torch.ones_like(value), value, strategy=strategy, return_lse=True)
    assert torch.equal(output, value.float().mean(2, keepdim=True).expand(1, 2, 3, 8).to(dtype))
    assert_near(lse.flatten(), [1.386294] * 6)
