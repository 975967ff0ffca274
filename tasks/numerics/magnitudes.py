"""Percentiles of magnitudes from a histogram of fixed, log-spaced bins: additive over batches and workers.

There is one bin for each non-negative BF16 number, 128 to the octave, over the whole range. A magnitude is counted
in the bin of the smallest BF16 number at or above it. Rounding up keeps the order, so a percentile read off the
histogram is the exact nearest-rank percentile rounded up to BF16: exact for BF16 values (what attention sees), and
for wider ones at least the exact one and less than 2^-7 of it above (normal numbers; 2^-133 absolute below them).
"""

from __future__ import annotations

import torch
from torch import Tensor

_INFINITY = 0x7F80
MAGNITUDE_BINS = _INFINITY + 1
"""Bins; the last takes whatever is not finite."""


def magnitude_bins(magnitude: Tensor) -> Tensor:
    """Bin of each magnitude >= 0: fp32, any shape, to int64 of that shape. NaN and inf go to the last bin."""
    bits = magnitude.contiguous().view(torch.int32)
    # NaN patterns reach 0x7FFFFFFF, where adding would overflow.
    return ((bits.clamp(max=_INFINITY << 16) + 0xFFFF) >> 16).to(torch.int64)


def bin_values(index: Tensor) -> Tensor:
    """The BF16 number of each bin, fp64; `index` integer, any shape."""
    return (index.to(torch.int32) << 16).contiguous().view(torch.float32).to(torch.float64)


def histogram_percentile(histogram: Tensor, share: float) -> Tensor:
    """Smallest bin value with at least `share` (0, 1] of the counts at or below it, fp64 `[]`, without a host sync.

    `histogram` fp64 `[MAGNITUDE_BINS]` of whole counts (exact below 2^53); 0 when it is empty.
    """
    # Whole numbers: no GPU kernel repeats a sum of floating-point ones, and a deterministic run refuses it.
    cumulative = histogram.to(torch.int64).cumsum(0).to(torch.float64)
    # As in `nearest_rank`: 0.999 * 1000 may come out a hair above 999, and the rank must still be 999.
    rank = torch.ceil(torch.round(cumulative[-1] * share, decimals=6)).clamp(min=1)
    index = torch.searchsorted(cumulative, rank.unsqueeze(0)).clamp(max=MAGNITUDE_BINS - 1)[0]
    return torch.where(cumulative[-1] > 0, bin_values(index), 0.0)
