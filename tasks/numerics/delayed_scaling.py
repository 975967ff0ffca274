"""Delayed scaling: one scale a tensor, from the amax values of earlier updates.

A linear layer keeps a history for each of its three quantised tensors: input X, weight W, output gradient dY.
The rules are those of Transformer Engine's `DelayedScaling` recipe (NVIDIA Transformer Engine,
`common/recipe/delayed_scaling.cu`):

    encode(t) = largest * 2^-margin / amax(t),    amax(t) = max of the history, or its newest entry

computed from what was entered before t; an amax of zero, inf or NaN is not entered, and encode never exceeds
the largest float. Values above largest / encode(t) saturate: beside the rounding of the format the error
is abs(x) - largest / encode there.

Three choices differ, each for a reason that a GRPO step has:

- One entry an optimiser update, the maximum over its micro-batches, instead of one a forward pass. Scoring before
  the update, and all its micro-batches, then use the same scales. (Not in the first update: see the next choice.)
- Without history the tensor's own amax counts, where Transformer Engine starts at scale 1: weights of a
  few hundredths would vanish at the first scoring. Until the first update its micro-batches thus scale for themselves.
- A tensor that holds inf or NaN now decodes to NaN as a whole, as in every other format; it does not saturate.

Workers that share a layer merge `pending` by an elementwise maximum before `push`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tasks.numerics.formats import Format
from tasks.numerics.fp8 import block_amax, encode_scales

AmaxCompute = Literal["max", "most_recent"]
Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
"""Columns of a history."""


@dataclass(frozen=True)
class HistorySettings:
    """`length` entries (>= 1); `compute` the amax from them; `margin` >= 0 halves the range that many times."""

    length: int = 1024
    compute: AmaxCompute = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length {self.length}: an amax history has at least 1 entry")
        if self.margin < 0:
            raise ValueError(f"margin {self.margin}: at least 0 is allowed")


def empty_history(settings: HistorySettings) -> Tensor:
    """History without entries, fp32 `[length, 3]`, newest first; 0 stands for no entry."""
    return torch.zeros(settings.length, len(OPERANDS))


def push(history: Tensor, amax: Tensor) -> Tensor:
    """History after an update: `amax` `[3]` becomes the newest entry, the oldest falls out. A new tensor.

    A column whose amax is 0 (tensor unused or all zero), inf or NaN stays as it is.
    """
    counts = (amax > 0) & torch.isfinite(amax)
    return torch.where(counts, torch.cat([amax.unsqueeze(0), history[:-1]]), history)


def history_amax(history: Tensor, compute: AmaxCompute) -> Tensor:
    """The amax that scales come from, `[3]`; 0 for a column without entries."""
    return history[0] if compute == "most_recent" else history.amax(0)


def delayed_encode(past: Tensor, current: Tensor, fmt: Format, margin: int = 0) -> Tensor:
    """Encode factor `[1, 1]` from the history's amax `past` (scalar) and the tensor's own, `current` `[1, 1]`.

    `current` counts only where the history is empty, and where it is not finite: then the factor is NaN.
    """
    amax = torch.where(past > 0, past, current)
    encode = encode_scales(amax, fmt.power_of_two, fmt.limits.largest * 2.0**-margin)
    return torch.where(torch.isfinite(current), encode, torch.full_like(encode, float("nan")))


@dataclass(frozen=True)
class DelayedScales:
    """Histories of one layer: `history` fp32 `[length, 3]`, and `pending` fp32 `[3]`, the update's amax so far.

    `encode` writes to `pending` when `record` is set; nothing else here changes a tensor.
    """

    history: Tensor
    pending: Tensor
    settings: HistorySettings

    def encode(self, x: Tensor, operand: Operand, fmt: Format, record: bool) -> Tensor:
        """Encode factor `[1, 1]` for the matrix `x`."""
        column, current = OPERANDS.index(operand), block_amax(x, fmt.block_of(x.shape))
        if record and current.numel():
            finite = torch.where(torch.isfinite(current), current, 0.0).reshape(())
            self.pending[column] = torch.maximum(self.pending[column], finite)
        past = history_amax(self.history, self.settings.compute)[column]
        return delayed_encode(past, current, fmt, self.settings.margin)
