"""Rules on a series of values, one for each step: how long it has been against a rule, and when that trips.

A pure function of the values, so that a run that goes on judges as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Healthy is what is finite, not above `above` and not below `below` (either may be None: no bound)."""

    above: float | None = None
    below: float | None = None

    def broken_by(self, value: float) -> bool:
        """Whether a value is not healthy; NaN and infinities never are."""
        if not math.isfinite(value):
            return True
        return (self.above is not None and value > self.above) or (self.below is not None and value < self.below)

    def __str__(self) -> str:
        bounds = (("above", self.above), ("below", self.below))
        return " or ".join([*(f"{word} {bound:g}" for word, bound in bounds if bound is not None), "not finite"])


def streak(bounds: Bounds, values: Sequence[float]) -> int:
    """Number of the last values, in a row, that are not healthy."""
    length = 0
    for value in reversed(values):
        if not bounds.broken_by(value):
            break
        length += 1
    return length


def trips(bounds: Bounds, values: Sequence[float], patience: int, every: bool = True) -> bool:
    """Whether the last value makes `patience` (>= 1) unhealthy ones in a row, or more.

    Without `every`: or one of their multiples, so that it is said again when as many more have passed.
    """
    length = streak(bounds, values)
    return length >= patience and (every or length % patience == 0)
