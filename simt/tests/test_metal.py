"""Metal shaders on the bench: seeded faults, known answers, and the pre-pass."""

import re

import numpy as np
import pytest
from bench import KERNELS, ORDERS, Buffer, KernelError, from_bfloat16, to_bfloat16

from simt import toolchain
from simt.metal import prepass, shader

X = np.arange(1024, dtype=np.float32)
FAULTS = {
    "missing_barrier": {"shared-race"},
    "matrix_overwritten": {"shared-race"},
    "weak_flags": {"global-race", "uninitialised-read"},
    "divergent_barrier": {"divergent-barrier"},
    "out_of_bounds": {"out-of-bounds"},
    "misaligned_vector": {"misaligned"},
    "past_threadgroup_memory": {"out-of-bounds"},
}


def launch(
    bench, shader, name, *buffers, groups=1, threads=32, threadgroup_bytes=0, constant=0, checked=True, order="forward"
):
    library = bench.load(KERNELS / shader, KERNELS / "metal_entry.cpp", toolchain.METAL_PIPELINE, checked=checked)
    padded = [*buffers, None, None][:3]
    numbers = (groups, threads, threadgroup_bytes, constant)
    return bench.call(library.run_kernel, name.encode(), *numbers, *padded, order=order)


def run_fault(bench, name, *, fault, order):
    y = Buffer(X[:64], "y", "output")
    size = {"threads": 64, "threadgroup_bytes": 256}
    return launch(bench, "faults.metal", name, y, Buffer(X, "x"), constant=int(fault), order=order, **size)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_where_it_is(bench, name, order):
    with pytest.raises(KernelError) as caught:
        run_fault(bench, name, fault=True, order=order)
    source = (KERNELS / "faults.metal").read_text().splitlines()
    lines = {n for n, text in enumerate(source, 1) if f"// at: {name}" in text}
    assert caught.value.kind in FAULTS[name]
    assert caught.value.file == "faults.metal" and caught.value.line in lines, str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_twin_without_the_fault_is_clean(bench, name):
    outputs = [run_fault(bench, name, fault=False, order=order) for order in ORDERS]
    assert all(np.array_equal(outputs[0], other) for other in outputs)


@pytest.fixture
def run(bench):
    """Launches a kernel of intrinsics.metal in all orders, checked and not; the results must not differ."""

    def call(name, *buffers, **options):
        results = [
            launch(bench, "intrinsics.metal", name, *buffers, checked=checked, order=order, **options)
            for checked in (True, False)
            for order in ORDERS
        ]
        for other in results[1:]:
            np.testing.assert_equal(other, results[0])
        return results[0]

    return call


def output(shape, dtype):
    return Buffer(np.empty(shape, dtype), "y", "output")


def test_matrix_elements_lie_in_apples_order(run):
    out = run("matrix_layout", output((32, 2), np.float32), Buffer(X[:64], "x"))
    # Eight lanes hold a quadrant of 4x4 elements in pairs, row by row: the order that the hardware shows.
    quadrant = np.array([[0, 1], [2, 3], [8, 9], [10, 11], [16, 17], [18, 19], [24, 25], [26, 27]])
    right, below = 4, 4 * 8
    assert np.array_equal(out, np.concatenate([quadrant, quadrant + right, quadrant + below, quadrant + below + right]))


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_matrices_multiply(run, dtype):
    x = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
    encoded = to_bfloat16(x) if dtype == "bfloat" else x.astype(np.float16)
    x = from_bfloat16(encoded) if dtype == "bfloat" else encoded.astype(np.float32)
    y = run("matrix_product_" + dtype, output((8, 8), np.float32), Buffer(encoded, "x"))
    np.testing.assert_allclose(y, x[:, :8] @ x[:, 8:16] + x[:, :8].T, rtol=1e-5, atol=1e-5)


def test_simd_functions(run):
    out = run("simd_functions", output((9, 32), np.int32))
    value = np.arange(1, 33)
    assert (out[0] == value.sum()).all() and (out[1] == 3201).all()
    assert np.array_equal(out[2], value.cumsum()) and np.array_equal(out[3], value.cumsum() - value)
    assert (out[4] == 8).all() and (out[6] == 32).all() and (out[7] == 5).all()
    assert np.array_equal(out[5], (np.arange(32) ^ 5) + 1)
    assert np.array_equal(out[8][:30], value[2:])


