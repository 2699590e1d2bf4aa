"""What the built libraries need of the system they are loaded on, and what they show of themselves."""

import re
import subprocess

from fresh_process import by_family, variant_of

from devtools import abi


def library_of(family):
    (library,) = variant_of(family).glob("*.so")
    return library


def lines_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@by_family
def test_l7_abi(family):
    """vllm-project/vllm#41103, Dao-AILab/flash-attention#1644: newer symbols, or other libraries, than promised."""
    library = library_of(family)
    assert library.name.endswith(".abi3.so")
    assert abi.violations(library) == []


@by_family
def test_torch_stays_needed_and_no_path_is_built_in(family):
    dynamic = "\n".join(lines_of("readelf", "--dynamic", "--wide", library_of(family)))
    assert re.search(r"\(NEEDED\).*\[libtorch\.so\]", dynamic)
    assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic)


@by_family
def test_only_the_module_is_exported(family):
    """Two kernels in one process must not take each other's functions."""
    library = library_of(family)
    symbols = lines_of("nm", "--dynamic", "--defined-only", library)
    exported = {line.split()[-1].split("@")[0] for line in symbols}
    assert exported == {f"PyInit_{library.name.split('.')[0]}"}
