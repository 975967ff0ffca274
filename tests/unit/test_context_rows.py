"""Columns of padded rows on context-parallel ranks: together they are the rows, each real token once."""

from __future__ import annotations

import pytest
import torch

from tasks.engines.context_rows import context_share
from tasks.engines.protocols import TokenRows
from tasks.numerics.token_sample import sample_tokens


def _rows() -> TokenRows:
    lengths = torch.tensor([3, 17, 9])
    tokens = torch.arange(1, 1 + 3 * 20).view(3, 20)
    return TokenRows(tokens, lengths)


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("multiple", [1, 8])
def test_ranks_have_every_sampled_token_once(limit: int | None, ranks: int, multiple: int) -> None:
    rows = _rows()
    sample = sample_tokens(rows.lengths, 20, limit, seed=5)
    shares = [context_share(rows, sample, rank, ranks, multiple) for rank in range(ranks)]
    assert len({share.tokens.shape for share, _ in shares}) == 1
    assert shares[0][0].tokens.shape[1] % multiple == 0
    found: list[dict[int, int]] = [{}, {}, {}]
    for share, seen in shares:
        assert seen.positions is None and seen.weights.shape == share.tokens.shape
        assert share.lengths.tolist() == [share.tokens.shape[1]] * 3
        for row in range(3):
            for token, weight in zip(share.tokens[row].tolist(), seen.weights[row].tolist(), strict=True):
                if weight:
                    assert token not in found[row]
                    found[row][token] = weight
    for row, length in enumerate(rows.lengths.tolist()):
        assert sum(found[row].values()) == length
        columns = range(length) if sample.positions is None else sample.positions[row].tolist()
        weights = [1] * length if sample.positions is None else sample.weights[row].tolist()
        expected = {int(rows.tokens[row, c]): w for c, w in zip(columns, weights, strict=True) if w}
        assert found[row] == expected


def test_a_rank_has_both_ends_of_a_row() -> None:
    rows = TokenRows(torch.arange(16).view(1, 16), torch.tensor([16]))
    sample = sample_tokens(rows.lengths, 16, None)
    assert context_share(rows, sample, 0, 2, 1)[0].tokens.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert context_share(rows, sample, 1, 2, 4)[0].tokens.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]


def test_one_rank_has_everything() -> None:
    rows = _rows()
    sample = sample_tokens(rows.lengths, 20, None)
    assert context_share(rows, sample, 0, 1, 8) == (rows, sample)