def test_extremes_of_negative_numbers(run):
    x = np.arange(-40, -8).astype(np.float16)
    out = run("half_extremes", output((2, 32), np.float16), Buffer(x, "x"))
    assert (out[0] == -9).all() and (out[1] == -40).all()


@pytest.mark.parametrize("has_second", [True, False])
def test_float_extremes_leave_nan_out_and_a_buffer_may_be_missing(run, has_second):
    x, z = np.random.default_rng(2).standard_normal((2, 32, 4)).astype(np.float32)
    x[3, 1] = z[5, 2] = x[7, 0] = z[7, 0] = np.nan
    buffers = [Buffer(x, "x")] + ([Buffer(z, "z")] if has_second else [])
    out = run("float_extremes", output((3, 32, 4), np.float32), *buffers, constant=int(has_second))
    other = z if has_second else np.zeros_like(z)
    np.testing.assert_array_equal(out[0], np.fmax(x, other))
    np.testing.assert_array_equal(out[1], np.fmin(x, other))
    np.testing.assert_allclose(out[2], x.astype(np.float64) * other + 1, rtol=1e-6, atol=1e-6)


def test_subnormals_are_flushed_in_float_and_kept_in_half(run):
    smallest = np.finfo(np.float32).tiny
    x = np.ones((32, 2), np.float32)
    x[:5] = [(smallest, 1), (smallest, 0.5), (smallest / 2, 1), (smallest / 2, 4), (2**-14, 0.5)]
    y, z = run("products", output(32, np.float32), Buffer(x, "x"), Buffer(np.empty(32, np.float16), "z", "output"))
    assert y[:5].tolist() == [smallest, 0, 0, 0, 2**-15] and (y[5:] == 1).all()
    assert z[4] == 2**-15 and (z[5:] == 1).all()
    assert smallest * np.float32(0.5) > 0  # the launch leaves the thread as it was


def test_positions_and_function_constants(run):
    out = run("positions", output((3, 64), np.int32), groups=3, threads=64, constant=7)
    thread = np.arange(64)
    assert np.array_equal(out, 1000 * np.arange(3)[:, None] + 10 * thread + thread // 32 + 7)


def test_vectors_and_swizzles(run):
    x = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float16)
    v = x.astype(np.float32)[:, [1, 0, 2, 3]]
    v = 2 * v - np.stack([v[:, 2], v[:, 3], np.ones(32), np.full(32, 0.5)], 1).astype(np.float32)
    y = run("vectors", output((32, 4), np.float32), Buffer(x, "x"))
    np.testing.assert_array_equal(y, v / np.float32(0.5) + np.maximum(v, 0))


def test_atomics(run):
    out = run("counters", Buffer(np.zeros(2, np.int32), "y", "update"), groups=3, threads=64)
    assert out.tolist() == [192, 191]


def test_unknown_kernel_is_an_error(bench):
    with pytest.raises(KernelError, match="no Metal kernel is named absent"):
        launch(bench, "intrinsics.metal", "absent", output(1, np.float32))


def launch_demanding(bench, *, constant="uint", threads=32, bound=True):
    library = bench.load(KERNELS / "faults.metal", KERNELS / "metal_entry.cpp", toolchain.METAL_PIPELINE, checked=False)
    y = Buffer(X[:threads], "y", "output")
    return bench.call(library.run_demanding, constant.encode(), 3, threads, y if bound else None)


def test_launch_that_metal_accepts(bench):
    assert np.array_equal(launch_demanding(bench), 3 * X[:32])


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"constant": ""}, "function constant 1, kStep, has no value"),
        ({"constant": "bool"}, "function constant 1, kStep, is uint, got bool"),
        ({"constant": "int"}, "function constant 1, kStep, is uint, got int"),
        ({"constant": "float"}, "function constant 1, kStep, is uint, got float"),
        ({"threads": 33}, "33 threads in a threadgroup, where the kernel allows 32"),
        ({"bound": False}, "buffer 0 is not bound"),
    ],
    ids=["no_constant", "bool_for_uint", "int_for_uint", "float_for_uint", "too_many_threads", "unbound_buffer"],
)
def test_launch_that_metal_refuses(bench, fault, message):
    launch_demanding(bench)  # whose constant must not serve the next launch
    with pytest.raises(KernelError, match="bad-launch of demanding: " + message):
        launch_demanding(bench, **fault)


