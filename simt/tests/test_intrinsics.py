"""Known answers for every intrinsic, and identical bits in every order."""

import numpy as np
import pytest
from bench import KERNELS, ORDERS, Buffer, KernelError, from_bfloat16, to_bfloat16

SOURCE = KERNELS / "intrinsics.cu"
LANES = np.arange(32)


@pytest.fixture
def run(bench):
    """Calls run_<name> in all orders, checked and not, and returns what it wrote, which must never differ."""

    def call(name, *args):
        results = [
            bench.call(getattr(bench.load(SOURCE, checked=checked), "run_" + name), *args, order=order)
            for checked in (True, False)
            for order in ORDERS
        ]
        for other in results[1:]:
            np.testing.assert_equal(other, results[0])
        return results[0]

    return call


def output(size, dtype=np.int32):
    return Buffer(np.empty(size, dtype), "out", "output")


# Layouts of the operands of mma.m16n8k16 as (thread, value) -> element, written as CuTe strides: thread t adds
# (t % 4, t // 4) times the thread strides, the bits of the value add the value strides, in column-major order.
MMA_LAYOUTS = {"a": ((32, 1), (16, 8, 128), 16), "b": ((16, 1), (8, 64), 8), "d": ((32, 1), (16, 8), 16)}


def fragment_elements(operand):
    """For every lane and value of an operand: its row and column."""
    thread_strides, value_strides, rows = MMA_LAYOUTS[operand]
    values = np.arange(2 ** len(value_strides))
    offset = LANES[:, None] % 4 * thread_strides[0] + LANES[:, None] // 4 * thread_strides[1]
    offset = offset + sum(((values >> bit) & 1) * stride for bit, stride in enumerate(value_strides))
    return offset % rows, offset // rows


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mma_multiplies_fragments_of_the_documented_layout(run, dtype):
    rng = np.random.default_rng(0)
    encode = to_bfloat16 if dtype == "bfloat16" else lambda x: x.astype(np.float16).view(np.uint16)
    decode = from_bfloat16 if dtype == "bfloat16" else lambda x: x.view(np.float16).astype(np.float32)
    a, b = encode(rng.standard_normal((16, 16))), encode(rng.standard_normal((8, 16)))  # b is (n, k)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    fragments = [np.ascontiguousarray(x[fragment_elements(name)]) for x, name in ((a, "a"), (b, "b"), (c, "d"))]
    packed = [Buffer(f.view(np.uint32) if f.dtype == np.uint16 else f, "operand") for f in fragments]
    out = run("mma", int(dtype == "bfloat16"), output((32, 4), np.float32), *packed)
    d = np.empty((16, 8), np.float32)
    d[fragment_elements("d")] = out
    np.testing.assert_allclose(d, decode(a) @ decode(b).T + c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row(run, matrices, transpose):
    tiles = np.arange(64 * matrices, dtype=np.uint16).reshape(matrices, 8, 8)
    out = run("load_matrix", matrices, int(transpose), output((32, matrices), np.uint32), Buffer(tiles, "tiles"))
    for m in range(matrices):
        tile = tiles[m].T if transpose else tiles[m]
        assert np.array_equal(out[:, m].copy().view(np.uint16), tile.ravel())


def test_ldmatrix_of_an_a_tile_is_the_a_fragment_of_mma(run):
    a = np.arange(256, dtype=np.uint16).reshape(16, 16)
    quarters = np.stack([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]])
    out = run("load_matrix", 4, 0, output((32, 4), np.uint32), Buffer(quarters, "tiles"))
    assert np.array_equal(out.view(np.uint16).reshape(32, 8), a[fragment_elements("a")])


