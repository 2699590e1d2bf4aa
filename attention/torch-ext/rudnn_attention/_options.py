"""What can be chosen: options, which check themselves, and strategies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ._errors import INT32_MAX, AttentionChecks, bounded_integer


class AttentionStrategy(str, Enum):
    """How attention is computed."""

    FLASH_ACCELERATED = "flash_accelerated"
    """In one pass over tiles of keys, on matrix units; raises where the hardware has none for the dtype."""
    FLASH_UNIT = "flash_unit"
    """In one pass over tiles of keys, on the vector units; every dtype."""
    FALLBACK = "fallback"
    """Products and softmax one after the other, with the whole score matrix in memory; every dtype and device."""
    AUTOTUNE = "autotune"
    """The fastest of the others: measured once for a kind of call, or chosen by rule where nothing may be measured."""


@dataclass(frozen=True)
class AttentionOptions:
    """Options of `attention`.

    Attributes:
        scale: what the products of queries and keys are multiplied by, finite and > 0; by default `1 / sqrt(D)`.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`, finite and > 0; None for no bound.
        is_causal: whether query i sees only the keys `j <= i + Sk - Sq`, so that the last query sees all.
        window: `(left, right)`, how far before and behind its own position, `i + Sk - Sq`, a query sees keys: 0 to
            2^31 - 1, or -1 for any distance. None is `(-1, -1)`.

    Raises:
        AttentionSetupError: for an option that is not as described.
    """

    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check = AttentionChecks("AttentionOptions")
        check.flag("is_causal", self.is_causal)
        for name in ("scale", "softcap"):
            number = getattr(self, name)
            if number is not None:
                object.__setattr__(self, name, check.positive_float32(name, number))
        if self.window is not None:
            object.__setattr__(self, "window", window_bounds(check, "window", self.window))


def window_bounds(check: AttentionChecks, name: str, value: object) -> tuple[int, int]:
    """Requires two distances, -1 for no bound, and returns them as a tuple of ints."""
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (None, None)
    left, right = (bounded_integer(each, -1) for each in pair)
    if left is None or right is None:
        check.fail(name, f"be two integers (left, right), each from 0 to {INT32_MAX}, or -1 for no bound", value)
    return left, right


def values_of(enumeration: type[Enum]) -> tuple[str, ...]:
    """Returns the strings that the members of an enumeration stand for."""
    return tuple(member.value for member in enumeration)