def test_kernel_needs_the_constants_that_it_and_what_it_calls_name():
    text = "".join(f"constant bool k{name} [[function_constant({i})]];\n" for i, name in enumerate("ABCDE"))
    text += "namespace n {\ntemplate <typename T> inline T deep(T x) { return kA ? x : T(0); }\n"
    text += "struct Pair { int second() const { if (kB) return deep(1); return 0; } };\n}\n"
    text += "inline int other() { return kC ? 1 : 0; }\n"
    text += "kernel void f(device int* y [[buffer(0)]], device int* z [[buffer(1), function_constant(kD)]]) "
    text += "{ n::Pair pair; y[0] = pair.second(); }\n"
    text += "kernel void g(device int* y [[buffer(0)]]) { y[0] = other(); }\n"
    kernels = shader.parse("needs.metal", text).kernels
    assert [name for name, _ in kernels["f"].constants] == ["kA", "kB", "kD"]
    assert kernels["g"].constants == [("kC", "2")]


def test_prepass_keeps_lines_and_names_a_bare_parameter():
    text = "#include <metal_stdlib>\n\n#define ONE 1\n"
    text += "kernel void f(device int* y [[buffer(0)]],\n  uint i) { y[i] = ONE; }\n"
    with pytest.raises(ValueError, match=r"bare\.metal:4: parameter without attribute in f: uint i"):
        prepass.translate("bare.metal", text)
    fixed = prepass.translate("bare.metal", text.replace("uint i", "uint i [[thread_position_in_grid]]"))
    lines = fixed.splitlines()
    start = max(n for n, line in enumerate(lines) if re.match(r"#line \d+ \"bare.metal\"", line))
    number = int(lines[start].split()[1])
    assert "y[i] = 1;" in lines[start + 1 + 5 - number]


def test_prepass_expands_the_macros_of_headers(tmp_path):
    (tmp_path / "instances.h").write_text(
        "#pragma once\n#include <metal_stdlib>\n#ifdef __METAL_VERSION__\n"
        "#define INSTANCE(T) template [[host_name(#T)]] [[kernel]] decltype(f<T>) f<T>;\n#endif\n"
    )
    text = '#include "instances.h"\ntemplate <typename T>\n'
    text += "[[kernel]] void f(device T* y [[buffer(0)]]) { y[0] = T(1); }\nINSTANCE(float)\n"
    shader_path = tmp_path / "instances.metal"
    shader_path.write_text(text)
    (instance,) = shader.parse(shader_path, include=[tmp_path]).instances
    assert (instance.host_name, instance.arguments, instance.line) == ("float", "float", 4)


@pytest.mark.parametrize("declaration", ["threadgroup float a[2], b[2];", "threadgroup int a = 0;"])
def test_prepass_refuses_threadgroup_variables_that_it_would_lose(declaration):
    text = "kernel void f(device int* y [[buffer(0)]]) {\n  " + declaration + "\n}\n"
    with pytest.raises(ValueError, match=r"threadgroup (float|int) a must be a statement with one variable"):
        prepass.translate("lost.metal", text)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [1, 33, 256, 1027])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float16_gamma_float32", "bfloat16_gamma_float32"])
def test_rms_norm_matches_numpy(bench, name, width, order):
    from test_example_rms_norm import EPSILON, assert_rounded_once, decode, encode, reference

    dtype, gamma_dtype = name.split("_")[0], name.split("_")[-1]
    rng = np.random.default_rng(width)
    x, gamma = encode(rng.standard_normal((3, width)), dtype), encode(rng.standard_normal(width), gamma_dtype)
    sources = (KERNELS / "example_rms_norm.metal", KERNELS / "example_rms_norm_metal.cpp")
    launcher = bench.load(*sources, toolchain.METAL_PIPELINE).run_rms_norm
    buffers = (Buffer(x, "x"), Buffer(gamma, "gamma"), Buffer(np.empty_like(x), "y", "output"))
    y = bench.call(launcher, 3, width, EPSILON, f"rms_norm_{name}".encode(), *buffers, order=order)
    assert_rounded_once(decode(y, dtype), reference(decode(x, dtype), decode(gamma, gamma_dtype)), dtype)
