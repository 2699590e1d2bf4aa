"""Translates a Metal shader to C++ for the bench: python -m simt.metal.prepass shader.metal shader.cpp [include ...].

Attributes become the arguments of each kernel, which the code below the shader calls.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from simt.metal import shader as shaders

HERE = Path(__file__).resolve().parent
BUFFER = r"\[\[\s*buffer\s*\(\s*(\w+)\s*\)\s*(?:,\s*function_constant\s*\(\s*(\w+)\s*\)\s*)?\]\]"
MEMORY = {"buffer": "buffer", "threadgroup": "threadgroup_memory"}  # functions of simt::metal::Bindings


def _argument(shader: shaders.Shader, kernel: shaders.Kernel, parameter: str) -> str:
    attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*[,\]]", parameter)
    if not attribute:
        raise ValueError(f"{shader.path}:{kernel.line}: parameter without attribute in {kernel.name}: {parameter}")
    if attribute[1] in MEMORY:
        return f"bindings.{MEMORY[attribute[1]]}({attribute[2]})"
    return f"simt::metal::attributes::{attribute[1]}()"


def _buffers(kernel: shaders.Kernel) -> str:
    """Returns a simt::metal::Buffer for each of a kernel's buffers: its index, and what says whether it is there."""
    attributes = (re.search(BUFFER, parameter) for parameter in kernel.parameters)
    return ", ".join(f"{{{found[1]}, {'&' + found[2] if found[2] else 'nullptr'}}}" for found in attributes if found)


def translate(path: str | Path, text: str | None = None, include: Sequence[Path] = ()) -> str:
    """Returns C++ source that registers the shader's kernels when it is loaded; the arguments are those of parse."""
    shader = shaders.parse(path, text, include)
    lines = [shader.text, f'#line 1 "{HERE}/kernel table"']
    for instance in shader.instances:
        function = instance.kernel + (f"<{instance.arguments}>" if instance.arguments else "")
        kernel = shader.kernels[instance.kernel]
        arguments = ", ".join(_argument(shader, kernel, parameter) for parameter in kernel.parameters)
        constants = ", ".join(
            f'simt::metal::constant_at({index}, "{name}", {name})' for name, index in kernel.constants
        )
        name = instance.host_name
        lines += [
            f'static const bool {name}_is_registered = simt::metal::register_kernel("{name}",',
            f"{{[](const simt::metal::Bindings& bindings) {{ simt::metal::run(&{function}, bindings,",
            f"[bindings] {{ {function}({arguments}); }}); }},",
            f"{kernel.most_threads or 'simt::metal::kMostThreads'}, {{{constants}}}, {{{_buffers(kernel)}}}}});",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(translate(sys.argv[1], include=[Path(folder) for folder in sys.argv[3:]]))