def test_shuffles_and_votes(run):
    out = run("shuffles", output((8, 32)))
    assert (out[0] == 5).all()
    assert np.array_equal(out[1], LANES // 8 * 8 + 5)
    assert np.array_equal(out[2], LANES ^ 3)
    assert np.array_equal(out[3], np.where(LANES % 8 >= 2, LANES - 2, LANES))
    assert np.array_equal(out[4], np.where(LANES % 8 < 6, LANES + 2, LANES))
    assert (out[5].astype(np.uint32) == sum(1 << lane for lane in range(0, 32, 3))).all()
    assert (out[6] == 1).all()
    assert np.array_equal(out[7], np.where(LANES < 16, LANES ^ 15, 100 + (LANES ^ 1)))


def test_matches_and_bit_counts(run):
    out = run("matches", output((3, 32)))
    equal = [sum(1 << other for other in range(lane % 5, 32, 5)) for lane in range(32)]
    assert out[0].astype(np.uint32).tolist() == equal
    assert out[1].tolist() == [bits.bit_count() for bits in equal]
    assert out[2].tolist() == [32 - lane.bit_length() for lane in range(32)]


def test_reductions_give_every_lane_the_result(run):
    x = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    out = run("reductions", output((2, 32), np.float32), Buffer(x, "x"))
    assert (out[0] == out[0, 0]).all() and np.isclose(out[0, 0], x.sum(dtype=np.float64), atol=1e-6)
    assert (out[1] == x.max()).all()


def test_indices_count_x_first(run):
    out = run("indices", output((12, 40)))
    assert np.array_equal(out, 1000 * np.arange(12)[:, None] + np.arange(40))


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_copies_or_writes_zeros(run, size):
    x = np.random.default_rng(2).integers(1, 255, (32, size), dtype=np.uint8)
    out = run("copy_async", size, output((32, size), np.uint8), Buffer(x, "x"))
    assert np.array_equal(out, np.where(LANES[:, None] % 2 == 0, x, 0))


def test_bulk_copies_arrive_by_phase(run):
    x = np.arange(96, dtype=np.float32).reshape(3, 32)
    assert np.array_equal(run("copy_bulk", output((3, 32), np.float32), Buffer(x, "x")), x[:, ::-1])


def test_mbarrier_counts_arrivals(run):
    assert np.array_equal(run("arrivals", output(64)), np.arange(64) + 2)


def test_named_barriers_order_only_their_warps(run):
    assert np.array_equal(run("named_barriers", output(32)), 2 * (100 + LANES[::-1]))


@pytest.mark.parametrize(
    "name, width, dtype",
    [("f32x4", 4, "f4"), ("f16x8", 8, "f2"), ("f16x4", 4, "f2"), ("f16x2", 2, "f2"), ("u8x16", 16, "u1")],
)
def test_vectors_move_whole(run, name, width, dtype):
    x = np.arange(32 * width).astype(dtype).reshape(32, width)
    expected = x.copy()
    expected[:, [0, -1]] = x[:, [-1, 0]]
    assert np.array_equal(run("vectors_" + name, output(x.shape, x.dtype), Buffer(x, "x")), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_round_to_nearest_even(run, dtype):
    eps = 2.0 ** (-8 if dtype == "bfloat16" else -11)  # half the distance between neighbours at 1
    special = [1 + eps, 1 + 3 * eps, 1 + 1.5 * eps, -1 - eps, 0.0, -0.0, np.inf, -np.inf, 1e-8, -1e-30]
    x = np.array(special + [0.1 * i for i in range(22)], np.float32)
    back, packed = run(
        "round_trip", int(dtype == "bfloat16"), output(32, np.float32), output(32, np.uint32), Buffer(x, "x")
    )
    bits = to_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float16).view(np.uint16)
    one = 0x3F80 if dtype == "bfloat16" else 0x3C00
    assert np.array_equal(packed, bits | np.uint32(one << 16))
    assert back[0] == 1 and back[1] == 1 + 4 * eps
    assert np.array_equal(
        back.view(np.uint32),
        (from_bfloat16(bits) if dtype == "bfloat16" else bits.view(np.float16).astype(np.float32)).view(np.uint32),
    )


def test_math(run):
    x = np.linspace(0.01, 20, 32).astype(np.float32)
    out = run("math", output((2, 32), np.float32), Buffer(x, "x"))
    np.testing.assert_allclose(out, [1 / np.sqrt(x), np.exp(x)], rtol=1e-6)


def test_atomics_of_all_blocks_add_up(run):
    assert run("atomics", Buffer(np.zeros(2, np.int32), "out", "update")).tolist() == [128, 7]


@pytest.mark.parametrize(
    "blocks, threads, shared, message",
    [
        (1, 1025, 0, "a block of \\(1025, 1, 1\\) threads"),
        (0, 32, 0, "a grid of \\(0, 1, 1\\) blocks"),
        (1, 32, 228 << 10, "233472 bytes of dynamic shared memory"),
    ],
)
def test_impossible_launches_are_refused(bench, blocks, threads, shared, message):
    with pytest.raises(KernelError, match=message) as caught:
        bench.call(bench.load(SOURCE).run_shape, blocks, threads, shared)
    assert caught.value.kind == "bad-launch" and caught.value.file == "intrinsics.cu"
