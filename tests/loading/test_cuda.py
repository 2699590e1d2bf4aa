"""A CUDA build on a machine without CUDA: everything but the kernels themselves."""

import re
import subprocess
import textwrap

import pytest
from fresh_process import by_family, run_python, variant_of

from devtools import abi
from devtools.families import load

# Nothing of libtorch_cuda is there, so its functions must not be looked up before they are called.
IMPORT_LAZILY = """
import importlib.util, os, sys

def import_variant(path):
    sys.setdlopenflags(os.RTLD_LAZY)
    metadata = kernels._rust.Metadata.read_from_file(path / "metadata.json")
    spec = importlib.util.spec_from_file_location(metadata.id, path / "__init__.py")
    module = sys.modules[metadata.id] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def schemas(kernel):
    namespace = kernel._ops.ops.name + "::"
    registered = map(str, torch._C._jit_get_all_schemas())
    return sorted(text.removeprefix(namespace) for text in registered if text.startswith(namespace))

def names(kernel):
    return [kernel._ops.add_op_namespace_prefix(text.split("(")[0]) for text in schemas(kernel)]
"""

# A call of each family, with the fake tensors' `device` to be filled in, as code that fails if the result is wrong.
FAKE_CALL = {
    "attention": (
        "query = torch.empty(1, 4, 3, 16, dtype=torch.bfloat16, device=device)\n"
        "key = value = torch.empty(1, 2, 5, 16, dtype=torch.bfloat16, device=device)\n"
        "output = kernel.attention(query, key, value, strategy='flash_unit')\n"
        "assert (output.shape, output.dtype, output.device) == (query.shape, query.dtype, query.device)\n"
    ),
    "moe": (
        "logits = torch.empty(2, 8, dtype=torch.bfloat16, device=device)\n"
        "plan = kernel.route(logits, kernel.RoutingOptions(4, True))\n"
        "assert (plan.weights.shape, plan.weights.dtype) == ((2, 4), logits.dtype)\n"
        "assert plan.weights.device == plan.expert_indices.device == logits.device\n"
    ),
    "normalization": (
        "x = torch.empty(2, 40, dtype=torch.bfloat16, device=device)\n"
        "y = kernel.rms_norm(x, torch.empty(40, device=device), 1e-6)\n"
        "assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)\n"
    ),
}

# A call of each family with CPU tensors.
CPU_CALL = {
    "attention": "kernel.attention(*3 * [torch.ones(1, 1, 2, 8)], strategy='flash_unit')",
    "moe": "kernel.route(torch.ones(2, 8), kernel.RoutingOptions(4))",
    "normalization": "kernel.rms_norm(torch.ones(2, 40), torch.ones(40), 1e-6)",
}

# Operators that are of the CPU build only.
CPU_ONLY = ("cpu_isa",)

# Those of any build that take no tensor, and so have no device.
OF_NO_DEVICE = ("accelerated_dtypes", "tensor_core_dtypes")

# Those that are written in Python, for every device.
IN_PYTHON = ("append_to_cache", "attention_fallback", "attention_fallback_backward")


@pytest.fixture
def cuda_variant(family):
    """The family's one CUDA variant."""
    if "cuda" not in load(family).backends:
        pytest.skip(f"{family.name} has no CUDA sources")
    variants = list(family.glob("build/torch*-cu[0-9]*-*"))
    if not variants:
        pytest.skip("there is no CUDA build: ./dev build --backend cuda makes one where there is nvcc")
    (variant,) = variants
    return variant


def run_lazily(tmp_path, cuda_variant, code):
    load_it = f"kernel = import_variant(Path({str(cuda_variant)!r}))\n"
    return run_python(tmp_path, IMPORT_LAZILY + load_it + code)


@by_family
def test_the_library_keeps_the_abi_and_needs_libtorch(family, cuda_variant):
    (library,) = cuda_variant.glob("*.so")
    assert abi.violations(library, cuda=True) == []
    dynamic = subprocess.run(["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True)
    assert re.search(r"\(NEEDED\).*\[libtorch\.so\]", dynamic.stdout), "it loads libtorch_cuda in a CUDA build"
    assert re.search(r"\(NEEDED\).*\[libcudart\.so\.13\]", dynamic.stdout)
    assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)|BIND_NOW", dynamic.stdout)


@by_family
def test_the_schemas_are_those_of_the_cpu_build(tmp_path, family, cuda_variant):
    code = (
        f"kernels.get_local_kernel(Path({str(variant_of(family))!r}))\n"
        "cpu = kernels.get_loaded_kernels()[0].module\n"
        f"expected = [text for text in schemas(cpu) if text.split('(')[0] not in {CPU_ONLY!r}]\n"
        "assert expected and schemas(kernel) == expected, (schemas(kernel), expected)\n"
    )
    run_lazily(tmp_path, cuda_variant, code)


@by_family
def test_every_op_is_registered_for_cuda(tmp_path, family, cuda_variant):
    code = (
        "assert names(kernel)\n"
        f"for name in (name for name in names(kernel) if name.split('::')[1] not in {OF_NO_DEVICE + IN_PYTHON!r}):\n"
        "    has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "    assert has(name, 'CUDA'), f'{name} has no CUDA kernel'\n"
        "    assert not has(name, 'CPU'), f'{name} has a CPU kernel'\n"
    )
    run_lazily(tmp_path, cuda_variant, code)


@by_family
def test_fake_and_meta_calls_work(tmp_path, family, cuda_variant):
    call = FAKE_CALL[family.name]
    code = (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        f"    device = 'cuda'\n{textwrap.indent(call, '    ')}"
        f"device = 'meta'\n{call}"
    )
    run_lazily(tmp_path, cuda_variant, code)


@by_family
def test_cpu_tensors_are_refused(tmp_path, family, cuda_variant):
    code = f"try:\n    {CPU_CALL[family.name]}\nexcept ValueError as error:\n    print(error)\n"
    assert re.search(r"must be on cuda.*, got .* on cpu", run_lazily(tmp_path, cuda_variant, code))
