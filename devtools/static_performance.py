"""What can be said about a CUDA kernel's speed without a GPU, and whether it became worse.

The compiler tells registers, spills and memory of every kernel; the SIMT bench tells what the accesses of a warp would
move. Both are kept in a table beside the family's benchmarks, with which `compare` finds regressions.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from devtools.transactions import KINDS, Row

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture: registers of a thread, and bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Accesses of one kind by one warp: what they move, in sectors of global or passes of shared memory."""

    requests: int
    moved: int
    ideal: int
    """As few as the bytes allow."""

    @property
    def per_request(self) -> float:
        """What a request moves on average."""
        return self.moved / self.requests


@dataclass
class Table:
    """The figures of a family."""

    compiler: str = ""
    """The nvcc that made them; another one may take other registers."""
    kernels: dict[str, dict[str, Resources]] = field(default_factory=dict)
    """By kernel and architecture."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a kernel may spill."""
    instructions: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kernel, how often its PTX has each instruction that it is meant to have."""
    accesses: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    """By case and kind of access."""


def parse_ptxas(text: str) -> dict[tuple[str, str], Resources]:
    """Returns what `ptxas -v` printed, by mangled name and architecture."""
    found = {}
    for entry in re.split(r"(?=ptxas info\s*: Compiling entry function)", text):
        head, stack, registers = _ENTRY.search(entry), _STACK.search(entry), _REGISTERS.search(entry)
        if not (head and stack and registers):
            continue
        shared = _SHARED.search(entry)
        frame, stores, loads = map(int, stack.groups())
        found[head["name"], head["arch"]] = Resources(
            int(registers[1]), stores + loads, int(shared[1]) if shared else 0, frame
        )
    return found


def readable(names: Iterable[str]) -> dict[str, str]:
    """Returns the kernels' names in C++, without namespaces and parameters, by mangled name."""
    mangled = sorted(set(names))
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return {name: _shortened(text) for name, text in zip(mangled, done.stdout.splitlines(), strict=True)}


def _shortened(name: str) -> str:
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "").replace("rudnn::", "")
    name = re.sub(r"\([\w ]+\)(?=-?\d)", "", name)  # the types of template arguments: "(bool)1"
    return re.sub(r"\(.*\)$", "", name).replace(" >", ">")


def kernels_of(texts: Iterable[str]) -> dict[str, dict[str, Resources]]:
    """Returns the resources in the compiler's output for several sources, by readable name and architecture."""
    found: dict[tuple[str, str], Resources] = {}
    for text in texts:
        found |= parse_ptxas(text)
    names = readable(name for name, _ in found)
    kernels: dict[str, dict[str, Resources]] = {}
    for (name, architecture), resources in sorted(found.items(), key=lambda item: (names[item[0][0]], item[0][1])):
        kernels.setdefault(names[name], {})[architecture] = resources
    return kernels


