"""The same bits whatever the number of threads, and for a batch entry whatever else is in the batch."""

from dataclasses import replace

import pytest
from conftest import THREAD_COUNTS, assert_bits_equal, only_on_the_cpu, threads
from operations import (
    CAUSAL,
    EVERYTHING,
    PAST_A_PART,
    PLAIN,
    Shape,
    Variant,
    by_strategy,
    for_each,
    gradients,
    random_gradient,
)

SHAPES = [
    pytest.param(Shape(3, 6, 2, 100, 130, 64, 48), id="several_tiles"),
    pytest.param(Shape(1, 2, 1, 300, 300, 33, 17), id="one_long_sequence"),
    pytest.param(Shape(2, 8, 2, 1, 3000, 64, 64), id="one_query"),
    pytest.param(Shape(2, 3, 3, 1, 3000, 80, 64), id="one_query_of_a_head"),
    pytest.param(Shape(1, 4, 1, 5, 2100, 80, 80), id="few_queries"),
]
OF_EACH_ENTRY = Variant("mask_and_bias_of_entries", mask="full", bias="full", options={"is_causal": True})


def forward_and_backward(kernel, variant, inputs, strategy, count):
    with threads(count):
        output, lse = variant.run(kernel, inputs, strategy)
        found = gradients(output, inputs, random_gradient(output))
        return [output.detach(), lse.detach(), *found.values()]


@for_each(CAUSAL, EVERYTHING)
@by_strategy
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads(kernel, device, variant, dtype, strategy, shape):
    only_on_the_cpu(device, "the threads are its own")
    inputs = variant.inputs(shape, dtype, device=device, requires_grad=True)
    first, *others = (forward_and_backward(kernel, variant, inputs, strategy, count) for count in THREAD_COUNTS)
    for other in others:
        for result, expected in zip(other, first, strict=True):
            assert_bits_equal(result, expected)


@for_each(CAUSAL)
@by_strategy
def test_any_number_of_threads_where_keys_come_in_parts(kernel, device, variant, dtype, strategy):
    """However many tiles of queries a thread has that take turns."""
    only_on_the_cpu(device, "the threads are its own")
    inputs = variant.inputs(replace(PAST_A_PART, heads=3, key_heads=1), dtype, device=device)
    results = []
    for count in THREAD_COUNTS:
        with threads(count):
            results.append(variant.run(kernel, inputs, strategy))
    for other in results[1:]:
        for result, expected in zip(other, results[0], strict=True):
            assert_bits_equal(result, expected)


@for_each(PLAIN, OF_EACH_ENTRY)
@by_strategy
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(5, 4, 2, 7, 19, 16, 24), id="small", marks=pytest.mark.small),
        pytest.param(Shape(5, 4, 2, 70, 130, 32, 32), id="tiles"),
        pytest.param(Shape(5, 8, 2, 1, 2000, 32, 32), id="one_query"),
        pytest.param(Shape(5, 3, 3, 1, 2000, 80, 32), id="one_query_of_a_head"),
    ],
)
def test_a_batch_entry_does_not_depend_on_the_others(kernel, device, variant, dtype, strategy, shape):
    """Outputs and gradients of entries, each alone, and of a part of the batch equal those of the whole batch."""
    inputs = variant.inputs(shape, dtype, device=device, requires_grad=True)
    output, lse = variant.run(kernel, inputs, strategy)
    grad = random_gradient(output)
    found = gradients(output, inputs, grad)
    for entries in (slice(0, 1), slice(4, 5), slice(1, 3)):
        part = {name: tensor[entries].detach().clone() for name, tensor in inputs.items()}
        part = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in part.items()}
        part_output, part_lse = variant.run(kernel, part, strategy)
        assert_bits_equal(part_output.detach(), output[entries].detach())
        assert_bits_equal(part_lse.detach(), lse[entries].detach())
        for name, gradient in gradients(part_output, part, grad[entries]).items():
            assert_bits_equal(gradient, found[name][entries])


@for_each(PLAIN, EVERYTHING)
@by_strategy
@pytest.mark.parametrize("count", THREAD_COUNTS, ids=lambda count: f"{count}_threads")
def test_twice_the_same(kernel, device, variant, dtype, strategy, count):
    if count != THREAD_COUNTS[0]:
        only_on_the_cpu(device, "the threads are its own")
    inputs = variant.inputs(Shape(2, 4, 2, 70, 90, 32, 32), dtype, device=device, requires_grad=True)
    first = forward_and_backward(kernel, variant, inputs, strategy, count)
    for again, expected in zip(forward_and_backward(kernel, variant, inputs, strategy, count), first, strict=True):
        assert_bits_equal(again, expected)
