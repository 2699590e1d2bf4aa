"""The strategy `autotune`: what is measured, when, and where the winners are kept.

`RUDNN_AUTOTUNE`, read when the kernel is loaded, is `on` (the default), `off` or a file. With `off` nothing is measured
and the rule of `_strategies` decides. A file keeps the winners from process to process; where it cannot be read or
written, or holds something else, the call goes on without it and one warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ._autograd import below_autograd
from ._ops import ops
from ._options import AttentionStrategy
from ._strategies import Arguments, run, run_backward, serving

Key = tuple[Hashable, ...]

VARIABLE = "RUDNN_AUTOTUNE"

LARGEST_MEASURED_FALLBACK = 1 << 26
"""Elements of a score matrix beyond which `fallback` is no candidate beside others: 256 MiB in float32."""

_ROUNDS = 5
_SECONDS = 0.05
"""No further round begins when this much time has passed."""


@dataclass(frozen=True)
class Choice:
    """A strategy, and why it was chosen.

    Attributes:
        strategy: that of the call.
        seconds: what each candidate took, if that has been measured in this process.
        why: the reason in words, if not.
    """

    strategy: AttentionStrategy
    seconds: Mapping[AttentionStrategy, float]
    why: str = ""


class Tuner:
    """Measures candidates once for each key and keeps the winners.

    Args:
        setting: as `RUDNN_AUTOTUNE`.
        measure: gives the seconds that each of some calls takes.
    """

    def __init__(
        self, setting: str, measure: Callable[[Mapping[AttentionStrategy, Callable[[], object]]], list[float]]
    ) -> None:
        self.enabled = setting != "off"
        self._file = None if setting in ("", "on", "off") else _WinnersFile(Path(setting))
        self._measure = measure
        self._choices: dict[Key, Choice] = {}
        self._lock = threading.Lock()

    def known(self, key: Key) -> Choice | None:
        """Returns the choice for a key, if it has been made."""
        return self._choices.get(key)

    def choose(self, key: Key, candidates: Mapping[AttentionStrategy, Callable[[], object]]) -> Choice:
        """Returns the fastest candidate for a key; the threads that ask at the same time wait for one measurement.

        Args:
            key: whatever the times depend on.
            candidates: a call for each strategy.
        """
        with self._lock:
            if (choice := self._choices.get(key)) is None:
                choice = self._kept(key, candidates) or self._measured(key, candidates)
                self._choices[key] = choice
            return choice

    def _kept(self, key: Key, candidates: Mapping[AttentionStrategy, Callable[[], object]]) -> Choice | None:
        name = self._file and self._file.winner(_text(key))
        why = f"was the fastest, as {self._file} says"
        return next((Choice(strategy, {}, why) for strategy in candidates if strategy.value == name), None)

    def _measured(self, key: Key, candidates: Mapping[AttentionStrategy, Callable[[], object]]) -> Choice:
        if len(candidates) == 1:
            return Choice(next(iter(candidates)), {}, "is the only one that may be measured")
        seconds = dict(zip(candidates, self._measure(candidates), strict=True))
        choice = Choice(min(seconds, key=seconds.__getitem__), seconds)
        if self._file:
            self._file.keep(_text(key), choice.strategy.value)
        return choice


class _WinnersFile:
    """A JSON file of winners, which other processes may write too."""

    _FORMAT = "rudnn-attention autotune 1"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._winners: dict[str, str] | None = None
        self._warned = False

    def __str__(self) -> str:
        return str(self._path)

    def winner(self, key: str) -> str | None:
        """Returns the winner for a key, as the file had it when it was first asked for."""
        if self._winners is None:
            self._winners = self._read()
        return self._winners.get(key)

    def keep(self, key: str, winner: str) -> None:
        """Adds a winner to the file, beside what others have written there meanwhile."""
        self._winners = {**(self._winners or {}), **self._read(), key: winner}
        content = json.dumps({"format": self._FORMAT, "winners": self._winners}, indent=1, sort_keys=True) + "\n"
        temporary = None
        try:
            # Under another name first, so that no process ever reads half of it.
            descriptor, temporary = tempfile.mkstemp(prefix=f"{self._path.name}.", dir=self._path.parent)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(content)
            Path(temporary).replace(self._path)
        except OSError as error:
            self._warn(f"cannot be written: {error}")
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()

    def _read(self) -> dict[str, str]:
        try:
            content = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read: {error}")
            return {}
        if not isinstance(content, dict) or content.get("format") != self._FORMAT:
            self._warn(f"is not a file of the format {self._FORMAT!r}")
            return {}
        winners = content.get("winners")
        if not isinstance(winners, dict) or not all(isinstance(winner, str) for winner in winners.values()):
            self._warn("holds no winners")
            return {}
        return winners

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{VARIABLE}: {self._path} {problem}; attention goes on without it", stacklevel=2)


def _text(key: Key) -> str:
    return " ".join(map(str, key))


def measure(calls: Mapping[AttentionStrategy, Callable[[], object]]) -> list[float]:
    """Returns the least time of each of some calls, which take turns, in seconds."""
    for function in calls.values():
        function()
    best = [float("inf")] * len(calls)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        for place, function in enumerate(calls.values()):
            start = time.perf_counter()
            function()
            best[place] = min(best[place], time.perf_counter() - start)
        if time.perf_counter() - began > _SECONDS:
            break
    return best


TUNER = Tuner(os.environ.get(VARIABLE, "on"), measure)


def choose(arguments: Arguments, *, trained: bool) -> Choice:
    """Returns what `autotune` runs a call with, after measuring the candidates if that may be done and has not been.

    Measuring waits for the device. It is not done where a graph is captured, compiled or traced, nor without elements.

    Args:
        arguments: of the call, checked.
        trained: whether a gradient may be asked for.
    """
    query = arguments[0]
    candidates = serving(query.dtype, query.device)
    if len(candidates) == 1 or not TUNER.enabled or not _measurable(query):
        return Choice(candidates[0], {}, "comes first by rule, and nothing is measured here")
    key = key_of(arguments, trained)
    return TUNER.known(key) or TUNER.choose(key, _calls(arguments, trained, candidates))


def known(arguments: Arguments, *, trained: bool) -> AttentionStrategy | None:
    """Returns what `choose` would, if nothing has to be measured or checked for it."""
    query = arguments[0]
    if TUNER.enabled and _measurable(query):
        choice = TUNER.known(key_of(arguments, trained))
        return None if choice is None else choice.strategy
    return serving(query.dtype, query.device)[0]


def key_of(arguments: Arguments, trained: bool) -> Key:
    """Returns what the times of a call depend on; batch and lengths count by the next power of two."""
    query, key, value, mask, bias, sinks, _, softcap, is_causal, left, right = arguments
    batch, heads, queries, width = query.shape
    _, key_heads, keys, value_width = value.shape
    return (
        ops.name,
        _hardware(query.device),
        torch.get_num_threads() if query.device.type == "cpu" else None,
        query.dtype,
        _magnitude(batch),
        heads,
        key_heads,
        _magnitude(queries),
        _magnitude(keys),
        width,
        value_width,
        key.stride(3) == 1 and value.stride(3) == 1,
        None if mask is None else tuple(size == 1 for size in mask.shape),
        None if bias is None else (bias.dtype, *(size == 1 for size in bias.shape)),
        sinks is not None,
        softcap > 0,
        is_causal,
        _magnitude(left + 1),
        _magnitude(right + 1),
        trained,
    )


@functools.cache
def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    isa = ops.cpu_isa() if device.type == "cpu" and hasattr(ops, "cpu_isa") else ""
    return f"{device.type} {isa or platform.machine()}"


def _magnitude(size: int) -> int:
    """Returns the exponent of the next power of two, so that 0, 1, 2, 3 to 4, 5 to 8 and so on are told apart."""
    return (size - 1).bit_length() if size > 0 else -1


def _measurable(query: torch.Tensor) -> bool:
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return False
    if query.numel() == 0 or query.device.type == "meta":
        return False
    return not (query.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _calls(
    arguments: Arguments, trained: bool, candidates: list[AttentionStrategy]
) -> dict[AttentionStrategy, Callable[[], object]]:
    """Returns a call for each candidate, which computes the gradients too if the call is for training."""
    query, key, value, _, bias, sinks, *_ = arguments
    needed = tuple(tensor is not None and tensor.requires_grad for tensor in (query, key, value, bias, sinks))
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    synchronize = _synchronization(query.device)

    def function(strategy: AttentionStrategy) -> Callable[[], object]:
        def run_once() -> Any:
            with below_autograd():
                output, lse = run(strategy, arguments)
                if trained:
                    run_backward(strategy, arguments, output, output, lse, needed)
            synchronize()

        return run_once

    return {
        strategy: function(strategy)
        for strategy in candidates
        if strategy != AttentionStrategy.FALLBACK or scores <= LARGEST_MEASURED_FALLBACK or len(candidates) == 1
    }


def _synchronization(device: torch.device) -> Callable[[], object]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None
