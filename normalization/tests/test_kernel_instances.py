"""The widths that the tests name by their path are enough: they launch every instance that row plans can choose."""

import ctypes
import re
import struct
import subprocess
from bisect import bisect_right
from pathlib import Path

import pytest
from operations import (
    BF16,
    F16,
    F32,
    GPU_WIDTHS,
    LAYER_NORM,
    RMS_NORM,
    RMS_NORM_GATED,
    SOFTMAX_LAST_AXIS,
    gradients,
    random_gradients,
)

INSTANCE = re.compile(r"void (?:rudnn::)?(\w+<[^()]*\bRowShape<[^()]*>)\((?:rudnn::)?\w+Args\b[^{]*\)")


class Symbols:
    """The functions of a library that this process has loaded."""

    def __init__(self, library: Path) -> None:
        table = subprocess.run(["nm", "-nC", library], capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^([0-9a-f]+) [tTwW] (.+)$", table, re.M)
        self._starts, self._names = [int(start, 16) for start, _ in lines], [name for _, name in lines]
        maps = re.findall(rf"^([0-9a-f]+)-\S+ .* {re.escape(str(library))}$", Path("/proc/self/maps").read_text(), re.M)
        self._base = int(maps[0], 16)
        self.records_accesses = " U __tsan_read4\n" in table

    def instances(self) -> set[str]:
        """The kernels that are templates of a RowShape."""
        return {match[1] for match in map(INSTANCE.fullmatch, self._names) if match}

    def function_before(self, return_address: int) -> str:
        """The function that holds the call before an address."""
        return self._names[bisect_right(self._starts, return_address - 1 - self._base) - 1]


@pytest.mark.simt_checked
def test_named_widths_launch_every_instance(kernel, device):
    (library,) = Path(kernel.__file__).resolve().parent.glob("*.so")
    symbols = Symbols(library)
    if not symbols.records_accesses:
        pytest.skip("only a checked build for the SIMT bench tells which functions ran")
    engine = ctypes.CDLL(str(library))
    engine.simt_start_trace.argtypes = [ctypes.c_int64, ctypes.c_int64]
    engine.simt_stop_trace.restype = ctypes.c_int64
    record = struct.Struct("Q24x")  # begins with the return address of an access
    called = set()
    for operation in (RMS_NORM, RMS_NORM_GATED, LAYER_NORM, SOFTMAX_LAST_AXIS):
        for dtype in (F32, F16, BF16):
            engine.simt_start_trace(0, 0)
            for width in GPU_WIDTHS:
                inputs = operation.inputs((1, width), dtype, device=device, requires_grad=True)
                outputs = operation.run(kernel, inputs)
                gradients(outputs, inputs, random_gradients(outputs))
            records = ctypes.c_void_p()
            count = engine.simt_stop_trace(ctypes.byref(records))
            addresses = set(record.iter_unpack(ctypes.string_at(records, count * record.size)))
            called |= {symbols.function_before(address) for (address,) in addresses}

    instances = symbols.instances()
    assert {name.partition("<")[0] for name in instances} >= {"rms_norm", "layer_norm_backward", "softmax_last_axis"}
    assert sorted(name for name in instances if not any(f"{name}(" in function for function in called)) == []
