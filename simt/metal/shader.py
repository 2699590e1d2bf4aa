"""What the pre-pass and the lint read from a Metal shader: its kernels, their instances and function constants.

Macros of the shader and of the project's headers are expanded first, so an instance may be written by one; includes are
left alone. Line numbers survive every step.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ATTRIBUTE = r"\[\[(?:[^\[\]]|\[[^\]]*\])*\]\]"
KERNEL = rf"(?:{ATTRIBUTE}\s*)?(?:\[\[\s*kernel\s*(?:,[^\]]*)?\]\]|\bkernel\b)\s*void\s+(\w+)\s*\("
INSTANCE = (
    r'template\s*\[\[\s*host_name\(\s*"(?P<host>\w+)"\s*\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|\bkernel\b)\s*'
    r"(?:void|decltype\s*\([^;]*?>\s*\))\s+(?P<kernel>\w+)\s*<(?P<arguments>[^;]*?)>\s*(?:\([^;]*\))?\s*;"
)
MOST_THREADS = r"\bmax_total_threads_per_threadgroup\s*\(([^()]*)\)"
CONSTANT = r"\bconstant(\s+\w+\s+(\w+)\s*)\[\[\s*function_constant\(\s*(\w+)\s*\)\s*\]\]"
# A variable of threadgroup memory: a declaration that starts a statement and is no pointer or reference.
THREADGROUP = r"(^[ \t]*|[;{}]\s*)threadgroup(\s+)([\w:<>, ]+?)(\s+)(\w+)(\s*)"
THREADGROUP_VARIABLE = THREADGROUP + r"((?:\[[^\];]*\]\s*)*);"


@dataclass
class Kernel:
    """A function that can be launched."""

    name: str
    parameters: list[str]  # text of each
    line: int
    most_threads: str | None  # of a threadgroup, an expression
    constants: list[tuple[str, str]] = field(default_factory=list)  # name, index as written; those that its code names


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


def _expand_macros(path: str | Path, text: str, include: Sequence[Path]) -> str:
    """Returns the text with macros expanded, its own and those of "..." includes, without comments; includes stay."""
    text = re.sub(r"^([ \t]*#[ \t]*include\s*)<metal_\w+>", r"\1<metal_stdlib>", text, flags=re.M)  # has all parts
    hidden = re.sub(r"^[ \t]*#[ \t]*include\b", "#pragma simt_include", text, flags=re.M)
    folders = [HERE / "include", HERE.parent.parent, Path(path).parent, *include]
    command = ["g++", "-E", "-undef", "-nostdinc", "-x", "c++", "-D__METAL_VERSION__=400", "-DSIMT_MACROS_ALONE"]
    command += [f"-I{folder}" for folder in folders]
    for header in re.findall(r'^[ \t]*#[ \t]*include\s*"([^"]+)"', text, re.M):
        command += ["-imacros", header]
    command.append("-")
    done = subprocess.run(command, input=hidden, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{path}: {done.stderr}")
    own = done.stdout[done.stdout.index('\n# 1 "<stdin>"\n') :]  # pragmas and empty lines of the headers come first
    expanded = re.sub(r'^# ([1-9]\d*) "<stdin>".*$', rf'#line \1 "{path}"', own, flags=re.M)
    expanded = re.sub(r'^# \d+ "<.*$', "", expanded, flags=re.M)
    return expanded.replace("#pragma simt_include", "#include")


def _line_at(text: str, position: int) -> int:
    """Returns the line of the shader, by the last #line directive before a position of the expanded text."""
    directive = list(re.finditer(r"^#line (\d+).*\n", text[:position], re.M))[-1]
    return int(directive[1]) + text.count("\n", directive.end(), position)


def _words_by_definition(text: str) -> dict[str, set[str]]:
    """Returns the words of each function and type, by its name; a name's definitions count as one."""
    text = re.sub(r"^[ \t]*#.*|\bnamespace\s+\w*\s*\{", "", text, flags=re.M)
    words: dict[str, set[str]] = {}
    start = depth = 0
    for match in re.finditer(r"[{};]", text):
        depth = max(0, depth + (match[0] == "{") - (match[0] == "}"))
        if depth == 0:
            definition = text[start : match.end()]
            if name := re.search(r"(\w+)\s*[({;]", definition):
                words.setdefault(name[1], set()).update(re.findall(r"\w+", definition))
            start = match.end()
    return words


def _reachable(kernel: Kernel, words: dict[str, set[str]]) -> set[str]:
    """Returns the words of a kernel and of all that it names, whether or not that code is ever run."""
    found = {kernel.name, *re.findall(r"\w+", " ".join(kernel.parameters))}
    pending = list(found)
    while pending:
        added = words.get(pending.pop(), set()) - found
        found |= added
        pending += added
    return found


def parse(path: str | Path, text: str | None = None, include: Sequence[Path] = ()) -> Shader:
    """Reads a shader, from `text` if given; `path` names it in messages and #line directives.

    Args:
        path: The shader.
        text: What to read instead of the file.
        include: Directories of its headers, besides its own and the repository.
    """
    text = _expand_macros(path, Path(path).read_text() if text is None else text, include)
    shader = Shader(Path(path), text)
    for match in re.finditer(INSTANCE, text, re.S):
        line = _line_at(text, match.start())
        shader.instances.append(Instance(match["host"], match["kernel"], match["arguments"], line))
    text = re.sub(INSTANCE, _blank, text, flags=re.S)
    for match in re.finditer(KERNEL, text):
        name, line = match[1], _line_at(text, match.start())
        most_threads = re.search(MOST_THREADS, match[0])
        parameters = _parameters(text, match.end())
        shader.kernels[name] = Kernel(name, parameters, line, most_threads[1] if most_threads else None)
        if not re.search(r"template\s*<[^;{}]*>\s*$", text[: match.start()]):
            shader.instances.append(Instance(name, name, "", line))
    constants = [(name, index) for _, name, index in re.findall(CONSTANT, text)]
    text = re.sub(CONSTANT, r"SIMT_FUNCTION_CONSTANT\1", text)
    text = re.sub(THREADGROUP_VARIABLE, r"\1SIMT_THREADGROUP_VARIABLE(\5,\2\3\4\6\7);", text, flags=re.M)
    if left := re.search(THREADGROUP + r"[\[,=;]", text, re.M):
        found = f"threadgroup {left[3]} {left[5]}"
        raise ValueError(f"{path}: {found} must be a statement with one variable and no value")
    shader.text = re.sub(ATTRIBUTE, _blank, text)
    words = _words_by_definition(shader.text)
    for kernel in shader.kernels.values():
        named = _reachable(kernel, words)
        kernel.constants = [(name, index) for name, index in constants if name in named]
    return shader
