"""Times a kernel against its peers so that the numbers can be compared.

A family's `benchmarks/suite.py` defines `cases(kernel, quick, device) -> Iterable[Case]`. Cases are measured one by one
as they are generated, so a suite need not hold all its tensors at once.

On the CPU time is the wall clock's. On a CUDA device it is what the device's events tell of each call, with the L2
cache flushed before it; calls so small that starting them is what costs are timed by the wall clock, the device
synchronised before and after.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

OURS = "rudnn"

Clock = Callable[[Callable[[], object], int], float]
"""Runs a call a number of times and returns the seconds that all of them took."""


@dataclass(frozen=True)
class Case:
    """One operator on one shape, with those it is compared to."""

    op: str
    shape: str
    """As the table shows it, such as `4096 x 576`."""
    dtype: torch.dtype
    ours: Callable[[], object]
    """Runs the kernel once, outputs allocated as its callers would have it."""
    peers: Mapping[str, Callable[[], object]]
    """Does the same work in other ways, by name: PyTorch eager, torch.compile, Transformers."""
    check: Callable[[], bool]
    """Whether the kernel is right on this very input; no number is given if it is not."""
    direction: str = "forward"
    """`forward` or `forward+backward`."""
    device: str = "cpu"
    """The device type of the tensors: `cpu` or `cuda`."""
    threads: int = 1
    """Of PyTorch's pool; no matter on another device than the CPU."""
    bytes: int = 0
    """What must move between memory and the device: each input read and each output written once."""
    flops: int = 0
    """Floating-point operations of the matrix products; leave 0 where memory is all that counts."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    sample_seconds: float
    """The least time of one sample; faster calls are repeated to fill it.

    A core takes milliseconds to recover from what ran before: after a large matrix product even a sum over memory takes
    half as long again. Contenders that are compared need longer samples than that; `QUICK` has not.
    """
    case_seconds: float
    """About what one case may take; slow calls get fewer rounds, but never fewer than five."""


QUICK = Effort(rounds=11, sample_seconds=5e-4, case_seconds=0.5)
THOROUGH = Effort(rounds=61, sample_seconds=1e-2, case_seconds=1.5)

_LEAST_ROUNDS = 5
_WARM_UP_CALLS = 3
_WARM_UP_SECONDS = 0.05

_START_BOUND_BYTES = 1 << 20
"""A call that moves less takes a GPU less time than starting it."""
_MATMUL_SIZES = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Result:
    """What a case measured: seconds of one call in each round, by contender."""

    case: Case
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    """Empty if the kernel was wrong."""
    failure: str = ""
    """What the kernel raised, if it did."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a peer could not run, by its name."""
    copy_bytes_per_second: float = 0.0
    """The ceiling of the bytes; 0 where the case counts none."""
    matmul_flops_per_second: float = 0.0
    """The ceiling of the operations, in the case's dtype; 0 where the case counts none."""

    @property
    def correct(self) -> bool:
        """Whether the kernel passed its check."""
        return bool(self.seconds)

    @property
    def median(self) -> float:
        """The kernel's median time of a call, in seconds."""
        return statistics.median(self.seconds[OURS])

    @property
    def spread(self) -> float:
        """The distance between the quartiles of the kernel's times, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds[OURS], n=4)
        return (high - low) / self.median

    @property
    def rate(self) -> str:
        """GFLOP/s where the case counts operations, else GB/s."""
        if self.case.flops:
            return f"{self.case.flops / self.median / 1e9:.1f} GFLOP/s"
        return f"{self.case.bytes / self.median / 1e9:.1f} GB/s"

    @property
    def share(self) -> float:
        """The least time that the measured ceilings allow, over the time that it took."""
        moving = self.case.bytes / self.copy_bytes_per_second if self.case.bytes else 0.0
        computing = self.case.flops / self.matmul_flops_per_second if self.case.flops else 0.0
        return max(moving, computing) / self.median

    @property
    def ratios(self) -> dict[str, float]:
        """How many times faster the kernel is than each peer: the median over rounds, so that drift cancels."""
        ours = self.seconds[OURS]
        return {
            name: statistics.median(theirs / own for theirs, own in zip(times, ours, strict=True))
            for name, times in self.seconds.items()
            if name != OURS
        }


def measure(case: Case, effort: Effort) -> Result:
    """Checks the kernel, then times it and its peers by turns in this process.

    A kernel that is wrong or raises gets no number, and a peer that cannot run here is left out.
    """
    with _threads(case.threads):
        try:
            if not case.check():
                return Result(_without_tensors(case))
            case.ours()
            synchronize(case.device)
        except Exception as error:
            return Result(_without_tensors(case), failure=_first_line(error))
        left_out = {name: reason for name, call in case.peers.items() if (reason := _why_not(call, case.device))}
        peers = {name: call for name, call in case.peers.items() if name not in left_out}
        if case.device != "cpu":
            # Its clock times each call on its own.
            effort = dataclasses.replace(effort, sample_seconds=min(effort.sample_seconds, 2e-3))
        seconds = alternate({OURS: case.ours, **peers}, effort, clock(case.device, case.bytes))
    # Rounded up to a power of two, so that cases of about one size share a measurement.
    copied = 1 << (max(case.bytes // 2, 1) - 1).bit_length()
    return Result(
        _without_tensors(case),
        seconds,
        left_out=left_out,
        copy_bytes_per_second=copy_ceiling(copied, case.threads, case.device) if case.bytes else 0.0,
        matmul_flops_per_second=matmul_ceiling(case.dtype, case.threads, case.device) if case.flops else 0.0,
    )


def _why_not(call: Callable[[], object], device: str) -> str:
    """Returns why a peer cannot run, or nothing."""
    try:
        call()
        synchronize(device)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _without_tensors(case: Case) -> Case:
    """Returns a case for the report, without the functions that keep its tensors alive."""
    return dataclasses.replace(case, ours=_measured, peers={}, check=lambda: True)


def _measured() -> None:
    raise RuntimeError("this case has been measured; its tensors are gone")


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets the number of PyTorch's threads, and at the end sets it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clock(device: str, size: int) -> Clock:
    """Returns what times calls on a device that move about `size` bytes."""
    if device == "cpu":
        return _wall_clock
    return _synchronized_clock if size < _START_BOUND_BYTES else _device_clock


def _wall_clock(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def _synchronized_clock(call: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _device_clock(call: Callable[[], object], count: int) -> float:
    """Lets the device time each call on its own; the flush gives the CPU time to run ahead."""
    flush = _larger_than_cache()
    events = [(_event(), _event()) for _ in range(count)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    milliseconds: float = sum(begin.elapsed_time(end) for begin, end in events)
    return milliseconds / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def _larger_than_cache() -> torch.Tensor:
    cached: int = torch.cuda.get_device_properties().L2_cache_size
    return torch.empty(max(4 * cached, 1 << 28), dtype=torch.uint8, device="cuda")


def synchronize(device: str) -> None:
    """Waits until a device has done all its work, and raises what went wrong in it."""
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(
    contenders: Mapping[str, Callable[[], object]], effort: Effort, timed: Clock = _wall_clock
) -> dict[str, list[float]]:
    """Returns the seconds per call of each contender, sampled in turn: A B C, C B A, ...

    So none always follows the same other, whose memory and caches it gets. The garbage collector stays off meanwhile.
    Every sample repeats its call often enough to be longer than the clock's and the loop's own cost.
    """
    repeats = {name: _warm_up(call, effort.sample_seconds, timed) for name, call in contenders.items()}
    one_round = sum(count * seconds for count, seconds in repeats.values())
    rounds = max(_LEAST_ROUNDS, min(effort.rounds, int(effort.case_seconds / one_round)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            for name, call in list(contenders.items())[:: -1 if round_number % 2 else 1]:
                count = repeats[name][0]
                samples[name].append(timed(call, count) / count)
    finally:
        if collecting:
            gc.enable()
    return samples


def _warm_up(call: Callable[[], object], sample_seconds: float, timed: Clock) -> tuple[int, float]:
    """Returns how many calls make a sample, and about how long one takes."""
    timed(call, 1)  # may compile
    seconds = timed(call, 1)
    calls, start = 2, time.perf_counter()
    # A call this long has nothing more to warm up.
    while seconds < _WARM_UP_SECONDS and (calls < _WARM_UP_CALLS or time.perf_counter() - start < _WARM_UP_SECONDS):
        seconds = min(seconds, timed(call, 1))
        calls += 1
    return max(1, round(sample_seconds / seconds)), seconds


@cache
def copy_ceiling(size: int, threads: int, device: str = "cpu") -> float:
    """Returns the bytes per second, read and written together, at which PyTorch copies a fresh tensor of that size."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    with _threads(threads):
        times = alternate({"copy": source.clone}, QUICK, clock(device, 2 * size))["copy"]
    return 2 * size / statistics.median(times)


@cache
def matmul_ceiling(dtype: torch.dtype, threads: int, device: str = "cpu") -> float:
    """Returns the floating-point operations per second of PyTorch's product of two large square matrices."""
    size = _MATMUL_SIZES[device]
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    with _threads(threads):
        moved = 3 * left.nbytes
        times = alternate({"product": lambda: left @ right}, QUICK, clock(device, moved))["product"]
    return 2 * size**3 / statistics.median(times)
