"""Checks a Metal shader as C++ for OpenCL, whose address spaces are Metal's.

clang reports what the host compiler of the bench cannot see: pointers that change or lack their address space, writes
to constants, types and library functions that shaders do not have. Nothing is run.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from simt.metal import shader as shaders

HERE = Path(__file__).resolve().parent
# No double, half, no variables in device memory at program scope.
FLAGS = "--target=spir64 -x cl -cl-std=clc++2021 -cl-no-stdinc -ffreestanding -fsyntax-only -fno-color-diagnostics"
FLAGS += " -Xclang -cl-ext=-cl_khr_fp64,-__opencl_c_fp64,+cl_khr_fp16"
FLAGS += ",-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue"
FLAGS += " -Wall -Wno-unused -Wno-pedantic-core-features -Wno-unknown-pragmas -D__METAL_VERSION__=400"


def compiler() -> str | None:
    """Returns a clang that knows C++ for OpenCL, or None."""
    return shutil.which("clang-19")


def _explicit_instance(shader: shaders.Shader, instance: shaders.Instance) -> str:
    name = f"{instance.kernel}<{instance.arguments}>"
    return f'#line {instance.line} "{shader.path}"\ntemplate decltype({name}) {name};'


def lint(path: Path, text: str | None = None, include: Sequence[Path] = ()) -> list[str]:
    """Returns the messages of `compiler()`, which must be there, about a shader; none if it is right.

    Args:
        path: The shader.
        text: What to read instead of the file.
        include: Directories of its headers, besides the repository.
    """
    shader = shaders.parse(path, text, include)
    instances = [_explicit_instance(shader, i) for i in shader.instances if i.arguments]
    folders = [f"-I{folder}" for folder in (HERE / "lint", HERE.parent.parent, *include)]
    source = "\n".join([shader.text, *instances]) + "\n"
    command = [compiler() or "clang-19", *FLAGS.split(), *folders, "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    messages = [line for line in done.stderr.splitlines() if re.search(r": (fatal )?(error|warning): ", line)]
    if done.returncode and not messages:
        raise RuntimeError(f"{command[0]} could not check {path}: {done.stderr}")
    return messages
