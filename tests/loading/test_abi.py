"""What the built libraries need of the system they are loaded on, and what they show of themselves."""

import re
import subprocess

import pytest
from fresh_process import by_family, variant_of

from devtools import abi


def library_of(family):
    (library,) = variant_of(family).glob("*.so")
    return library


def needed_by(library):
    """The names of the symbols that a library takes from others."""
    return {line.split()[-1].split("@")[0] for line in lines_of("nm", "--dynamic", "--undefined-only", library)}


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


# Of the C library, and of the C++ one as they are mangled.
REACHES_OUT = re.compile(
    r"(f?open|openat|creat|freopen|mkostemp|mkstemp|tmpfile|shm_open)(64)?"
    r"|rename(at)?|unlink(at)?|mkdir(at)?|(sym)?link(at)?"
    r"|socket|socketpair|connect|bind|listen|send|sendto|sendmsg|getaddrinfo|gethostbyname"
    r"|system|popen|v?fork|clone|exec[lv][pe]*|posix_spawnp?|dlm?open"
    r"|_Z.*(basic_filebuf|basic_[io]?fstream|10filesystem).*"
)


@by_family
def test_the_library_cannot_open_files_connections_or_processes(family):
    """Python's audit events, on which the guard of the other tests rests, tell nothing of what native code does."""
    needed = needed_by(library_of(family))
    assert "memcpy" in needed
    assert [name for name in sorted(needed) if REACHES_OUT.fullmatch(name)] == []


@pytest.mark.parametrize(
    "code",
    [
        'std::ofstream("file")',
        'fopen("file", "w")',
        'open("file", O_WRONLY)',
        'system("true")',
        "fork()",
        "socket(AF_INET, SOCK_STREAM, 0)",
        'execl("/bin/true", "true", nullptr)',
    ],
)
def test_such_symbols_are_found(tmp_path, code):
    headers = ("fstream", "cstdio", "cstdlib", "fcntl.h", "unistd.h", "sys/socket.h")
    includes = "".join(f"#include <{header}>\n" for header in headers)
    library = tmp_path / "library.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=f"{includes}void run() {{ (void){code}; }}\n", text=True, check=True)
    assert any(map(REACHES_OUT.fullmatch, needed_by(library)))
