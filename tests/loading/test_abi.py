"""What the built libraries need of the system they are loaded on."""

import re
import shutil
import subprocess

import kernel_abi_check
from fresh_process import by_family, variant_of

NEEDED = re.compile(r"lib(torch|torch_cpu|c10|c|m|pthread|dl|rt|gcc_s|stdc\+\+)\.so(\.\d+)?|ld-linux-[\w-]+\.so\.\d")


def library_of(family):
    (library,) = variant_of(family).glob("*.so")
    return library


@by_family
def test_l7_abi(family):
    """vllm-project/vllm#41103: symbols newer than the promised floor."""
    library = library_of(family)
    assert library.name.endswith(".abi3.so")
    checked = kernel_abi_check.ObjectFile(str(library))
    assert not checked.check_manylinux("manylinux_2_28")
    assert not checked.check_python_abi("3.9")


@by_family
def test_l7_needed_libraries(family):
    """Dao-AILab/flash-attention#1644: a library that is not part of PyTorch or the system."""
    assert shutil.which("readelf"), "readelf (binutils) comes with the compiler that built the library"
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(library_of(family))], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert [name for name in needed if not NEEDED.fullmatch(name)] == []
    assert "libtorch.so" in needed
    assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic)


@by_family
def test_only_the_module_is_exported(family):
    """Two kernels in one process must not take each other's functions."""
    symbols = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library_of(family))], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    exported = {line.split()[-1].split("@")[0] for line in symbols}
    assert exported == {f"PyInit_{library_of(family).name.split('.')[0]}"}
