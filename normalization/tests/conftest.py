"""What the tests of every kernel family share: loading, devices, poison, layouts, the tolerance rule, refused input.

A family's `tests/conftest.py` is a copy of `common/conftest.py`; it finds the family from its own path. Helpers
are imported with `from conftest import ...`.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kernels
import pytest
import torch
import torch.utils.deterministic

FAMILY = Path(__file__).resolve().parents[1]
REPOSITORY = f"rudnn/rudnn-{FAMILY.name}"

THREAD_COUNTS = (1, 2, 3, 17)

MARKERS = {
    "small": "small shapes only: run under AddressSanitizer and on the SIMT bench",
    "simt_checked": "run on the SIMT bench with its checks of every access, in three orders; small too",
    "isa_independent": "the result does not depend on RUDNN_CPU_ISA: run once, not for every level",
    "kernels_ci": "the fast subset, under 60 seconds",
}


def pytest_configure(config):
    for name, description in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {description}")


@functools.cache
def load_kernel() -> ModuleType:
    """The family's kernel through `get_kernel`: the local build, unless LOCAL_KERNELS says otherwise."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPOSITORY}={FAMILY}")
    return kernels.get_kernel(REPOSITORY, version=1, trust_remote_code=True)


@pytest.fixture(scope="session")
def kernel() -> ModuleType:
    return load_kernel()


@pytest.fixture(scope="session")
def ops(kernel):
    """The registered ops, `torch.ops.<id>`."""
    return kernel._ops.ops


def served_devices() -> list[str]:
    """The device types that exist here and for which the loaded build has kernels."""
    kernel = load_kernel()
    exists = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ops = [name for name in names if name.startswith(f"{kernel._ops.ops.name}::")]
    served = frozenset().union(*map(kernel._checks.served_devices, ops))
    return [device for device, present in exists.items() if present and device in served]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", served_devices(), scope="session")


def only_on_the_cpu(device: str, reason: str) -> None:
    """Skips a test that says nothing about another device, where it would pass whatever the kernels do."""
    if device != "cpu":
        pytest.skip(f"of the CPU alone: {reason}")


def not_on_the_cpu(device: str) -> None:
    """Skips a test that needs a device with a memory of its own."""
    if device == "cpu":
        pytest.skip("needs a device beside the CPU")


def on_the_bench() -> bool:
    """Whether the loaded build runs the kernels of a GPU on the CPU; what is written in Python is tested elsewhere."""
    return "_simt_" in load_kernel()._ops.ops.name


def flushes_subnormals(device: str) -> bool:
    """Whether kernels take float32 magnitudes below 2^-126 for zero: on Apple's GPUs, and on the bench for Metal."""
    return device == "mps" or "_simt_metal_" in load_kernel()._ops.ops.name


def needs_free_memory(device: str, size: int) -> None:
    """Skips a test where a device does not have that many bytes free, or does not tell."""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    elif device == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        pytest.skip("this system does not tell how much memory is free")
    if free < size:
        pytest.skip(f"needs {size >> 30} GiB of free memory")


