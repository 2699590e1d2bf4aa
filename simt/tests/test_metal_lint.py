"""The Metal lint accepts the project's shaders and finds seeded errors in one of them."""

import pytest
from bench import KERNELS

from simt.metal import lint

RMS_NORM = KERNELS / "example_rms_norm.metal"
ANCHOR = "  float sum = 0.0f;\n"

# name: (text of the shader, what replaces it, part of the message)
ERRORS = {
    "threadgroup_as_device": (ANCHOR, ANCHOR + "device float* q = partial;\n", "cannot initialize"),
    "device_as_threadgroup": (ANCHOR, ANCHOR + "threadgroup float* q = (device float*)y;\n", "cannot initialize"),
    "cast_to_no_address_space": ("device T* out = y +", "device T* out = (T*)y +", "cannot initialize"),
    "pointer_without_address_space": (ANCHOR, ANCHOR + "const T* q = x; device const T* r = q;\n", "cannot initialize"),
    "constant_as_device": (ANCHOR, ANCHOR + "device const RmsNormArgs& a = args;\n", "address space"),
    "write_to_constant": (ANCHOR, ANCHOR + "args.width = 3;\n", "assign"),
    "write_to_const_device": (ANCHOR, ANCHOR + "gamma[0] = gamma[1];\n", "assign"),
    "double": (ANCHOR, ANCHOR + "double d = 1.0;\n", "double"),
    "new": (ANCHOR, ANCHOR + "int* a = new int[4];\n", "new"),
    "function_pointer": (ANCHOR, ANCHOR + "float (*f)(float) = 0;\n", "function"),
    "standard_library": (ANCHOR, ANCHOR + "int m = std::max(1, 2);\n", "std"),
    "unknown_function": ("value = simd_sum(value);", "value = simd_total(value);", "simd_total"),
    "mutable_global": ("using namespace metal;", "using namespace metal;\nfloat scale = 1.0f;", "address space"),
    "wrong_dtype_of_a_vector": (ANCHOR, ANCHOR + "float4 v = half4(half(0.0f));\n", "no viable conversion"),
    "missing_argument": (
        "partial, lane, simdgroup, simdgroups);\n\n  float scale",
        "partial, lane);\n\n  float scale",
        "no matching",
    ),
}

needs_clang = pytest.mark.skipif(lint.compiler() is None, reason="clang-19 was not found")


@needs_clang
@pytest.mark.parametrize(
    "shader", [RMS_NORM, KERNELS / "intrinsics.metal", KERNELS / "faults.metal"], ids=lambda p: p.stem
)
def test_right_shaders_are_accepted(shader):
    assert lint.lint(shader) == []


@needs_clang
@pytest.mark.parametrize("name", ERRORS)
def test_seeded_error_is_found(name):
    old, new, message = ERRORS[name]
    text = RMS_NORM.read_text()
    assert text.count(old) == 1
    seeded = text.replace(old, new)
    messages = lint.lint(RMS_NORM, seeded)
    assert any(message in m and f"{RMS_NORM}:" in m for m in messages), messages
