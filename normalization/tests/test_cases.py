"""Cases from public bug reports on which libraries of this kind went wrong, with their right results."""

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, F16, F32, OPERATIONS, for_each, gradients, random_gradients

pytestmark = [pytest.mark.small, pytest.mark.kernels_ci]

TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}


def assert_near(output, expected, dtype=F32):
    expected = torch.tensor(expected, device=output.device) if isinstance(expected, list) else expected
    torch.testing.assert_close(output, expected.to(dtype), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("start", [40000.0, 1e6])
def test_n1_large_mean(kernel, device, start):
    """pytorch/pytorch#51102: the difference of two large sums cancels, the mean square minus the squared mean."""
    input = start + torch.arange(4.0, device=device)
    output = kernel.layer_norm(input, torch.ones(4, device=device), epsilon=1e-5)
    assert_near(output, [-1.341635, -0.447212, 0.447212, 1.341635])


def test_n1_small_deviation_on_a_large_mean(kernel, device):
    input = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device) * 0.01 + 100
    output = kernel.layer_norm(input, torch.ones(1024, device=device), epsilon=1e-8)
    assert abs(output.std(correction=0).item() - 1) < 1e-3


@pytest.mark.parametrize("dtype, value", [(F16, 1000.0), (F32, 1e20), (BF16, 1e20)], ids=["f16", "f32", "bf16"])
def test_n3_squares_out_of_range(kernel, device, dtype, value):
    """pytorch/pytorch#134106, #178123: 1000 squared is infinite in float16, 1e20 squared in float32."""
    input = torch.full((4,), value, dtype=dtype, device=device)
    output = kernel.rms_norm(input, torch.ones(4, device=device), 1e-6)
    assert_near(output, torch.ones(4, device=device), dtype)


def test_n4_sum_of_the_output(kernel, device):
    """Dao-AILab/quack#88: the gradient that `sum` sends has stride 0 (epsilon, which must be > 0, vanishes)."""
    input = torch.tensor([[3.0, 4.0], [1.0, 0.0]], device=device, requires_grad=True)
    weight = torch.ones(2, device=device, requires_grad=True)
    output = kernel.rms_norm(input, weight, 1e-30)
    output.sum().backward()
    assert_near(output, [[0.848528, 1.131371], [1.414214, 0.0]])
    assert_near(input.grad, [[0.045255, -0.033941], [0.0, 1.414214]])
    assert_near(weight.grad, [2.262742, 1.131371])


@for_each(*OPERATIONS)
def test_n4_column_strides(kernel, device, operation):
    """unslothai/unsloth#10617: every second column of input, parameters and gradient."""
    wide = operation.inputs((5, 26), device=device)
    strided = {name: tensor[..., ::2].requires_grad_() for name, tensor in wide.items()}
    dense = {name: tensor.detach().contiguous().requires_grad_() for name, tensor in strided.items()}
    assert_same_run(kernel, operation, strided, dense)


@for_each(*OPERATIONS)
def test_n4_input_expanded_over_rows(kernel, device, operation):
    inputs = operation.inputs((1, 26), device=device)
    expanded = {
        name: (tensor.expand(5, 26) if name in operation.rows else tensor).requires_grad_()
        for name, tensor in inputs.items()
    }
    dense = {name: tensor.detach().contiguous().requires_grad_() for name, tensor in expanded.items()}
    assert_same_run(kernel, operation, expanded, dense)


def assert_same_run(kernel, operation, strided, dense):
    expected = operation.run(kernel, dense)
    outputs = operation.run(kernel, strided)
    grads = [torch.cat([grad, grad], -1)[..., ::2] for grad in random_gradients(outputs)]
    for output, dense_output in zip(outputs, expected, strict=True):
        assert_bits_equal(output, dense_output)
    found = gradients(outputs, strided, grads)
    for name, grad in gradients(expected, dense, [grad.contiguous() for grad in grads]).items():
        assert_bits_equal(found[name], grad)


@pytest.mark.parametrize("dtype, width", [(F16, 4096), (BF16, 4096), (BF16, 65536)])
def test_n6_long_softmax_in_half_precision(kernel, device, dtype, width):
    """huggingface/candle#3727: a running float16 sum of ones stops at 2048."""
    output = kernel.softmax_last_axis(torch.zeros(1, width, dtype=dtype, device=device))
    assert (output == 1 / width).all()
    assert output.float().sum() == 1


def test_n6_softmax_of_70000(kernel, device):
    output = kernel.softmax_last_axis(torch.zeros(1, 70000, dtype=BF16, device=device))
    assert (output == torch.tensor(1 / 70000).to(BF16)).all()


def test_n7_rows_that_are_not_finite(kernel, device):
    """uxlfoundation/oneDNN#4890: a masked row became uniform, a NaN was dropped, an infinity hidden."""
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor([[-inf, -inf, -inf], [1, nan, 2], [inf, 1, 2], [-inf, 0, 0]], device=device)
    output = kernel.softmax_last_axis(scores)
    assert output[:3].isnan().all()
    assert output[3].tolist() == [0, 0.5, 0.5]


@for_each(*OPERATIONS)
def test_n8_second_derivative_raises(kernel, device, operation):
    inputs = operation.inputs((2, 5), device=device, requires_grad=True)
    loss = operation.run(kernel, inputs)[0].square().sum()
    (grad,) = torch.autograd.grad(loss, inputs["input"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(grad.sum(), inputs["input"])
