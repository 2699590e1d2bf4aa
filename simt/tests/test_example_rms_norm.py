"""The example kernel on the bench: every path of its CUDA launcher against numpy, in all orders."""

import numpy as np
import pytest
from bench import KERNELS, ORDERS, Buffer, from_bfloat16, to_bfloat16

SOURCE = KERNELS / "example_rms_norm.cu"
DTYPES = ["float32", "float16", "bfloat16"]
EPSILON = 1e-6


def encode(x, dtype):
    return to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)


def decode(x, dtype):
    return from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)


def reference(x, gamma, offset=0.0):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * (gamma.astype(np.float64) + offset)


def assert_rounded_once(y, exact, dtype):
    eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    # Half a unit for the rounding, and a few of float32 for the arithmetic before it.
    np.testing.assert_allclose(y, exact, rtol=0.5 * eps + 8 * 2.0**-23, atol=1e-7)


def run(bench, x, gamma, *, dtype, gamma_dtype, zero_centered=False, checked=True, order="forward"):
    rows, width = x.shape
    x, gamma = Buffer(encode(x, dtype), "x"), Buffer(encode(gamma, gamma_dtype), "gamma")
    y = Buffer(np.empty_like(x.array), "y", "output")
    numbers = (rows, width, EPSILON, int(zero_centered), DTYPES.index(dtype), DTYPES.index(gamma_dtype))
    launcher = bench.load(SOURCE, checked=checked).run_rms_norm
    return bench.call(launcher, *numbers, x, gamma, y, order=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, width",
    [
        pytest.param(1, 1, id="one_element"),
        pytest.param(3, 33, id="warp_row_scalar"),
        pytest.param(9, 256, id="warp_row_vectors"),
        pytest.param(2, 1027, id="block_row_scalar"),
        pytest.param(3, 2048, id="block_row_vectors"),
        pytest.param(2, 1032, id="block_row_idle_threads"),
        pytest.param(0, 64, id="empty"),
    ],
)
def test_matches_numpy_in_every_order(bench, rows, width, dtype, order):
    rng = np.random.default_rng(width)
    x, gamma = rng.standard_normal((rows, width)), rng.standard_normal(width)
    y = run(bench, x, gamma, dtype=dtype, gamma_dtype="float32", order=order)
    exact = reference(decode(encode(x, dtype), dtype), gamma.astype(np.float32))
    assert_rounded_once(decode(y, dtype), exact, dtype)
    unchecked = run(bench, x, gamma, dtype=dtype, gamma_dtype="float32", checked=False)
    assert np.array_equal(y.view(np.uint8), unchecked.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma_of_the_inputs_own_dtype(bench, dtype):
    rng = np.random.default_rng(5)
    x, gamma = rng.standard_normal((4, 64)), rng.standard_normal(64)
    y = run(bench, x, gamma, dtype=dtype, gamma_dtype=dtype, zero_centered=True)
    exact = reference(decode(encode(x, dtype), dtype), decode(encode(gamma, dtype), dtype), offset=1.0)
    assert_rounded_once(decode(y, dtype), exact, dtype)


@pytest.mark.parametrize("width", [96, 2048])
def test_rows_whose_squares_overflow(bench, width):
    x = np.random.default_rng(6).standard_normal((3, width)) * 1e30
    y = run(bench, x, np.ones(width), dtype="float32", gamma_dtype="float32")
    assert_rounded_once(y, reference(x.astype(np.float32), np.ones(width)), "float32")


def test_more_rows_than_the_grid_has_room_for(bench):
    x = np.random.default_rng(7).standard_normal((2048 * 4 + 5, 4))
    y = run(bench, x, np.ones(4), dtype="float32", gamma_dtype="float32", checked=False)
    assert_rounded_once(y, reference(x.astype(np.float32), np.ones(4)), "float32")
