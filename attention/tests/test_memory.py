"""The flash strategies keep no matrix of the scores, in either direction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import load_kernel, only_on_the_cpu
from operations import strategies

pytestmark = pytest.mark.isa_independent

LENGTH = 8192

CHILD = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from operations import CAUSAL, DTYPES, PLAIN, Shape, gradients, load_kernel, random_gradient

dtype, strategy = DTYPES[sys.argv[2]], sys.argv[3]
kernel = load_kernel()


def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def growth(call):
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is that of what follows
    before = peak()
    return call(), peak() - before


def run(variant, length):
    inputs = variant.inputs(Shape(1, 1, 1, length, length, 16, 16), dtype, requires_grad=True)
    (output, _), forward = growth(lambda: variant.run(kernel, inputs, strategy))
    grad = random_gradient(output)
    _, backward = growth(lambda: gradients(output, inputs, grad))
    return forward, backward


for variant in (PLAIN, CAUSAL):
    run(variant, 128)
print(json.dumps([run(variant, int(sys.argv[4])) for variant in (PLAIN, CAUSAL)]))
"""


def growth_of_the_peak(dtype: str, strategy: str) -> list[list[int]]:
    """The bytes by which a fresh process's peak grows in the forward and in the backward, plain and causal."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), dtype, strategy, str(LENGTH)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


by_flash_strategy = pytest.mark.parametrize(
    "dtype, strategy",
    [
        pytest.param(case.id.split("_")[0], case.values[1], id=case.id)
        for case in strategies()
        if case.values[1] != "fallback"
    ],
)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@by_flash_strategy
def test_memory_grows_by_less_than_a_bit_for_each_score(device, dtype, strategy):
    only_on_the_cpu(device, "the peak is the process's")
    load_kernel()  # whose place the child finds in the environment
    for forward, backward in growth_of_the_peak(dtype, strategy):
        assert forward < LENGTH * LENGTH / 8
        assert backward < LENGTH * LENGTH / 8


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_measure_finds_a_matrix(device):
    only_on_the_cpu(device, "the peak is the process's")
    load_kernel()
    (forward, _), _ = growth_of_the_peak("bf16", "fallback")
    assert forward > LENGTH * LENGTH
