"""The learning rate of an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """A linear rise to `peak` over `warmup` updates, then `shape`: constant, or a fall to `low` that ends with update
    number `end` (counted from 1; above `warmup`) in a straight line or half a cosine, and `low` from there on."""

    peak: float
    warmup: int = 0
    shape: Literal["constant", "linear", "cosine"] = "constant"
    low: float = 0.0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.shape != "constant" and (self.end is None or self.end <= self.warmup):
            raise ValueError(f"end = {self.end}: allowed: above warmup {self.warmup} for a {self.shape} fall")

    def at(self, done: int) -> float:
        """Of the update that follows `done` updates (>= 0)."""
        number = done + 1
        if number <= self.warmup:
            return self.peak * (number / self.warmup)
        if self.shape == "constant" or self.end is None:
            return self.peak
        progress = min(1.0, (number - self.warmup) / (self.end - self.warmup))
        left = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.low + (self.peak - self.low) * left
