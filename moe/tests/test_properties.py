"""Every operation against its definition, on shapes and options that hypothesis chooses."""

import pytest
import torch
from conftest import assert_close_to_exact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations import (
    BF16,
    F16,
    F32,
    OPERATIONS,
    Shape,
    check_forward,
    check_gradients,
    for_each,
    make_weights,
    normal,
)

pytestmark = pytest.mark.small

bounded = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

sizes = st.builds(
    lambda tokens, experts, top_k, hidden, intermediate: Shape(
        tokens, experts, min(top_k, experts), hidden, intermediate
    ),
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 40),
)
dtypes = st.sampled_from([F32, F16, BF16])
seeds = st.integers(0, 2**16)


@for_each(*OPERATIONS)
@bounded
@given(shape=sizes, dtype=dtypes, seed=seeds)
def test_forward(kernel, device, operation, shape, dtype, seed):
    check_forward(kernel, operation, operation.inputs(shape, dtype, device=device, seed=seed))


@for_each(*OPERATIONS)
@bounded
@given(shape=sizes, dtype=dtypes, seed=seeds)
def test_gradients(kernel, device, operation, shape, dtype, seed):
    inputs = operation.inputs(shape, dtype, device=device, seed=seed, requires_grad=True)
    check_gradients(kernel, operation, inputs)


@bounded
@given(shape=sizes, seed=seeds, data=st.data())
def test_any_indices(kernel, device, shape, seed, data):
    """Repeated and invalid ones too: dispatch, experts and combine agree with the definition, and so does the whole."""
    valid = st.integers(0, shape.experts - 1)
    index = st.one_of(valid, valid, valid, st.integers(-3, shape.experts + 3))
    row = st.lists(index, min_size=shape.top_k, max_size=shape.top_k)
    rows = data.draw(st.lists(row, min_size=shape.tokens, max_size=shape.tokens))
    indices = torch.tensor(rows, dtype=torch.int32).view(shape.tokens, shape.top_k)
    input = normal((shape.tokens, shape.hidden), F32, seed=seed)
    weights = normal((shape.tokens, shape.top_k), F32, seed=seed + 1)
    matrices = make_weights(shape, F32, "cpu", seed + 2)
    exact = kernel.reference.mixture(
        input.double(),
        indices,
        weights.double(),
        *(matrix.double() for matrix in matrices.values()),
        compute_dtype=torch.float64,
    )
    plain = kernel.reference.mixture(input, indices, weights, *matrices.values())
    plan = kernel.RoutingPlan(indices.to(device), weights.to(device), shape.experts)
    dispatched = plan.dispatch(input.to(device))
    for found, expected in zip(
        (dispatched.values, dispatched.expert_offsets, dispatched.row_experts),
        kernel.reference.dispatch(input, indices, shape.experts),
    ):
        assert torch.equal(found.cpu(), expected)
    experts = kernel.SwiGluExperts(*(matrix.to(device) for matrix in matrices.values()))
    assert_close_to_exact(dispatched.combine(experts.forward_dispatched(dispatched)), exact, plain)
    fused = kernel._experts_ops.mix(
        input.to(device), indices.to(device), weights.to(device), experts.gate, experts.up, experts.down, False
    )
    assert_close_to_exact(fused, exact, plain)
