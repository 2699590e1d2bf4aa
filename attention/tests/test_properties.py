"""Attention against its definition, on shapes and options that hypothesis chooses."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations import BIASES, MASKS, Shape, Variant, check_forward, check_gradients
from operations import strategies as kernel_strategies

pytestmark = pytest.mark.small

bounded = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

shapes = st.builds(
    lambda batch, key_heads, groups, queries, keys, width, value_width: Shape(
        batch, key_heads * groups, key_heads, queries, keys, width, value_width
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(0, 80),
    st.integers(1, 40),
    st.integers(1, 40),
)
bounds = st.integers(-1, 20)
options = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.floats(0.01, 2),
        "softcap": st.floats(0.5, 50),
        "is_causal": st.booleans(),
        "window": st.tuples(bounds, bounds),
    },
)
variants = st.builds(
    lambda mask, bias, sinks, options: Variant("any", mask, bias, sinks, options),
    st.sampled_from([None, *MASKS]),
    st.sampled_from([None, *BIASES]),
    st.booleans(),
    options,
)
cases = st.sampled_from([case.values for case in kernel_strategies()])
seeds = st.integers(0, 2**16)


@bounded
@given(variant=variants, shape=shapes, case=cases, seed=seeds)
def test_forward(kernel, device, variant, shape, case, seed):
    dtype, strategy = case
    check_forward(kernel, variant, variant.inputs(shape, dtype, device=device, seed=seed), strategy)


@bounded
@given(variant=variants, shape=shapes, case=cases, seed=seeds)
def test_gradients(kernel, device, variant, shape, case, seed):
    dtype, strategy = case
    inputs = variant.inputs(shape, dtype, device=device, seed=seed, requires_grad=True)
    check_gradients(kernel, variant, inputs, strategy)
