"""Times a kernel against its peers so that the numbers can be compared.

A family's `benchmarks/suite.py` defines `cases(kernel, quick) -> Iterable[Case]`. Cases are measured one by one as
they are generated, so a suite need not hold all its tensors at once.
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
    threads: int = 1
    bytes: int = 0
    """What must move between memory and the CPU: each input read and each output written once."""
    flops: int = 0
    """Floating-point operations of the matrix products; leave 0 where memory is all that counts."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    sample_seconds: float
    """The least time of one sample; faster calls are repeated to fill it."""
    case_seconds: float
    """About what one case may take; slow calls get fewer rounds, but never fewer than five."""


QUICK = Effort(rounds=11, sample_seconds=5e-4, case_seconds=0.5)
THOROUGH = Effort(rounds=61, sample_seconds=2e-3, case_seconds=0.6)

_LEAST_ROUNDS = 5
_WARM_UP_CALLS = 3
_WARM_UP_SECONDS = 0.05


@dataclass(frozen=True)
class Result:
    """What a case measured: seconds of one call in each round, by contender."""

    case: Case
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    """Empty if the kernel was wrong."""
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
    """Checks the kernel, then times it and its peers by turns in this process."""
    with _threads(case.threads):
        if not case.check():
            return Result(_without_tensors(case))
        seconds = alternate({OURS: case.ours, **case.peers}, effort)
    # Rounded up to a power of two, so that cases of about one size share a measurement.
    copied = 1 << (max(case.bytes // 2, 1) - 1).bit_length()
    return Result(
        _without_tensors(case),
        seconds,
        copy_ceiling(copied, case.threads) if case.bytes else 0.0,
        matmul_ceiling(case.dtype, case.threads) if case.flops else 0.0,
    )


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


def alternate(contenders: Mapping[str, Callable[[], object]], effort: Effort) -> dict[str, list[float]]:
    """Returns the seconds per call of each contender, sampled in turn: A B C, A B C, ...

    The garbage collector stays off meanwhile. Every sample repeats its call often enough to be longer than the
    clock's and the loop's own cost.
    """
    repeats = {name: _warm_up(call, effort.sample_seconds) for name, call in contenders.items()}
    one_round = sum(count * seconds for count, seconds in repeats.values())
    rounds = max(_LEAST_ROUNDS, min(effort.rounds, int(effort.case_seconds / one_round)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in contenders.items():
                count = repeats[name][0]
                samples[name].append(_timed(call, count) / count)
    finally:
        if collecting:
            gc.enable()
    return samples


def _warm_up(call: Callable[[], object], sample_seconds: float) -> tuple[int, float]:
    """Returns how many calls make a sample, and about how long one takes."""
    _timed(call, 1)  # may compile
    seconds = _timed(call, 1)
    calls, start = 2, time.perf_counter()
    # A call this long has nothing more to warm up.
    while seconds < _WARM_UP_SECONDS and (calls < _WARM_UP_CALLS or time.perf_counter() - start < _WARM_UP_SECONDS):
        seconds = min(seconds, _timed(call, 1))
        calls += 1
    return max(1, round(sample_seconds / seconds)), seconds


def _timed(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


@cache
def copy_ceiling(size: int, threads: int) -> float:
    """Returns the bytes per second, read and written together, at which PyTorch copies a fresh tensor of that size."""
    source = torch.ones(size, dtype=torch.uint8)
    with _threads(threads):
        times = alternate({"copy": source.clone}, QUICK)["copy"]
    return 2 * size / statistics.median(times)


@cache
def matmul_ceiling(dtype: torch.dtype, threads: int) -> float:
    """Returns the floating-point operations per second of PyTorch's matrix product of two 2048 x 2048 matrices."""
    size = 2048
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    with _threads(threads):
        times = alternate({"product": lambda: left @ right}, QUICK)["product"]
    return 2 * size**3 / statistics.median(times)
