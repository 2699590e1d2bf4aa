"""The same bits whatever the number of threads, and for a row whatever else is in the batch."""

import pytest
from conftest import THREAD_COUNTS, assert_bits_equal, only_on_the_cpu, threads
from operations import BF16, F32, OPERATIONS, for_each, gradients, random_gradients

SHAPES = [
    pytest.param((300, 576), id="many_rows"),
    pytest.param((1000, 96), id="several_gradient_chunks"),
    pytest.param((3, 32769), id="few_long_rows"),
    pytest.param((70000, 3), id="very_many_short_rows"),
]


@for_each(*OPERATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads(kernel, device, operation, dtype, shape):
    only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)

    def forward_and_backward(count):
        with threads(count):
            outputs = operation.run(kernel, inputs)
            return [*outputs, *gradients(outputs, inputs, random_gradients(outputs)).values()]

    first, *others = map(forward_and_backward, THREAD_COUNTS)
    for other in others:
        for result, expected in zip(other, first, strict=True):
            assert_bits_equal(result, expected)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((300, 100), id="many_rows"),
        pytest.param((37, 5000), id="long_rows"),
        pytest.param((36, 100), id="rows_of_warps", marks=pytest.mark.small),
        pytest.param((36, 1000), id="rows_of_blocks", marks=[pytest.mark.small, pytest.mark.simt_checked]),
    ],
)
def test_a_row_does_not_depend_on_the_others(kernel, device, operation, dtype, shape):
    """Outputs and row gradients of two rows, each alone, and of a part of the batch equal those of the whole batch."""
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    outputs = operation.run(kernel, inputs)
    grads = random_gradients(outputs)
    found = gradients(outputs, inputs, grads)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 36)):
        part = {
            name: (tensor[rows] if name in operation.rows else tensor).detach().requires_grad_()
            for name, tensor in inputs.items()
        }
        part_outputs = operation.run(kernel, part)
        for output, whole in zip(part_outputs, outputs, strict=True):
            assert_bits_equal(output, whole[rows])
        part_found = gradients(part_outputs, part, [grad[rows] for grad in grads])
        for name in operation.rows:
            assert_bits_equal(part_found[name], found[name][rows])


@for_each(*OPERATIONS)
@pytest.mark.parametrize("count", THREAD_COUNTS, ids=lambda count: f"{count}_threads")
def test_twice_the_same(kernel, device, operation, count):
    if count != THREAD_COUNTS[0]:
        only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs((100, 100), device=device, requires_grad=True)
    with threads(count):
        outputs = operation.run(kernel, inputs)
        grads = random_gradients(outputs)
        found = gradients(outputs, inputs, grads)
        again = operation.run(kernel, inputs)
        found_again = gradients(again, inputs, grads)
    for output, expected in zip(again, outputs, strict=True):
        assert_bits_equal(output, expected)
    for name, grad in found_again.items():
        assert_bits_equal(grad, found[name])
