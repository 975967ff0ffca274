"""Which tokens of a sequence a calibration measures, and how much the others can change its result.

A sequence longer than the limit n is cut into n pieces of equal size (up to one token), and one token of each is
drawn: stratified sampling. The drawn token stands for its piece, so it counts with the piece's size as weight and
all weighted shares are unbiased estimates of the shares over every real token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.numerics.logprobs import uniforms

SUBSAMPLE_FAILURE = 0.01
"""Probability, over the draw, that a stated bound does not hold."""


@dataclass(frozen=True)
class TokenSample:
    """The tokens to measure of right-padded rows.

    `positions` int64 `[rows, drawn]`, or None for every column in its place; `weights` int64 `[rows, drawn or
    width]`, how many real tokens each stands for, 0 for none.
    """

    positions: Tensor | None
    weights: Tensor

    def rows(self, index: Tensor) -> TokenSample:
        """The sample of these rows, `index` int64 `[micro-batch]`."""
        return TokenSample(None if self.positions is None else self.positions[index], self.weights[index])

    def of(self, x: Tensor) -> Tensor:
        """Values at the sampled tokens: `[rows, heads, width, dim]` to `[rows, heads, drawn, dim]`."""
        if self.positions is None:
            return x
        index = self.positions.to(x.device)[:, None, :, None]
        return x.gather(2, index.expand(x.shape[0], x.shape[1], index.shape[2], x.shape[3]))

    def places(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Where the measured tokens stand in one sequence in which row r begins at `starts[r]`, and their weights.

        `starts` int64 `[rows]`; int64 `[measured]` each, row by row.
        """
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.weights.shape[1], device=self.weights.device).expand_as(self.weights)
        measured = self.weights > 0
        return (starts.unsqueeze(1) + positions)[measured], self.weights[measured]


def sample_tokens(lengths: Tensor, width: int, limit: int | None, seed: int = 0) -> TokenSample:
    """At most `limit` tokens of each row; all real ones with None.

    `lengths` int64 `[rows]` (<= `width`, the padded width). Row r with L real tokens and n = min(limit, width) has
    the pieces [floor(i L / n), floor((i + 1) L / n)) for i < n; in each the token is number floor(u * size), with
    u from the Philox stream of `seed` at place r * n + i. The same arguments give the same tokens on every
    machine and device, whatever the micro-batches are. A row of at most n tokens is measured whole.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"max_tokens_per_sequence must be at least 1 or null, got {limit}")
    if limit is None or limit >= width:
        columns = torch.arange(width, device=lengths.device)
        return TokenSample(None, (columns < lengths.unsqueeze(1)).to(torch.int64))
    bounds = torch.arange(limit + 1, device=lengths.device) * lengths.unsqueeze(1) // limit
    start, size = bounds[:, :-1], bounds[:, 1:] - bounds[:, :-1]
    u = uniforms([seed], lengths.numel() * limit).to(lengths.device).view(lengths.numel(), limit)
    # u is at most 1 - 2^-53, and its product with a whole number below 2^53 never rounds up to that number.
    return TokenSample(torch.where(size > 0, start + (u * size).to(torch.int64), 0), size)


def subsample_bound(
    tokens: float, largest: float, statements: int, percentile: float = 100.0, failure: float = SUBSAMPLE_FAILURE
) -> float:
    """Share of values that sub-sampling may leave above a measured amplitude, beyond the intended share.

    With probability >= 1 - `failure` over the draw, for all `statements` amplitudes (layers, parts, heads) at once
    and whatever the values are, at most (1 - percentile / 100) + this share of them lies above the amplitude.
    `tokens` N: real tokens; `largest` m: tokens of the largest piece; delta = failure / statements (union bound).

    - percentile 100: m ln(1 / delta) / N. If more than eps N tokens hold a value above the sampled maximum, then
      none of the eps N tokens with the largest values was drawn; with k of them in a piece of size s that has
      probability prod(1 - k / s) <= exp(-sum k / m) <= exp(-eps N / m). With all pieces equal and n drawn this is
      the familiar (1 - eps)^n <= exp(-eps n).
    - below 100: sqrt(m ln(1 / delta) / (2 N)), Hoeffding's inequality (1963) for the weighted share above the
      true percentile: independent draws in ranges s / N whose squares sum to at most m / N.

    No such bound exists for the amplitude itself: one value may be as large as it likes. 0 when everything was
    measured (m <= 1), never above 1.
    """
    if largest <= 1 or tokens <= 0:
        return 0.0
    log_odds = math.log(statements / failure)
    if percentile == 100:
        return min(1.0, largest * log_odds / tokens)
    return min(1.0, math.sqrt(largest * log_odds / (2 * tokens)))
