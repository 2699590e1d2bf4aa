"""Every fault in kernels/faults.cu is reported with its kind and line in every order, and its twin is clean."""

import ctypes
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from bench import KERNELS, ORDERS, Buffer, KernelError, line_of

SOURCE = KERNELS / "faults.cu"
X = np.arange(1024, dtype=np.float32) % 5

# Which threads run first can decide which of two kinds is seen.
RACE_OR_UNWRITTEN = {"shared-race", "uninitialised-read"}
KINDS = {
    "missing_barrier": {"shared-race"},
    "missing_warp_barrier": {"shared-race"},
    "uninitialised_read": {"uninitialised-read"},
    "shared_overrun": {"out-of-bounds"},
    "array_index": {"bad-index"},
    "read_before_start": {"out-of-bounds"},
    "write_past_end": {"out-of-bounds"},
    "misaligned_vector": {"misaligned"},
    "write_to_input": {"read-only-write"},
    "blocks_overlap": {"block-race"},
    "threads_overlap": {"global-race"},
    "global_without_barrier": {"global-race", "uninitialised-read"},
    "plain_beside_atomic": {"global-race", "block-race"},
    "output_read_first": {"uninitialised-read"},
    "divergent_barrier": {"divergent-barrier"},
    "early_return": {"early-exit"},
    "lanes_apart": {"deadlock"},
    "absent_source_lane": {"divergent-warp"},
    "named_barrier_count": RACE_OR_UNWRITTEN,
    "part_of_a_warp_at_a_barrier": {"bad-barrier"},
    "local_memory_of_another": {"local-memory"},
    "weak_wait": {"in-flight-access"},
    "copy_without_barrier": {"shared-race"},
    "copy_over_unread": {"shared-race", "in-flight-access"},
    "matrix_without_barrier": RACE_OR_UNWRITTEN,
    "copy_never_waited": {"async-copy"},
    "bulk_copy_never_waited": {"async-copy"},
    "pipeline_early_arrival": {"shared-race", "in-flight-access"},
    "pipeline_no_full_wait": {"in-flight-access", *RACE_OR_UNWRITTEN},
    "pipeline_no_empty_wait": {"bad-barrier"},
    "pipeline_no_arrival": {"deadlock"},
    "pipeline_no_init_barrier": {"shared-race", "bad-barrier"},
    "pipeline_two_readers": {"shared-race", "in-flight-access"},
    "wide_shift": {"bad-shift"},
    "division_by_zero": {"bad-division"},
}
THREADS, TILES = 64, 192
SIZES = {"blocks_overlap": 2 * THREADS, "plain_beside_atomic": THREADS + 1}


def run(bench, name, *, fault, order):
    size = TILES if name.startswith("pipeline") else SIZES.get(name, THREADS)
    access = "update" if name == "plain_beside_atomic" else "output"
    launcher = getattr(bench.load(SOURCE), name + "_run")
    return bench.call(launcher, int(fault), Buffer(X[:size], "y", access), Buffer(X, "x"), order=order)


def marked_lines(name, *tags):
    """Lines of the source whose comment has one of these tags for this kernel."""
    pattern = re.compile(rf"// .*\b(?:{'|'.join(tags)}): {name}\b")
    return {n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if pattern.search(text)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", KINDS)
def test_fault_is_reported_where_it_is(bench, name, order):
    with pytest.raises(KernelError) as caught:
        run(bench, name, fault=True, order=order)
    error = caught.value
    assert error.kind in KINDS[name]
    assert error.file == "faults.cu"
    assert error.line in marked_lines(name, "at", "either"), str(error)
    assert f"in void {name}<true>(float*, float const*)" in str(error)


@pytest.mark.parametrize("name", [*KINDS, "unwritten_output"])
def test_twin_without_the_fault_is_clean(bench, name):
    outputs = [run(bench, name, fault=False, order=order) for order in ORDERS]
    assert all(np.array_equal(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("name", ["missing_barrier", "missing_warp_barrier", "copy_without_barrier", "weak_wait"])
def test_race_names_both_sides(bench, name):
    with pytest.raises(KernelError) as caught:
        run(bench, name, fault=True, order="forward")
    lines = marked_lines(name, "at", "either", "other")
    named = {int(n) for n in re.findall(r"(?:written|read|copied) at faults\.cu:(\d+)", str(caught.value))}
    assert len(lines) == 2 and {caught.value.line, *named} == lines


def test_unwritten_output_names_the_launch_and_the_first_byte(bench):
    with pytest.raises(
        KernelError, match="4 of 256 bytes of buffer 'y' were not written, the first at offset 252"
    ) as e:
        run(bench, "unwritten_output", fault=True, order="forward")
    assert (e.value.kind, e.value.line) == ("unwritten-output", line_of(SOURCE, "FAULT(unwritten_output,"))


def test_deadlock_lists_where_each_group_waits(bench):
    with pytest.raises(KernelError) as caught:
        run(bench, "lanes_apart", fault=True, order="forward")
    shuffle, barrier = sorted(marked_lines("lanes_apart", "either"))
    assert f"threads 0-15, 32-47 wait in __shfl_xor_sync at faults.cu:{shuffle}" in str(caught.value)
    assert f"threads 16-31, 48-63 wait in __syncthreads at faults.cu:{barrier}" in str(caught.value)


def test_random_order_repeats(bench):
    def message():
        with pytest.raises(KernelError) as caught:
            run(bench, "missing_barrier", fault=True, order="random")
        return str(caught.value)

    assert message() == message()


@pytest.mark.parametrize(
    "variables, message",
    [
        ({}, "thread (0,0,0)"),
        ({"RUDNN_SIMT_ORDER": "reverse"}, "thread (63,0,0)"),
        ({"RUDNN_SIMT_ORDER": "sideways"}, "must list forward, reverse or random, got 'sideways'"),
    ],
)
def test_environment_selects_the_order(bench, variables, message):
    """In a process of its own, because the engine reads the environment once."""
    library = bench.load(SOURCE)._name
    script = "import ctypes, sys; run = ctypes.CDLL(sys.argv[1]).write_to_input_run; run.restype = ctypes.c_char_p; "
    script += "x = (ctypes.c_float * 64)(); lib = ctypes.CDLL(sys.argv[2]); "
    script += (
        "lib.simt_register_buffer(x, ctypes.c_int64(256), b'x', ctypes.c_int64(0)); print(run(ctypes.c_int64(1), x, x))"
    )
    command = [sys.executable, "-c", script, library, bench.engine._name]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert message in done.stdout, done.stdout + done.stderr


def test_newest_of_overlapping_buffers_counts(bench):
    """An output inside the range of an input may be written, as views of one storage want."""
    memory = np.zeros(4 * THREADS, np.float32)
    whole, part = memory.ctypes.data, memory.ctypes.data + 2 * THREADS * 4
    run = bench.load(SOURCE).write_past_end_run
    run.restype = ctypes.c_char_p
    bench.engine.simt_set_order(ORDERS["forward"])
    bench.engine.simt_register_buffer(whole, memory.nbytes, b"whole", 0)
    bench.engine.simt_register_buffer(part, THREADS * 4, b"part", 2)
    x, y = ctypes.c_void_p(whole), ctypes.c_void_p(part)
    assert run(ctypes.c_int64(0), y, x) is None and bench.engine.simt_check_outputs() is None
    assert b"read-only-write" in run(ctypes.c_int64(1), y, x)
    bench.engine.simt_clear_buffers()
