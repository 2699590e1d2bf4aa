"""Builds kernels for the bench and calls them from numpy."""

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from devtools import cuda_toolkit, transactions
from simt import toolchain
from simt.metal import prepass

KERNELS = Path(__file__).parent / "kernels"
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
ACCESS = {"input": 0, "update": 1, "output": 2, "scratch": 3}
RED_ZONE = 4096  # bytes around each buffer that no kernel may change


@dataclass
class Buffer:
    """An argument in global memory. An output starts as NaN and is returned by Bench.call."""

    array: np.ndarray
    name: str
    access: str = "input"

    def __post_init__(self):
        array = self._initial = np.ascontiguousarray(self.array)
        self._raw = np.full(array.nbytes + 2 * RED_ZONE + 256, 0xFF, np.uint8)
        self._start = RED_ZONE + -(self._raw.ctypes.data + RED_ZONE) % 256
        self.array = self._raw[self._start : self._start + array.nbytes].view(array.dtype).reshape(array.shape)

    def reset(self):
        self._raw[:] = 0xFF
        if self.access in ("input", "update"):
            self.array[...] = self._initial

    @property
    def pointer(self):
        return ctypes.c_void_p(self._raw.ctypes.data + self._start)

    def red_zone_is_intact(self):
        end = self._start + self.array.nbytes
        return bool((self._raw[: self._start] == 0xFF).all() and (self._raw[end:] == 0xFF).all())


class KernelError(AssertionError):
    """What the engine reports, with the parts of its first line: kind, file and line."""

    def __init__(self, message):
        super().__init__(message)
        head = re.match(r"(?P<kind>[\w-]+) at (?P<file>[^:]*):(?P<line>\d+)", message)
        self.kind, self.file, self.line = (head["kind"], head["file"], int(head["line"])) if head else (None, None, 0)


def compile_command(source, output, *, checked, shader=False):
    """What compiles one .cu, launcher or, after the pre-pass, shader for the bench."""
    flags = [*toolchain.KERNEL, *(toolchain.CHECKED if checked else toolchain.FAST)]
    flags += toolchain.SHADER if shader else cuda_toolkit.include_flags()
    return [toolchain.COMPILER, *flags, "-x", "c++", "-c", str(source), "-o", str(output)]


def link_command(objects, library, engine):
    """What links kernels to the engine."""
    flags = toolchain.engine_link_flags(engine)
    return [toolchain.COMPILER, "-shared", *map(str, objects), *flags, "-o", str(library)]


class Bench:
    """The engine, and a folder of built kernels that a newer source replaces."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.engine_path = self.folder / "libsimt.so"
        sources, libraries = map(str, toolchain.ENGINE_SOURCES), toolchain.ENGINE_LIBRARIES
        self._build(
            [toolchain.COMPILER, *toolchain.ENGINE, "-shared", *sources, "-o", str(self.engine_path), *libraries]
        )
        self._libraries = {}
        self.engine = self.load(KERNELS / "engine.cpp", checked=False)
        self.tracer = transactions.Tracer(self.engine_path)
        number = ctypes.c_int64
        self.engine.simt_set_order.argtypes = [number]
        self.engine.simt_register_buffer.argtypes = [ctypes.c_void_p, number, ctypes.c_char_p, number]
        for function in ("set_order", "register_buffer", "check_outputs", "clear_buffers"):
            getattr(self.engine, f"simt_{function}").restype = ctypes.c_char_p

    @staticmethod
    def _build(command):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, " ".join(map(str, command)) + "\n" + done.stderr

    def load(self, *sources, checked=True):
        """The shared library of these sources: .cu, .cpp and .metal files."""
        if cuda_toolkit.cuda_home() is None and any(Path(source).suffix == ".cu" for source in sources):
            pytest.skip(cuda_toolkit.NO_CUDA)
        key = (sources, checked)
        if key not in self._libraries:
            stem = "_".join([Path(sources[0]).name, "checked" if checked else "fast"])
            objects = []
            for source in map(Path, sources):
                shader = source.suffix == ".metal"
                objects.append(self.folder / f"{stem}_{source.name}.o")
                if shader:
                    translated = objects[-1].with_suffix(".cpp")
                    translated.write_text(prepass.translate(source))
                    source = translated
                command = compile_command(source, objects[-1], checked=checked, shader=shader)
                self._build(command)
            library = self.folder / f"{stem}.so"
            self._build(link_command(objects, library, self.engine_path))
            self._libraries[key] = ctypes.CDLL(str(library))
        return self._libraries[key]

    def call(self, function, *args, order="forward"):
        """Calls a launcher that returns an error text or null. Returns the arrays that it may write."""
        buffers = [arg for arg in args if isinstance(arg, Buffer)]
        self.engine.simt_clear_buffers()
        self.engine.simt_set_order(ORDERS[order])
        for buffer in buffers:
            buffer.reset()
            access = ACCESS[buffer.access]
            self.engine.simt_register_buffer(buffer.pointer, buffer.array.nbytes, buffer.name.encode(), access)
        function.restype = ctypes.c_char_p
        error = function(*(_to_c(arg) for arg in args)) or self.engine.simt_check_outputs()
        self.engine.simt_clear_buffers()
        if error:
            raise KernelError(error.decode())
        for buffer in buffers:
            assert buffer.red_zone_is_intact(), f"bytes around {buffer.name} were overwritten"
        written = [buffer.array.copy() for buffer in buffers if buffer.access != "input"]
        return written[0] if len(written) == 1 else written

    def trace(self, function, *args, block=0, warp=0):
        """Calls a launcher and returns the transactions of one warp, a transactions.Row for each instruction."""
        with self.tracer.trace(block, warp) as rows:
            self.call(function, *args)
        return rows


def _to_c(value):
    if isinstance(value, Buffer):
        return value.pointer
    if value is None or isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


def line_of(path, marker):
    """The number of the only line of a source that contains `marker`."""
    lines = [n for n, text in enumerate(Path(path).read_text().splitlines(), 1) if marker in text]
    assert len(lines) == 1, f"{marker} is on lines {lines} of {path}"
    return lines[0]


def to_bfloat16(x):
    """The bits of x rounded to bfloat16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
