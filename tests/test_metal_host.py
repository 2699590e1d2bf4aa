"""The check of Metal's host code accepts the project's sources and finds seeded errors in them."""

import pytest

from devtools import metal_host
from devtools.families import discover
from simt.metal import lint

pytestmark = pytest.mark.skipif(lint.compiler() is None, reason="clang-19 was not found")

# name: (text of pipeline.mm, what replaces it, part of the message)
ERRORS = {
    "unknown_selector": ("[encoder setBytes:copy.data.data()", "[encoder setBytez:copy.data.data()", "setBytez"),
    "misspelt_property": ("error.localizedDescription", "error.localisedDescription", "localisedDescription"),
    "wrong_protocol": (
        "const id<MTLComputeCommandEncoder> encoder",
        "const id<MTLCommandBuffer> encoder",
        "MTLCommandBuffer",
    ),
    "pipeline_as_function": (
        "newComputePipelineStateWithFunction:function error",
        "newComputePipelineStateWithFunction:constants error",
        "MTLFunctionConstantValues",
    ),
    "size_as_number": ("threadsPerThreadgroup:native(threads)]", "threadsPerThreadgroup:volume(threads)]", "MTLSize"),
    "string_as_bytes": (
        "stringWithUTF8String:launch.kernel_.c_str()]",
        "stringWithUTF8String:launch.kernel_]",
        "std::string",
    ),
    "data_type_as_number": ("return MTLDataTypeBool;", "return 53;", "MTLDataType"),
    "unknown_stream_function": ("stream->commandEncoder()", "stream->computeEncoder()", "computeEncoder"),
    "untyped_buffer": ("(__bridge id<MTLBuffer>)binding.storage", "binding.storage", "MTLBuffer"),
}


def test_sources_are_accepted():
    assert list(metal_host.findings(discover())) == []


@pytest.mark.parametrize("name", ERRORS)
def test_seeded_error_is_found(name):
    old, new, message = ERRORS[name]
    text = metal_host.PIPELINE.read_text()
    assert text.count(old) == 1
    messages = metal_host.check(metal_host.PIPELINE, text.replace(old, new))
    assert any(message in m and f"{metal_host.PIPELINE}:" in m for m in messages), messages


def test_error_in_the_device_branch_of_a_launcher_is_found():
    family = next(family for family in discover() if family.title == "normalization")
    source = family.directory / "metal/softmax_last_axis.cpp"
    text = source.read_text().replace("metal::run_on_device(", "metal::run_on_gpu(")
    messages = metal_host.check(source, text, include=[family.directory])
    assert any("run_on_gpu" in m for m in messages), messages
