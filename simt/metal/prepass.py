"""Translates a Metal shader to C++ for the bench: python -m simt.metal.prepass shader.metal shader.cpp.

Attributes become a table of parameters for each kernel, and static threadgroup variables the engine's shared memory.
"""

import re
import sys
from pathlib import Path

from simt.metal import shader as shaders


def _parameter_table(shader: shaders.Shader, kernel: shaders.Kernel) -> str:
    """Returns the initialisers of simt::metal::Parameter for a kernel."""
    rows = []
    for text in kernel.parameters:
        attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*[,\]]", text)
        if not attribute:
            raise ValueError(f"{shader.path}:{kernel.line}: parameter without attribute in {kernel.name}: {text}")
        kind = {"buffer": "buffer", "threadgroup": "threadgroup_memory"}.get(attribute[1], "value")
        position = f"simt::metal::attributes::{attribute[1]}" if kind == "value" else "nullptr"
        rows.append(f"{{simt::metal::Parameter::{kind}, {attribute[2] or 0}, {position}}}")
    return ", ".join(rows)


def translate(path: str | Path, text: str | None = None) -> str:
    """Returns C++ source that registers the shader's kernels when it is loaded."""
    shader = shaders.parse(path, text)
    body = shaders.replace_threadgroup_variables(
        shader, lambda type, name, sizes: f"SIMT_STATIC_SHARED {type} {name}{sizes};"
    )
    for name, _ in shader.constants:  # of this file alone, as in Metal
        body = re.sub(rf"\bconstant(\s+\w+\s+{name}\s*;)", r"static constant\1", body)
    constants = ", ".join(f"{{{index}, &{name}, sizeof {name}}}" for name, index in shader.constants)
    lines = [body, '#line 1 "kernel table"']
    for instance in shader.instances:
        function = instance.kernel + (f"<{instance.arguments}>" if instance.arguments else "")
        table = _parameter_table(shader, shader.kernels[instance.kernel])
        name, parameters = instance.host_name, f"{instance.host_name}_parameters"
        lines.append(
            f"static const simt::metal::Parameter {parameters}[] = {{{table}}};\n"
            f'static const bool {name}_is_registered = simt::metal::register_kernel("{name}",'
            f" {{[](const simt::metal::Bindings& bindings) {{"
            f" simt::metal::run(&{function}, {parameters}, bindings); }}, {{{constants}}}}});"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(translate(sys.argv[1]))