def instructions_of(ptx: Iterable[str], wanted: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
    """Returns how often instructions are in the kernels of several sources, by readable name.

    Args:
        ptx: What the sources were compiled to.
        wanted: The instructions that a kernel is meant to have, by a part of its readable name.
    """
    bodies = {
        name: body for text in ptx for name, body in re.findall(r"\.entry (\w+)(.*?)^}", text, re.DOTALL | re.MULTILINE)
    }
    found = {}
    for name, kernel in sorted(readable(bodies).items(), key=lambda item: item[1]):
        meant = [instruction for part, each in wanted.items() if part in kernel for instruction in each]
        if meant:
            found[kernel] = {instruction: bodies[name].count(instruction) for instruction in meant}
    return found


def traffic_of(rows: Iterable[Row]) -> dict[str, Traffic]:
    """Returns the sums over all instructions of a trace, by kind of access."""
    rows = list(rows)
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    return {kind: _sum(row for row in rows if row.kind == kind) for kind in kinds}


def _sum(rows: Iterable[Row]) -> Traffic:
    rows = list(rows)
    return Traffic(*(sum(getattr(row, name) for row in rows) for name in ("requests", "moved", "ideal")))


def compare(table: Table, measured: Table) -> Iterator[str]:
    """Yields what is worse than in the table or missing on one side, and every spill without a reason."""
    yield from _differences("kernel", table.kernels, measured.kernels)
    yield from _differences("case", table.accesses, measured.accesses)
    for kernel, architectures in measured.kernels.items():
        for architecture, now in architectures.items():
            where = f"{kernel} on {architecture}"
            if now.spill_bytes and kernel not in table.reasons:
                yield f"{where} spills {now.spill_bytes} bytes, and the table gives no reason"
            before = table.kernels.get(kernel, {}).get(architecture)
            if before is None:
                continue
            for name, value in asdict(now).items():
                allowed = getattr(before, name)
                if value > allowed:
                    yield f"{where}: {name.replace('_', ' ')} rose from {allowed} to {value}"
    for kernel, instructions in measured.instructions.items():
        yield from (f"{kernel} has no {instruction}" for instruction, count in instructions.items() if not count)
    for case, kinds in measured.accesses.items():
        for kind, traffic in kinds.items():
            known = table.accesses.get(case, {}).get(kind)
            if known is None and case in table.accesses:
                yield f"{case}: {kind} is not in the table"
            elif known is not None and traffic.moved * known.requests > known.moved * traffic.requests:
                yield (
                    f"{case}: a {kind} moves {traffic.per_request:.2f} {_unit(kind)}, "
                    f"{known.per_request:.2f} in the table"
                )


def _differences(what: str, table: Mapping[str, object], measured: Mapping[str, object]) -> Iterator[str]:
    yield from (f"{what} {name} is not in the table" for name in measured if name not in table)
    yield from (f"{what} {name} is in the table but exists no longer" for name in table if name not in measured)


def _unit(kind: str) -> str:
    return "sectors" if kind.startswith("global") else "passes"


def load(path: Path) -> Table:
    """Reads a table; one that does not exist is empty."""
    if not path.is_file():
        return Table()
    content = json.loads(path.read_text())
    kernels = {
        name: {architecture: Resources(**numbers) for architecture, numbers in entry["architectures"].items()}
        for name, entry in content["kernels"].items()
    }
    reasons = {name: entry["reason"] for name, entry in content["kernels"].items() if "reason" in entry}
    instructions = {
        name: entry["instructions"] for name, entry in content["kernels"].items() if "instructions" in entry
    }
    accesses = {
        case: {kind: Traffic(**numbers) for kind, numbers in kinds.items()}
        for case, kinds in content["accesses"].items()
    }
    return Table(content["compiler"], kernels, reasons, instructions, accesses)


def save(path: Path, table: Table) -> None:
    """Writes a table as JSON, which `load` reads, with a line for each kernel and case."""
    kernels: dict[str, dict[str, object]] = {}
    for name, architectures in table.kernels.items():
        kernels[name] = {"architectures": {arch: asdict(numbers) for arch, numbers in architectures.items()}}
        if name in table.reasons:
            kernels[name]["reason"] = table.reasons[name]
        if name in table.instructions:
            kernels[name]["instructions"] = table.instructions[name]
    accesses = {case: {kind: asdict(t) for kind, t in kinds.items()} for case, kinds in table.accesses.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = [f'"compiler": {json.dumps(table.compiler)}']
    for title, entries in (("kernels", kernels), ("accesses", accesses)):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        sections.append(f'"{title}": {{\n{lines}\n }}')
    path.write_text("{\n " + ",\n ".join(sections) + "\n}\n")


def markdown(title: str, table: Table) -> str:
    """Returns a table as Markdown for people."""
    architectures = sorted({arch for entry in table.kernels.values() for arch in entry})
    head = ["kernel", *(f"{arch}: {what}" for arch in architectures for what in ("registers", "spills", "shared"))]
    rows = [[f"`{name}`", *_cells(entry, architectures)] for name, entry in table.kernels.items()]
    if table.reasons:
        head.append("reason")
        rows = [[*row, table.reasons.get(name, "")] for row, name in zip(rows, table.kernels, strict=True)]
    lines = [
        f"# Static performance of {title}",
        "",
        f"Written by `./dev perf-static --save` with {table.compiler}; no GPU takes part. `./dev perf-static --check`",
        "fails where a number rises.",
        "",
        "## Resources",
        "",
        "Registers of a thread, bytes spilled to local memory and back, bytes of static shared memory of a block.",
        "",
        *_grid(head, rows),
        "",
        *_instruction_lines(table),
        "## Memory accesses",
        "",
        "What the first warp of the grid moves with one request: 32-byte sectors of global memory, passes over the 32",
        "banks of shared memory. In parentheses the least that its bytes allow.",
        "",
        *_grid(
            ["case", *KINDS],
            [[case, *(_per_request(kinds.get(kind)) for kind in KINDS)] for case, kinds in table.accesses.items()],
        ),
    ]
    return "\n".join(lines) + "\n"


def _instruction_lines(table: Table) -> list[str]:
    names = sorted({name for counts in table.instructions.values() for name in counts})
    if not names:
        return []
    rows = [
        [f"`{kernel}`", *(str(counts.get(name, "")) for name in names)] for kernel, counts in table.instructions.items()
    ]
    return [
        "## Instructions",
        "",
        "How often the PTX of a kernel has the instructions that it is meant to have.",
        "",
        *_grid(["kernel", *(f"`{name}`" for name in names)], rows),
        "",
    ]


def _cells(entry: Mapping[str, Resources], architectures: Iterable[str]) -> Iterator[str]:
    for architecture in architectures:
        numbers = entry.get(architecture)
        if numbers is None:
            yield from ("", "", "")
        else:
            yield from map(str, (numbers.registers, numbers.spill_bytes, numbers.shared_bytes))


def _per_request(traffic: Traffic | None) -> str:
    if traffic is None:
        return ""
    return f"{traffic.per_request:.2f} ({traffic.ideal / traffic.requests:.2f})"


def _grid(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
