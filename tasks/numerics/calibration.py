"""Static FP8 scales of Q, K and V from what the trainer's attention sees.

One fp32 scale for each layer and each of q, k, v: s = margin * amax / 448, with amax the largest
magnitude over real tokens (or a percentile over elements). Queries and keys are taken after their norm
and rotary embedding, as they enter attention and the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tasks.numerics.fp8 import E4M3_MAX, quantize_static
from tasks.numerics.mismatch import nearest_rank

PARTS = ("q", "k", "v")
ScaleKey = tuple[int, str]
Scales = dict[ScaleKey, float]
"""Scale of each (global layer number, "q" | "k" | "v")."""


class CalibrationError(ValueError):
    """A layer without values, or with values that cannot give a scale."""


def scale_from_amax(amax: float, margin: float) -> float:
    """margin * amax / 448, rounded to fp32 once, so that every holder has the same bits."""
    return float(np.float32(margin * amax / E4M3_MAX))


@dataclass
class _Statistics:
    amax: float = 0.0
    elements: int = 0
    nonzero: int = 0
    saturated: int = 0
    underflowed: int = 0
    magnitudes: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class CalibrationResult:
    """New scales, and how the scales in use fitted the same values."""

    scales: Scales
    metrics: dict[str, float]


class CalibrationObserver:
    """Collects statistics of q, k, v over any number of forward passes.

    Counts against `in_use` (empty at bootstrap, else one scale for each layer and part) are taken before
    the new scales exist, on the same values. Not thread-safe; one observer serves one calibration.
    """

    def __init__(self, layers: int, margin: float, percentile: float, in_use: Scales | None = None) -> None:
        if not margin >= 1 or not 0 < percentile <= 100:
            raise ValueError(f"margin must be >= 1 and 0 < percentile <= 100, got {margin} and {percentile}")
        self._margin = margin
        self._percentile = percentile
        self._in_use = dict(in_use or {})
        self._stats = {(layer, part): _Statistics() for layer in range(layers) for part in PARTS}
        for layer, part in sorted(self._stats.keys() ^ self._in_use.keys() if self._in_use else ()):
            what = "has no scale in use" if (layer, part) in self._stats else f"is not one of the {layers} layers"
            raise CalibrationError(f"layer {layer} {part}: {what}")

    def observe(self, layer: int, part: str, x: Tensor, real: Tensor) -> None:
        """Add values of one layer: `x` `[batch, heads, tokens, head_dim]`, `real` bool `[batch, tokens]`."""
        stats = self._stats[(layer, part)]
        values = x.detach().transpose(1, 2)[real].to(torch.float32)
        if not values.numel():
            return
        magnitude = values.abs()
        # NaN must not lose a comparison: a plain max() keeps the old amax when the new one is NaN.
        stats.amax = float(torch.maximum(magnitude.amax(), torch.tensor(stats.amax, device=x.device)))
        stats.elements += values.numel()
        if self._percentile < 100:
            stats.magnitudes.append(magnitude.reshape(-1))
        scale = self._in_use.get((layer, part))
        if scale is not None:
            codes = quantize_static(values, scale).view(torch.uint8)
            nonzero = values != 0
            stats.nonzero += int(nonzero.sum())
            stats.saturated += int((magnitude > E4M3_MAX * np.float32(scale)).sum())
            stats.underflowed += int((nonzero & ((codes & 0x7F) == 0)).sum())

    def result(self) -> CalibrationResult:
        """Scales and `calibration/*` metrics; raises `CalibrationError` naming layer and tensor.

        `saturated_fraction`, `underflow_fraction` and `max_rel_change` describe the scales in use and are
        absent when there were none.
        """
        scales = {key: scale_from_amax(self._amplitude(key), self._margin) for key in self._stats}
        for (layer, part), scale in scales.items():
            if not scale > 0 or not np.isfinite(scale):
                raise CalibrationError(f"layer {layer} {part}: amax gives the scale {scale}, which is not usable")
        return CalibrationResult(scales, self._metrics(scales) if self._in_use else {})

    def _amplitude(self, key: ScaleKey) -> float:
        stats = self._stats[key]
        if not stats.elements:
            raise CalibrationError(f"layer {key[0]} {key[1]}: no real token was seen")
        if not np.isfinite(stats.amax):
            raise CalibrationError(f"layer {key[0]} {key[1]}: values are not finite (amax {stats.amax})")
        if self._percentile == 100 or stats.amax == 0:
            amax = stats.amax
        else:
            amax = nearest_rank(torch.cat(stats.magnitudes), self._percentile / 100)
        if amax == 0:
            raise CalibrationError(f"layer {key[0]} {key[1]}: amax is 0, no scale can be formed")
        return amax

    def _metrics(self, new: Scales) -> dict[str, float]:
        stats = self._stats.values()
        elements, nonzero = sum(s.elements for s in stats), sum(s.nonzero for s in stats)
        changes = [abs(new[key] / old - 1) for key, old in self._in_use.items()]
        return {
            "calibration/max_rel_change": max(changes),
            "calibration/saturated_fraction": sum(s.saturated for s in stats) / elements,
            "calibration/underflow_fraction": sum(s.underflowed for s in stats) / nonzero if nonzero else 0.0,
        }
