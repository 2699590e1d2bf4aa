"""Every function against its definition, on shapes and options that hypothesis chooses."""

import pytest
import torch
from conftest import assert_close_to_exact, flushes_subnormals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations import BF16, F16, F32, OPERATIONS, check_forward, check_gradients, for_each

pytestmark = pytest.mark.small

bounded = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

shapes = st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(3, 150)).map(
    lambda parts: (*parts[0], parts[1])
)
dtypes = st.sampled_from([(F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)])
epsilons = st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3, 0.5, 10.0])
seeds = st.integers(0, 2**16)


def epsilon_option(operation, epsilon):
    return {"epsilon": epsilon} if operation.parameters else {}


@for_each(*OPERATIONS)
@bounded
@given(shape=shapes, dtypes=dtypes, epsilon=epsilons, seed=seeds)
def test_forward(kernel, device, operation, shape, dtypes, epsilon, seed):
    inputs = operation.inputs(shape, *dtypes, device=device, seed=seed)
    check_forward(kernel, operation, inputs, **epsilon_option(operation, epsilon))


@for_each(*OPERATIONS)
@bounded
@given(shape=shapes, dtypes=dtypes, epsilon=epsilons, seed=seeds)
def test_gradients(kernel, device, operation, shape, dtypes, epsilon, seed):
    inputs = operation.inputs(shape, *dtypes, device=device, seed=seed, requires_grad=True)
    check_gradients(kernel, operation, inputs, **epsilon_option(operation, epsilon))


@for_each(*OPERATIONS)
@bounded
@given(data=st.data(), width=st.integers(2, 40), seed=seeds)
def test_any_magnitude(kernel, device, operation, data, width, seed):
    """Rows of any scale that float32 holds, each judged on its own."""
    inputs = operation.inputs((4, width), device=device, seed=seed)
    least = -31 if flushes_subnormals(device) else -37  # an element that counts beside its row's largest is normal
    exponents = data.draw(st.lists(st.integers(least, 37), min_size=4, max_size=4))
    scales = torch.tensor([10.0**exponent for exponent in exponents], device=device)[:, None]
    inputs["input"] = inputs["input"].clamp(-3, 3) * scales
    if "residual" in inputs:
        inputs["residual"] = inputs["residual"].clamp(-3, 3) * scales
    outputs = operation.run(kernel, inputs)
    exact, _ = operation.run_exact(kernel, inputs)
    for output, exact_output in zip(outputs, exact, strict=True):
        for row in range(4):
            assert_close_to_exact(output[row], exact_output[row])
