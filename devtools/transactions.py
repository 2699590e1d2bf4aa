"""Memory transactions of a warp, from the accesses that the engine recorded: what a GPU would move for each line."""

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype(
    [(name, "u8") for name in ("pc", "address")] + [(n, "u4") for n in ("bytes", "lane", "kind", "padding")]
)
Access = tuple[int, int]  # address and size
KINDS = ["global load", "global store", "shared load", "shared store"]


@dataclass
class Row:
    """One instruction. Global memory: 32-byte sectors. Shared memory: passes of the 32 banks of 4 bytes."""

    line: str
    kind: str
    requests: int = 0  # executions by the warp
    moved: int = 0  # sectors or passes
    ideal: int = 0  # as few as the bytes allow


def _sectors(accesses: Sequence[Access]) -> tuple[int, int]:
    touched = {byte for address, size in accesses for byte in range(address, address + size)}
    return len({byte // 32 for byte in touched}), -(-len(touched) // 32)


def _bank_passes(accesses: Sequence[Access]) -> tuple[int, int]:
    """The lanes of a pass ask for 128 bytes together; two words of one bank need two passes."""
    lanes = max(1, 128 // accesses[0][1])
    phases = [accesses[i : i + lanes] for i in range(0, len(accesses), lanes)]
    passes = 0
    for phase in phases:
        words = {word for address, size in phase for word in range(address // 4, (address + size - 1) // 4 + 1)}
        passes += max(Counter(word % 32 for word in words).values())
    return passes, len(phases)


def summarise(records: NDArray[np.void], line_of: Callable[[int], str]) -> list[Row]:
    """Returns a Row for each instruction, in the order of its address. `line_of` turns a pc into file:line."""
    executed: Counter[tuple[int, int, int]] = Counter()
    requests: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for pc, address, size, lane, kind, _ in records.tolist():
        requests[pc, kind, executed[pc, kind, lane]].append((lane, address, size))
        executed[pc, kind, lane] += 1
    rows: dict[tuple[int, int], Row] = {}
    for (pc, kind, _), lanes in sorted(requests.items()):
        row = rows.setdefault((pc, kind), Row(line_of(pc), KINDS[kind]))
        accesses = [(address, size) for _, address, size in sorted(lanes)]
        moved, ideal = (_sectors if kind < 2 else _bank_passes)(accesses)
        row.requests, row.moved, row.ideal = row.requests + 1, row.moved + moved, row.ideal + ideal
    return list(rows.values())


class Tracer:
    """The engine of a library that is loaded in this process: the engine itself or kernels that link it."""

    def __init__(self, library: str | Path) -> None:
        """Finds the functions of simt/engine/trace.cpp."""
        self._engine = ctypes.CDLL(str(library))
        self._engine.simt_start_trace.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._engine.simt_stop_trace.restype = ctypes.c_int64
        self._engine.simt_line_of.argtypes = [ctypes.c_uint64]
        self._engine.simt_line_of.restype = ctypes.c_char_p

    @contextmanager
    def trace(self, block: int = 0, warp: int = 0) -> Iterator[list[Row]]:
        """Traces one warp of every launch of a checked build; the list is filled when the context ends."""
        rows: list[Row] = []
        self._engine.simt_start_trace(block, warp)
        try:
            yield rows
        finally:
            start = ctypes.c_void_p()
            count = self._engine.simt_stop_trace(ctypes.byref(start))
        records = np.frombuffer(ctypes.string_at(start, count * RECORD.itemsize), RECORD)
        rows += summarise(records, lambda pc: self._engine.simt_line_of(pc).decode())
