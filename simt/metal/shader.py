"""What the pre-pass and the lint read from a Metal shader: its kernels, their instances and function constants.

Macros of the shader itself are expanded first, so an instance may be written by one; includes are left alone. Line
numbers survive every step.
"""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ATTRIBUTE = r"\[\[(?:[^\[\]]|\[[^\]]*\])*\]\]"
KERNEL = r"(?:\[\[\s*kernel\s*(?:,[^\]]*)?\]\]|\bkernel\b)\s*void\s+(\w+)\s*\("
INSTANCE = (
    r'template\s*\[\[\s*host_name\(\s*"(?P<host>\w+)"\s*\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|\bkernel\b)\s*'
    r"(?:void|decltype\s*\([^;]*?>\s*\))\s+(?P<kernel>\w+)\s*<(?P<arguments>[^;]*?)>\s*(?:\([^;]*\))?\s*;"
)
CONSTANT = r"\bconstant(\s+\w+\s+(\w+)\s*)\[\[\s*function_constant\((\d+)\)\s*\]\]"
# A variable of threadgroup memory: a declaration that starts a statement and is no pointer or reference.
THREADGROUP = r"(^[ \t]*|[;{}]\s*)threadgroup(\s+)([\w:<>, ]+?)(\s+)(\w+)(\s*)"
THREADGROUP_VARIABLE = THREADGROUP + r"((?:\[[^\];]*\]\s*)*);"


@dataclass
class Kernel:
    """A function that can be launched."""

    name: str
    parameters: list[str]  # text of each
    line: int


@dataclass
class Instance:
    """A kernel with its template arguments, under the name that hosts use."""

    host_name: str
    kernel: str
    arguments: str  # of the template
    line: int


@dataclass
class Shader:
    """What a file holds."""

    path: Path
    text: str  # C++ but for address spaces and the macros SIMT_FUNCTION_CONSTANT and SIMT_THREADGROUP_VARIABLE
    kernels: dict[str, Kernel] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)
    constants: list[tuple[str, int]] = field(default_factory=list)  # name, index


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _parameters(text: str, start: int) -> list[str]:
    """Returns what stands in the brackets that open before `start`, split at the commas that no other bracket holds."""
    parts, depth = [""], 0
    for character in text[start:]:
        depth += (character in "([{<") - (character in ")]}>")
        if depth < 0:
            return [part.strip() for part in parts if part.strip()]
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    raise ValueError(f"no bracket closes ({text[start : start + 40]!r}")


def _expand_macros(path: str | Path, text: str) -> str:
    """Returns the text with its own macros expanded and comments removed, and its includes as they were."""
    text = re.sub(r"^([ \t]*#[ \t]*include\s*)<metal_\w+>", r"\1<metal_stdlib>", text, flags=re.M)  # has all parts
    hidden = re.sub(r"^[ \t]*#[ \t]*include\b", "#pragma simt_include", text, flags=re.M)
    command = ["g++", "-E", "-undef", "-nostdinc", "-x", "c++", "-D__METAL_VERSION__=400", "-"]
    done = subprocess.run(command, input=hidden, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{path}: {done.stderr}")
    expanded = re.sub(r'^# ([1-9]\d*) "<stdin>".*$', rf'#line \1 "{path}"', done.stdout, flags=re.M)
    expanded = re.sub(r'^# \d+ "<.*$', "", expanded, flags=re.M)
    return expanded.replace("#pragma simt_include", "#include")


def _line_at(text: str, position: int) -> int:
    """Returns the line of the shader, by the last #line directive before a position of the expanded text."""
    directive = list(re.finditer(r"^#line (\d+).*\n", text[:position], re.M))[-1]
    return int(directive[1]) + text.count("\n", directive.end(), position)


def parse(path: str | Path, text: str | None = None) -> Shader:
    """Reads a shader, from `text` if given; `path` names it in messages and #line directives."""
    text = _expand_macros(path, Path(path).read_text() if text is None else text)
    shader = Shader(Path(path), text)
    for match in re.finditer(INSTANCE, text, re.S):
        line = _line_at(text, match.start())
        shader.instances.append(Instance(match["host"], match["kernel"], match["arguments"], line))
    text = re.sub(INSTANCE, _blank, text, flags=re.S)
    for match in re.finditer(KERNEL, text):
        name, line = match[1], _line_at(text, match.start())
        shader.kernels[name] = Kernel(name, _parameters(text, match.end()), line)
        if not re.search(r"template\s*<[^;{}]*>\s*$", text[: match.start()]):
            shader.instances.append(Instance(name, name, "", line))
    shader.constants = [(name, int(index)) for _, name, index in re.findall(CONSTANT, text)]
    text = re.sub(CONSTANT, r"SIMT_FUNCTION_CONSTANT\1", text)
    text = re.sub(THREADGROUP_VARIABLE, r"\1SIMT_THREADGROUP_VARIABLE(\5,\2\3\4\6\7);", text, flags=re.M)
    if left := re.search(THREADGROUP + r"[\[,=;]", text, re.M):
        found = f"threadgroup {left[3]} {left[5]}"
        raise ValueError(f"{path}: {found} must be a statement with one variable and no value")
    shader.text = re.sub(ATTRIBUTE, _blank, text)
    return shader
