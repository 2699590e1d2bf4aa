"""The same bits whatever the number of threads, and for a token whatever else is in the batch."""

import pytest
from conftest import THREAD_COUNTS, assert_bits_equal, only_on_the_cpu, threads
from operations import (
    BF16,
    F32,
    LAYERS,
    OPERATIONS,
    WITH_EXPERTS,
    Shape,
    by_strategy,
    differentiable,
    for_each,
    gradients,
    random_gradient,
)

WITHOUT_EXPERTS = [operation for operation in OPERATIONS if not operation.strategic]
PER_TOKEN = [operation for operation in WITHOUT_EXPERTS if operation.per_token]

SHAPES = [
    pytest.param(Shape(300, 8, 2, 64, 48), id="many_tokens"),
    pytest.param(Shape(3, 4, 2, 700, 300), id="few_long_tokens"),
    pytest.param(Shape(97, 33, 4, 96, 40), id="many_experts"),
]


def forward_and_backward(kernel, operation, inputs, count, **options):
    with threads(count):
        output = operation.run(kernel, inputs, **options)
        found = gradients(output, inputs, random_gradient(output))
        alone = operation.run(kernel, {name: tensor.detach() for name, tensor in inputs.items()}, **options)
        return [output.detach(), alone, *found.values()]


def assert_any_number_of_threads(kernel, operation, inputs, **options):
    first, *others = (forward_and_backward(kernel, operation, inputs, count, **options) for count in THREAD_COUNTS)
    for other in others:
        for result, expected in zip(other, first, strict=True):
            assert_bits_equal(result, expected)


@for_each(*WITHOUT_EXPERTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads(kernel, device, operation, dtype, shape):
    only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    assert_any_number_of_threads(kernel, operation, inputs)


@for_each(*WITHOUT_EXPERTS)
def test_any_number_of_threads_for_many_short_tokens(kernel, device, operation):
    only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs(Shape(20000, 5, 2, 1, 1), device=device, requires_grad=True)
    assert_any_number_of_threads(kernel, operation, inputs)


@for_each(*WITH_EXPERTS)
@by_strategy
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads_for_experts(kernel, device, operation, dtype, strategy, shape):
    only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    assert_any_number_of_threads(kernel, operation, inputs, strategy=strategy)


BATCHES = [
    pytest.param(Shape(300, 4, 2, 100, 72), id="many_tokens"),
    pytest.param(Shape(37, 4, 2, 40, 24), id="partial_tiles", marks=pytest.mark.small),
    pytest.param(Shape(36, 1, 1, 33, 17), id="one_expert", marks=pytest.mark.small),
]


def assert_a_token_alone_is_the_same(kernel, operation, inputs, **options):
    """Outputs and gradients of tokens, each alone, and of a part of the batch equal those of the whole batch.

    With gradients and without: the layer keeps less in the latter case and rounds once.
    """
    output = operation.run(kernel, inputs, **options)
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    plain = {name: tensor.detach() for name, tensor in inputs.items()}
    without_gradients = operation.run(kernel, plain, **options)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 36), slice(20, 36)):
        part = {name: tensor[rows] if name in operation.per_token else tensor for name, tensor in plain.items()}
        assert_bits_equal(operation.run(kernel, part, **options), without_gradients[rows])
        for name, tensor in differentiable(part).items():
            part[name] = tensor.clone().requires_grad_()
        part_output = operation.run(kernel, part, **options)
        assert_bits_equal(part_output.detach(), output[rows].detach())
        part_found = gradients(part_output, part, grad[rows])
        for name in found.keys() & set(operation.per_token):
            assert_bits_equal(part_found[name], found[name][rows])


@for_each(*PER_TOKEN)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", BATCHES)
def test_a_token_does_not_depend_on_the_others(kernel, device, operation, dtype, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    assert_a_token_alone_is_the_same(kernel, operation, inputs)


@for_each(*LAYERS)
@by_strategy
@pytest.mark.parametrize("shape", BATCHES)
def test_a_token_of_the_layer_does_not_depend_on_the_others(kernel, device, operation, dtype, strategy, shape):
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    assert_a_token_alone_is_the_same(kernel, operation, inputs, strategy=strategy)


@for_each(*LAYERS)
@by_strategy
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(36, 1, 1, 3101, 37), id="rows_in_parts"),
        pytest.param(Shape(200, 1, 1, 300, 40), id="more_rows_than_at_once"),
    ],
)
def test_a_token_does_not_depend_on_how_others_are_shared_out(kernel, device, operation, dtype, strategy, shape):
    only_on_the_cpu(device, "the lengths are its own")
    inputs = operation.inputs(shape, dtype, device=device, requires_grad=True)
    assert_a_token_alone_is_the_same(kernel, operation, inputs, strategy=strategy)


@for_each(*OPERATIONS)
@pytest.mark.parametrize("count", THREAD_COUNTS, ids=lambda count: f"{count}_threads")
def test_twice_the_same(kernel, device, operation, count):
    if count != THREAD_COUNTS[0]:
        only_on_the_cpu(device, "the threads are its own")
    inputs = operation.inputs(Shape(50, 8, 2, 64, 40), BF16, device=device, requires_grad=True)
    first = forward_and_backward(kernel, operation, inputs, count)
    for again, expected in zip(forward_and_backward(kernel, operation, inputs, count), first, strict=True):
        assert_bits_equal(again, expected)
