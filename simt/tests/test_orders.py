"""run_in_each_order: one operator call under several schedules, whose results must have the same bits."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from bench import KERNELS, line_of

SOURCE = KERNELS / "orders.cu"
THREADS = 64
X = np.arange(1, THREADS + 1, dtype=np.float32)


@pytest.fixture(params=[False, True], ids=["fast", "checked"])
def library(request, bench):
    library = bench.load(SOURCE, checked=request.param)
    library.set_orders(ctypes.c_int64(1))
    yield library
    library.set_orders(ctypes.c_int64(0))


def call(library, name, *numbers, y=None):
    """What a launcher wrote, or the text of its error."""
    y = np.zeros(THREADS, np.float32) if y is None else y
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (y, X)]
    error = function(*map(ctypes.c_int64, numbers), *pointers)
    return error.decode() if error else y


def test_right_kernel_passes(library):
    assert np.array_equal(call(library, "run_same"), X + X[::-1])


def test_result_that_depends_on_the_order_is_reported(bench):
    library = bench.load(SOURCE, checked=False)
    library.set_orders(ctypes.c_int64(1))
    message = call(library, "run_order_dependent")
    library.set_orders(ctypes.c_int64(0))
    assert message.startswith(f"order-dependent at orders.cu:{line_of(SOURCE, 'launch(ordered<kWhich>')}")
    assert "at offset 2 of buffer 'y' differs between the orders forward and reverse" in message
    assert "ordered<1>" in message


def test_every_order_starts_with_what_the_buffer_held(library):
    y = np.full(THREADS, 10, np.float32)
    assert np.array_equal(call(library, "run_update", y=y), 10 + X)


def test_launches_of_a_call_may_share_an_output(library):
    assert np.array_equal(call(library, "run_two_launches"), 2 * X)


def test_nested_call_is_an_error_and_nothing_sticks(library):
    assert "called from inside another one's run" in call(library, "run_nested")
    assert np.array_equal(call(library, "run_same"), X + X[::-1])


def test_calls_of_several_threads_take_turns(library):
    y = np.zeros((4, THREADS), np.float32)
    assert np.array_equal(call(library, "run_threads", 4, 50, y=y), np.tile(50 * X, (4, 1)))


@pytest.mark.parametrize("orders, accepted", [("forward,reverse,random", True), ("reverse", False), ("", False)])
def test_environment_lists_the_orders(bench, orders, accepted):
    """In a process of its own, because the engine reads the environment once."""
    library = bench.load(SOURCE, checked=False)._name
    script = "import ctypes, sys; run = ctypes.CDLL(sys.argv[1]).run_order_dependent; run.restype = ctypes.c_char_p; "
    script += "y = (ctypes.c_float * 64)(); x = (ctypes.c_float * 64)(*range(64)); print(run(y, x), run(y, x))"
    command = [sys.executable, "-c", script, library]
    done = subprocess.run(command, env={**os.environ, "RUDNN_SIMT_ORDER": orders}, capture_output=True, text=True)
    expected = {"reverse": "None", "": "RUDNN_SIMT_ORDER is empty"}.get(orders, "order-dependent at orders.cu")
    assert expected in done.stdout, done.stdout + done.stderr
