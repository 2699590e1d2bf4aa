"""RUDNN_CPU_ISA caps the instruction set, and a build uses no wider one elsewhere."""

import platform
import re
import subprocess
from pathlib import Path

import pytest
from fresh_process import FAMILIES, by_family, check_call, get_kernel, local_kernels, run_python

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs run the generic code")

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")


def cpu_level() -> int:
    """The highest of LEVELS that this CPU has."""
    flags = set(re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    needs = [
        set(),
        {"avx2", "fma", "f16c"},
        {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        {"avx512_bf16"},
        {"amx_bf16"},
    ]
    level = 0
    while level + 1 < len(LEVELS) and needs[level + 1] <= flags:
        level += 1
    return level


@pytest.mark.parametrize("cap", [None, *LEVELS])
def test_l6_cap(tmp_path, cap):
    """vllm-project/vllm#4542: an illegal instruction on a plain CPU. Every family, at the level reported."""
    code = "".join(f"{get_kernel(family)}{check_call(family)}print(kernel._ops.ops.cpu_isa())\n" for family in FAMILIES)
    variables = {} if cap is None else {"RUDNN_CPU_ISA": cap}
    levels = run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(*FAMILIES), **variables).split()
    highest = min(cpu_level(), len(LEVELS) - 1 if cap is None else LEVELS.index(cap))
    for level in levels:
        # A family may have nothing to gain from the levels above avx512.
        assert min(highest, LEVELS.index("avx512")) <= LEVELS.index(level) <= highest


@by_family
@pytest.mark.parametrize("value", ["avx3", "AVX2"])
def test_an_unknown_level_is_an_error(tmp_path, family, value):
    code = f"try:\n    {get_kernel(family)}    {check_call(family)}except Exception as error:\n    print(error)\n"
    message = run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(family), RUDNN_CPU_ISA=value)
    assert "RUDNN_CPU_ISA" in message
    assert value in message
    assert "avx512" in message, "the message must name the levels there are"


def test_attention_says_what_keeps_it_from_matrix_units(tmp_path):
    """The variable, where it is set: the machine may have some."""
    attention = next(family for family in FAMILIES if family.name == "attention")
    code = get_kernel(attention) + (
        "rows = torch.ones(1, 1, 2, 16, dtype=torch.bfloat16)\n"
        "try:\n    kernel.attention(rows, rows, rows, strategy='flash_accelerated')\n"
        "except kernel.AttentionSetupError as error:\n    print(error)\n"
    )
    message = run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(attention), RUDNN_CPU_ISA="generic")
    assert "the instruction set in use, generic, has no matrix units (RUDNN_CPU_ISA is generic), got " in message


@by_family
def test_the_level_is_read_once(tmp_path, family):
    code = get_kernel(family) + (
        "import os\n"
        "before = kernel._ops.ops.cpu_isa()\n"
        "os.environ['RUDNN_CPU_ISA'] = 'generic'\n"
        "assert kernel._ops.ops.cpu_isa() == before\n"
    )
    run_python(tmp_path, code, LOCAL_KERNELS=local_kernels(family))


@by_family
def test_l6_no_wider_instruction_outside_the_chosen_functions(family):
    """Functions outside the namespaces avx2, avx512 and amx use what every x86-64 CPU has.

    The symbols of a build's own objects are looked at, since the published library has only the exported ones.
    """
    objects = sorted((family.parent / ".cache" / "objects" / "cpu" / family.name).rglob("*.o"))
    assert objects
    for path in objects:
        listing = subprocess.run(
            ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for function in re.split(r"\n\n(?=[0-9a-f]+ <)", listing):
            name = function.split("\n", 1)[0]
            if re.match(r"[0-9a-f]+ <", name) and not re.search(r"\b(avx2|avx512\w*|amx)::", name):
                wide = re.search(r"\tv[a-z0-9]+ .*%[xyz]mm|%[yz]mm\d|%k[1-7]|%tmm\d", function)
                assert wide is None, f"{path.name}: {name} uses {wide[0]}"