@pytest.fixture(autouse=True)
def working_gpu(request):
    """Ends the run with the test whose kernel broke the CUDA context, since after it every call fails."""
    yield
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{request.node.nodeid} broke the CUDA context: {error}", returncode=1)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of threads of PyTorch's pool, and at the end sets it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch):
    """Fills every fresh tensor with NaN (the largest value for integers), so that an element nobody wrote shows.

    `fill_uninitialized_memory` has an effect in deterministic mode only.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


GUARD = 67  # elements on each side; odd, so that the view is aligned to one element and no more


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger storage of NaN, at an odd offset: a read past the end shows."""
    storage = torch.full((tensor.numel() + 2 * GUARD,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = storage[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def guards_intact(view: torch.Tensor) -> bool:
    """Whether nothing was written around a tensor made by `poisoned`."""
    length = view.untyped_storage().nbytes() // view.element_size()
    storage = view.detach().as_strided((length,), (1,), 0)
    return bool(storage[:GUARD].isnan().all() and storage[-GUARD:].isnan().all())


LAYOUTS = ("transposed", "every_second", "row_strided", "offset", "expanded_rows", "expanded_columns")


def with_storage_of(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A copy whose storage has been cut to `size` bytes, as sharding and offloading do: it keeps its shape."""
    copy = tensor.detach().clone()
    copy.untyped_storage().resize_(size)
    return copy


WITHOUT_MEMORY = {
    "freed": lambda tensor: with_storage_of(tensor, 0),
    "one_byte_short": lambda tensor: with_storage_of(tensor, tensor.nbytes - 1),
}


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A view with the shape of `tensor` and the named layout; compare with the run on `view.contiguous()`.

    The values are those of `tensor`, except in the expanded layouts, which repeat its first row or column.
    """
    values = tensor.detach()
    *batch, width = values.shape
    if layout == "transposed":
        view = values.movedim(-1, 0).contiguous().movedim(0, -1)
    elif layout == "every_second":
        view = values.new_full((*batch, 2 * width), torch.nan)[..., ::2].copy_(values)
    elif layout == "row_strided":
        view = values.new_full((*batch, width + 3), torch.nan)[..., 1 : width + 1].copy_(values)
    elif layout == "offset":
        view = poisoned(values)
    elif layout == "expanded_rows":
        view = values[:1].clone().expand(values.shape)
    elif layout == "expanded_columns":
        view = values[..., :1].clone().expand(values.shape)
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return view.requires_grad_(tensor.requires_grad)


def assert_close_to_exact(out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor | None = None) -> None:
    """Asserts that `out` loses at most what PyTorch itself loses.

    exact: the result in float64.
    plain: the result as PyTorch or a model computes it from the same inputs; by default the exact result, rounded once.
    The largest error may be twice that of `plain`, plus `2 * eps(out.dtype) * max|exact|` for where `plain` is exact
    by luck. NaN and infinity must stand where the exact result, rounded to out's dtype, has them.
    """
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    assert exact.dtype == torch.float64, "the exact result must be float64"
    exact = exact.detach().cpu()
    rounded = exact.to(out.dtype)
    finite = rounded.isfinite()
    plain = rounded if plain is None else plain.detach().cpu()
    assert plain[finite].isfinite().all(), "plain is no yardstick here: it is not finite where the exact result is"
    out = out.detach().cpu()
    torch.testing.assert_close(
        out.where(~finite, 0),
        rounded.where(~finite, 0),
        equal_nan=True,
        rtol=0,
        atol=0,
        msg=lambda message: f"NaN or infinity in the wrong place: {message}",
    )
    if not finite.any():
        return
    plain_error = _errors(plain, exact, finite).max().item()
    floor = 2 * torch.finfo(out.dtype).eps * exact.where(finite, 0).abs().max().item()
    errors = _errors(out, exact, finite)
    worst = errors.argmax()
    index = tuple(i.item() for i in torch.unravel_index(worst, errors.shape))
    assert errors.max() <= 2 * plain_error + floor, (
        f"worst at {index}: got {out[index].item()!r}, exact {exact[index].item()!r}, "
        f"error {errors[index].item():.3e}; plain loses {plain_error:.3e}, floor {floor:.3e}"
    )


def _errors(result: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    return (result.double() - exact).abs().where(finite, 0)


def assert_bits_equal(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal dtype, shape and bits (so NaN equals NaN, and 0 is not -0)."""
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert torch.equal(out.contiguous().view(bits), expected.contiguous().view(bits)), "equal values, different bits"


def assert_refused(error: type[Exception], argument: str, function, *args, **kwargs) -> None:
    """Asserts that the call raises `error` with a message `<op>: <argument> <requirement>, got <what came>`."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"{function.__name__}: "), f"the message must begin with the op: {message}"
    assert re.search(rf"\b{argument}\b", message), f"the message must name {argument}: {message}"
    assert re.search(r"\bgot \S", message), f"the message must say what came: {message}"
