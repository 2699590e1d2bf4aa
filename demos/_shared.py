"""What the demos share: loading the kernel, describing it, and timing two things side by side."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from kernels import LayerRepository, Mode, get_kernel, get_loaded_kernels, kernelize, use_kernel_mapping
from torch import nn

REPOSITORY = "rudnn/rudnn-normalization"
ATTENTION = "rudnn/rudnn-attention"


def load_kernel(repository: str = REPOSITORY) -> ModuleType:
    """Loads a kernel as an application does, and prints what was loaded."""
    # The publisher is not among the organisations that the kernels library trusts by itself.
    kernel = get_kernel(repository, version=1, trust_remote_code=True)
    loaded = next(loaded for loaded in get_loaded_kernels() if loaded.module is kernel)
    variant = loaded.repo_info.revision if loaded.repo_info else "local build"
    print(f"kernel     {repository} version {loaded.metadata.version}, id {loaded.metadata.id} ({variant})")
    print(f"backend    {loaded.metadata.backend.backend_type}, instruction set {kernel._ops.ops.cpu_isa()}")
    return kernel


def peak_growth(call: Callable[[], object]) -> int | None:
    """Returns by how many bytes a call raises the peak of the process's resident memory; None where nothing tells.

    What earlier calls have freed goes back to the system first, as far as the allocator lets it.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        reset.write_text("5")
    except OSError:
        return None
    before = _peak(status.read_text())
    call()
    return _peak(status.read_text()) - before


def _peak(status: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def package_directory(name: str) -> Path:
    """Returns where an installed package's files are, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the demo's model is in the package {name}, which is not installed", name=name)
    return Path(spec.origin).parent


def put_in(kernel: ModuleType, model: nn.Module, layer_name: str) -> int:
    """Puts one of the kernel's layers into a model and returns how many modules it now runs in."""
    # By revision: with a version, the kernels library asks the Hub even for a local build.
    repository = LayerRepository(REPOSITORY, layer_name=layer_name, revision="main", trust_remote_code=True)
    # Silences the warning for each of the model's other layers, which have no kernel in this mapping.
    logging.getLogger("kernels").setLevel(logging.ERROR)
    with use_kernel_mapping({layer_name: {"cpu": repository}}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
    forward = getattr(kernel.layers, layer_name).forward
    return sum(getattr(module.forward, "__func__", None) is forward for module in model.modules())


def median_seconds(
    calls: Mapping[str, Callable[..., object]], argument: object, rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Times calls with an argument in turn, so that drift reaches all of them, and returns their median seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats):
                call(argument)
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}
