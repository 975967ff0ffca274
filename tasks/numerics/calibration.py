"""Static FP8 scales of Q, K and V from what the trainer's attention sees.

One fp32 scale for each layer and each of q, k, v, or for each KV head of them: s = margin * amax / 448, with amax
the largest magnitude over real tokens (or a percentile over elements). Queries and keys are taken after their norm
and rotary embedding, as they enter attention and the cache. Statistics stay on the device of the values until
`result` reads them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.numerics.fp8 import E4M3_HALF_SMALLEST, E4M3_MAX
from tasks.numerics.kv_scales import (
    PARTS,
    CalibrationError,
    Scale,
    ScaleKey,
    Scales,
    grouped_scales,
    scale_from_amax,
    scale_keys,
    scale_values,
    slot_name,
)
from tasks.numerics.magnitudes import MAGNITUDE_BINS, histogram_percentile, magnitude_bins
from tasks.numerics.token_sample import subsample_bound

__all__ = [
    "PARTS",
    "CalibrationError",
    "CalibrationObserver",
    "CalibrationResult",
    "Scale",
    "ScaleKey",
    "Scales",
    "scale_from_amax",
]

_TOKENS, _ELEMENTS, _NONZERO, _SATURATED, _UNDERFLOWED = range(5)
_COUNTS = 5
Array = NDArray[np.float64]
_Chosen = tuple[slice, int, slice]
"""Layers, part and heads."""


@dataclass(frozen=True)
class CalibrationResult:
    """New scales, and how the scales in use fitted the same values."""

    scales: Scales
    metrics: dict[str, float]


class CalibrationObserver:
    """Collects statistics of q, k, v over any number of forward passes and workers.

    Counts against `in_use` (empty at bootstrap, else one scale for each layer and part) are taken before
    the new scales exist, on the same values. `heads`: KV heads for a scale each, None for one a layer.
    `subsampled`: report the bound of sub-sampling. `replicas`: of the workers that will be merged, how many see
    the same tokens with other heads under one scale a layer (tensor parallel); for that bound alone.

    The whole state is one flat fp64 tensor: `maxima` merge by maximum, `sums` by addition (counts are whole and
    exact below 2^53), so workers merge with one reduction of each, or one gather of `state_dict()["state"]` and
    `merge`. Every worker gives the global numbers of the layers and heads it sees; what others see stays 0.
    Not thread-safe; one observer serves one calibration.
    """

    def __init__(
        self,
        layers: int,
        margin: float,
        percentile: float,
        in_use: Scales | None = None,
        heads: int | None = None,
        *,
        subsampled: bool = False,
        replicas: int = 1,
    ) -> None:
        if not margin >= 1 or not 0 < percentile <= 100:
            raise ValueError(f"margin must be >= 1 and 0 < percentile <= 100, got {margin} and {percentile}")
        self._layers, self._heads, self._groups = layers, heads, 1 if heads is None else heads
        self._margin, self._percentile = margin, percentile
        self._subsampled, self._replicas = subsampled, replicas
        self._in_use = dict(in_use or {})
        self._check_in_use()
        self._slots = 3 * layers * self._groups
        self._bins = MAGNITUDE_BINS if percentile < 100 else 0
        self._scales_in_use = torch.tensor(self._flat_scales(), dtype=torch.float32)
        self._state = torch.zeros(1 + self._slots * (1 + _COUNTS + self._bins), dtype=torch.float64)
        self._bound = False

    def _check_in_use(self) -> None:
        wanted = set(scale_keys(self._layers))
        for key in sorted(wanted ^ self._in_use.keys() if self._in_use else ()):
            what = "has no scale in use" if key in wanted else f"is not one of the {self._layers} layers"
            raise CalibrationError(f"{slot_name(key)}: {what}")
        for key, scale in self._in_use.items():
            held = len(scale) if isinstance(scale, tuple) else None
            if held != self._heads:
                raise CalibrationError(
                    f"{slot_name(key)}: the scale in use is {scale}, which does not fit heads {self._heads}"
                )

    @property
    def maxima(self) -> Tensor:
        """Live view: largest token weight, then amax of each slot (inf once a value was not finite)."""
        return self._state[: 1 + self._slots]

    @property
    def sums(self) -> Tensor:
        """Live view: counts of each slot, then their histograms (percentiles only)."""
        return self._state[1 + self._slots :]

    def _counts(self) -> Tensor:
        return self.sums[: self._slots * _COUNTS].view(self._slots, _COUNTS)

    def _histograms(self) -> Tensor:
        return self.sums[self._slots * _COUNTS :].view(self._slots, self._bins)

    def observe(self, layer: int, part: str, x: Tensor, real: Tensor, heads: range | None = None) -> None:
        """Add values of one layer, without waiting for the device.

        `x` `[batch, heads, tokens, head_dim]`; `real` `[batch, tokens]`: bool, or int64 with the number of tokens
        that each stands for (`TokenSample.weights`). `heads`: the KV heads that `x` belongs to at head granularity,
        None for all.
        """
        self.observe_layers(range(layer, layer + 1), part, x.unsqueeze(0), real, heads)

    def observe_layers(self, layers: range, part: str, x: Tensor, real: Tensor, heads: range | None = None) -> None:
        """`observe` of several neighbouring layers at once, in fewer and larger kernels: `x` `[layers, batch, ...]`.

        Reads `x` (BF16, FP16 or FP32) a few times in its own type; nothing of its size is made in fp32.
        """
        chosen, count = self._chosen(layers, part, x.shape[2], heads)
        # Even without a token: what other ranks have seen may come by a collective of this device.
        self._bind(x.device)
        if not x.numel():
            return
        weights = real.to(torch.int64)
        grouped = x.detach().unflatten(2, (count, x.shape[2] // count))
        magnitude = grouped.abs()
        by_token = torch.where((weights > 0)[:, None], magnitude.amax((3, 5)), 0)
        # A maximum over workers may drop NaN, and must not drop inf.
        peak = torch.nan_to_num(by_token.amax((1, 3)), nan=torch.inf, posinf=torch.inf)
        self._raise_to(self.maxima[:1], weights.amax().reshape(1))
        self._raise_to(self._by_slot(self.maxima[1:])[chosen], peak)
        tokens = weights.sum()
        elements = tokens * magnitude.shape[3] * magnitude.shape[5]
        held = self._by_slot(self._counts())[chosen]
        held[..., : _ELEMENTS + 1] += torch.stack([tokens, elements]).to(held.device)
        if self._in_use:
            scales = self._by_slot(self._scales_in_use)[chosen].to(magnitude.device)
            held[..., _NONZERO:] += _fit(magnitude, scales, weights, elements).to(held.device)
        if self._bins:
            real_ones = torch.where((weights > 0)[:, None, None, :, None], magnitude, 0)
            self._count_magnitudes(chosen, real_ones.to(torch.float32), weights)

    def _by_slot(self, values: Tensor) -> Tensor:
        """A view `[layers, parts, heads, ...]` of values `[slots, ...]`."""
        return values.unflatten(0, (self._layers, len(PARTS), self._groups))

    def _chosen(self, layers: range, part: str, rows: int, heads: range | None) -> tuple[_Chosen, int]:
        layer = layers.start
        if part not in PARTS or not 0 <= layer < layers.stop <= self._layers or layers.step != 1:
            raise CalibrationError(f"{slot_name((layer, part))}: is not one of the {self._layers} layers")
        covered = range(self._groups) if heads is None or self._heads is None else heads
        if not covered or covered.step != 1 or covered.start < 0 or covered.stop > self._groups:
            raise CalibrationError(f"{slot_name((layer, part))}: {heads} are not some of {self._groups} heads")
        if rows % len(covered):
            raise CalibrationError(f"{slot_name((layer, part))}: {rows} heads do not share {len(covered)} scales")
        chosen = slice(layers.start, layers.stop), PARTS.index(part), slice(covered.start, covered.stop)
        return chosen, len(covered)

    def _bind(self, device: torch.device) -> None:
        """The first values decide where the state lives."""
        if not self._bound:
            self._state, self._bound = self._state.to(device), True
            self._scales_in_use = self._scales_in_use.to(device)

    @staticmethod
    def _raise_to(held: Tensor, seen: Tensor) -> None:
        held.copy_(torch.maximum(held, seen.to(held.device, held.dtype)))

    def _count_magnitudes(self, chosen: _Chosen, magnitude: Tensor, weights: Tensor) -> None:
        """`magnitude` `[layers, batch, groups, heads, tokens, dim]`."""
        slots = self._by_slot(torch.arange(self._slots, device=magnitude.device))[chosen]
        index = (magnitude_bins(magnitude) + (slots * self._bins)[:, None, :, None, None, None]).reshape(-1)
        spread = weights.to(torch.float64)[:, None, None, :, None].expand_as(magnitude).reshape(-1)
        held = self._histograms().view(-1)
        held.scatter_add_(0, index.to(held.device), spread.to(held.device))

    def _identity(self) -> dict[str, Tensor]:
        layout = torch.tensor([self._layers, self._heads or 0, self._bins])
        return {"layout": layout, "in_use": torch.tensor(self._flat_scales(), dtype=torch.float64)}

    def _flat_scales(self) -> list[float]:
        return [v for key in scale_keys(self._layers) if self._in_use for v in scale_values(self._in_use[key])]

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything collected, for a file or for another worker's `merge`.

        `state` fp64, flat; `layout` int64 (layers, heads or 0, bins) and `in_use` fp64 (the scales counted
        against, flat) say what it belongs to.
        """
        return {"state": self._state.clone(), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was collected; raises `CalibrationError` for the state of another kind of observer."""
        self._check_state(state)
        self._state, self._bound = state["state"].clone(), True

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add what another worker collected (its `state_dict()`); order and grouping do not matter."""
        self._check_state(state)
        other = state["state"].to(self._state.device)
        self._raise_to(self.maxima, other[: 1 + self._slots])
        self.sums.add_(other[1 + self._slots :])

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self._identity().items():
            other = state[name].cpu()
            if not torch.equal(own, other):
                raise CalibrationError(
                    f"the other calibration has {name} {other.tolist()[:8]}, this one {own.tolist()[:8]}"
                )

    def result(self) -> CalibrationResult:
        """Scales and `calibration/*` metrics; raises `CalibrationError` naming layer, tensor and head.

        `saturated_fraction`, `underflow_fraction` and `max_rel_change` describe the scales in use and are
        absent when there were none; `subsample_bound` (see `token_sample.subsample_bound`) is present when
        sub-sampling is on.
        """
        largest, amax, amplitudes, counts = self._read()
        values = [self._scale(i, *slot) for i, slot in enumerate(zip(amax, amplitudes, counts, strict=True))]
        scales = grouped_scales(values, self._layers, self._heads)
        metrics = self._fit_metrics(scales, counts.sum(0).tolist()) if self._in_use else {}
        if self._subsampled:
            tokens = float(counts[:, _TOKENS].min()) / self._replicas
            bound = subsample_bound(tokens, largest, self._slots, self._percentile)
            metrics["calibration/subsample_bound"] = bound
        return CalibrationResult(scales, metrics)

    def _read(self) -> tuple[float, Array, Array, Array]:
        """Largest token weight; of each slot its amax, the amplitude that the scale is made of, and its counts."""
        sizes = (1, self._slots, self._slots, self._slots * _COUNTS)
        summary = torch.cat([self.maxima, self._amplitudes(), self._counts().reshape(-1)])
        # The one wait for the device.
        largest, amax, amplitudes, counts = (part.numpy() for part in summary.cpu().split(sizes))
        return float(largest[0]), amax, amplitudes, counts.reshape(self._slots, _COUNTS)

    def _scale(self, slot: int, amax: float, amplitude: float, counts: Array) -> float:
        key = scale_keys(self._layers)[slot // self._groups]
        name = slot_name(key, None if self._heads is None else slot % self._groups)
        if not counts[_ELEMENTS]:
            raise CalibrationError(f"{name}: no real token was seen")
        if not np.isfinite(amax):
            raise CalibrationError(f"{name}: values are not finite (amax {amax})")
        if amplitude == 0:
            raise CalibrationError(f"{name}: amax is 0, no scale can be formed")
        scale = scale_from_amax(float(amplitude), self._margin)
        if not scale > 0 or not np.isfinite(scale):
            raise CalibrationError(f"{name}: amax gives the scale {scale}, which is not usable")
        return scale

    def _amplitudes(self) -> Tensor:
        amax = self.maxima[1:]
        if not self._bins:
            return amax
        found = [histogram_percentile(histogram, self._percentile / 100) for histogram in self._histograms()]
        # Bins round up; no percentile is above the maximum.
        return torch.minimum(torch.stack(found), amax)

    def _fit_metrics(self, new: Scales, totals: list[float]) -> dict[str, float]:
        changes = [
            abs(now / old - 1)
            for key, scale in self._in_use.items()
            for now, old in zip(scale_values(new[key]), scale_values(scale), strict=True)
        ]
        return {
            "calibration/max_rel_change": max(changes),
            "calibration/saturated_fraction": totals[_SATURATED] / totals[_ELEMENTS],
            "calibration/underflow_fraction": totals[_UNDERFLOWED] / totals[_NONZERO] if totals[_NONZERO] else 0.0,
        }


def _fit(magnitude: Tensor, scales: Tensor, weights: Tensor, elements: Tensor) -> Tensor:
    """Non-zero, saturated and underflowed elements under `scales`, weighted, fp64 `[layers, groups, 3]`.

    `magnitude` `[layers, batch, groups, heads, tokens, dim]`, `scales` fp32 `[layers, groups]`, `weights` int64
    `[batch, tokens]`, `elements` int64 `[]`: how many each layer and group has, weighted.

    E4M3 rounds a quotient x / s to zero up to half its smallest number, 2^-10, where the tie goes to the even code 0;
    and the fp32 quotient is at most 2^-10 exactly where x <= 2^-10 s, since the fp32 number after 2^-10 s is more than
    half a unit in the last place of 2^-10 away (s >= 2^-116: 2^-10 s is exact).
    """
    by_group = scales[:, None, :, None, None, None]
    flags = (magnitude == 0, magnitude > by_group * E4M3_MAX, magnitude <= by_group * E4M3_HALF_SMALLEST)
    by_token = torch.stack([flag.sum((3, 5)) for flag in flags], -1)
    zero, saturated, small = (by_token * weights[:, None, :, None]).sum((1, 3)).unbind(-1)
    return torch.stack([elements - zero, saturated, small - zero], -1).to(torch.float64)
