"""Where trainer and rollout disagree: |d| by position in the response, and the tokens with the largest |d|.

Notation of `tasks.numerics.mismatch`. A position counts from a sequence's first valid token (0), whatever
its column in the padded batch; masked tokens inside a response keep their place in the count, because
kernels tile over real positions. |d| is not clamped; only exponentials are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tasks.numerics.mismatch import CLAMP, log_ratios, require_padded

POSITION_EDGES = (0, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""First positions of the buckets; the last one is open. Finest where decoding starts; 96, 128 and 192 are tile
sizes of FP8 attention on Hopper, so that a disagreement beginning with a tile begins with a bucket."""


@dataclass(frozen=True)
class PositionBucket:
    """|d| (nats) of the valid tokens at positions `start` <= position < `end`; without `end`, from `start` on.

    `token_mult_prob_error` is the mean of e^|d| with |d| clamped to 20 (1 is perfect). All 0 without a token.
    """

    start: int
    end: int | None
    tokens: int
    mean_abs: float
    max_abs: float
    token_mult_prob_error: float


@dataclass(frozen=True)
class TokenOffence:
    """One token on which the engines disagree: its row `sample`, its `position` in the response, p, q and d = p - q."""

    sample: int
    position: int
    token_id: int
    p: float
    q: float
    d: float


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and position in the response of each valid token, int64 `[valid tokens]`, in row-major order."""
    rows, columns = mask.nonzero(as_tuple=True)
    first = (mask.cumsum(1) == 0).sum(1)
    return rows, columns - first[rows]


def _bucket(start: int, end: int | None, abs_d: Tensor) -> PositionBucket:
    if not abs_d.numel():
        return PositionBucket(start, end, 0, 0.0, 0.0, 0.0)
    error = torch.exp(abs_d.clamp(max=CLAMP)).mean()
    return PositionBucket(start, end, abs_d.numel(), float(abs_d.mean()), float(abs_d.max()), float(error))


def abs_diff_by_position(
    p: Tensor, q: Tensor, mask: Tensor, edges: tuple[int, ...] = POSITION_EDGES
) -> tuple[PositionBucket, ...]:
    """|d| in buckets of positions in the response, one for each edge. Every valid token is in exactly one.

    `p`, `q`, `mask` (bool) `[sequences, tokens]`, nats; a missing q counts as d = 0. `edges` are the buckets'
    first positions, ascending from 0. Raises `ValueError` for other edges or shapes, `NonFiniteScoreError`
    for a non-finite p at a valid token.
    """
    require_padded(p, q, mask)
    if not edges or edges[0] != 0 or any(b <= a for a, b in pairwise(edges)):
        raise ValueError(f"edges must ascend strictly from 0, got {edges}")
    abs_d = log_ratios(p, q, mask).d.abs()
    _, positions = _places(mask)
    inner = torch.tensor(edges[1:], dtype=torch.int64, device=mask.device)
    bucket = torch.bucketize(positions, inner, right=True)
    spans = zip(edges, (*edges[1:], None), strict=True)
    return tuple(_bucket(start, end, abs_d[bucket == i]) for i, (start, end) in enumerate(spans))


def position_metrics(buckets: Sequence[PositionBucket]) -> dict[str, float]:
    """Mean |d| of each bucket that has tokens, as `mismatch/abs_diff_by_position/00008-00015` (both inclusive).

    The open bucket is named `16384-up`. Names sort in the order of positions up to 99999.
    """

    def name(bucket: PositionBucket) -> str:
        last = "up" if bucket.end is None else f"{bucket.end - 1:05d}"
        return f"mismatch/abs_diff_by_position/{bucket.start:05d}-{last}"

    return {name(bucket): bucket.mean_abs for bucket in buckets if bucket.tokens}


def top_offenders(p: Tensor, q: Tensor, mask: Tensor, tokens: Tensor, count: int) -> tuple[TokenOffence, ...]:
    """The `count` valid tokens with the largest |d|, largest first; equal ones by sample, then position.

    `p`, `q`, `mask` (bool), `tokens` (ids) `[sequences, tokens]`. Tokens with a missing or non-finite q have no
    difference to show and are left out; fewer than `count` tokens give what there is. Raises `ValueError` for a
    negative count or unequal shapes, `NonFiniteScoreError` for a non-finite p at a valid token.
    """
    require_padded(p, q, mask)
    if tokens.shape != mask.shape:
        raise ValueError(f"tokens must have the mask's shape {tuple(mask.shape)}, got {tuple(tokens.shape)}")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    ratios = log_ratios(p, q, mask)
    rows, positions = _places(mask)
    present = torch.isfinite(q[mask])
    # A stable sort of tokens in row-major order keeps equal differences in the order of sample and position.
    order = torch.where(present, ratios.d.abs(), -1.0).sort(descending=True, stable=True).indices
    order = order[: min(count, int(present.sum()))]
    places = torch.stack([rows[order], positions[order], tokens[mask][order].to(torch.int64)], dim=1).tolist()
    values = torch.stack([ratios.p[order], ratios.q[order], ratios.d[order]], dim=1).tolist()
    return tuple(TokenOffence(*place, *value) for place, value in zip(places, values, strict=True))
