"""What a context-parallel rank has of right-padded rows, and of a sample of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tasks.engines.protocols import TokenRows
from tasks.numerics.packing import context_places
from tasks.numerics.token_sample import TokenSample


def context_share(
    rows: TokenRows, sample: TokenSample, rank: int, ranks: int, multiple: int
) -> tuple[TokenRows, TokenSample]:
    """The columns of a rank, and the sample in them; `rows` and `sample` themselves with one rank.

    Rows are padded to a multiple of `2 * ranks * multiple` tokens, so that every rank has the same number of columns, a
    multiple of `multiple`: two equal parts, as far from the start as from the end. Tokens of padding are 0.
    """
    if ranks == 1:
        return rows, sample
    whole = 2 * ranks * multiple
    width = -(-int(rows.lengths.max()) // whole) * whole
    places = context_places(torch.tensor([0, width]), rank, ranks)
    real = torch.arange(rows.tokens.shape[1]) < rows.lengths.unsqueeze(1)
    tokens = _to_width(torch.where(real, rows.tokens, 0), width)[:, places]
    weights = _to_width(_by_column(sample, rows.tokens.shape[1]), width)[:, places]
    return TokenRows(tokens, torch.full_like(rows.lengths, places.numel())), TokenSample(None, weights)


def _by_column(sample: TokenSample, width: int) -> Tensor:
    """The weights of a sample, `[rows, width]`, each at its token's own column."""
    if sample.positions is None:
        return sample.weights
    return sample.weights.new_zeros(sample.weights.shape[0], width).scatter_add(1, sample.positions, sample.weights)


def _to_width(values: Tensor, width: int) -> Tensor:
    return pad(values, (0, max(0, width - values.shape[1])))[:, :width]
