"""Sub-sampling of tokens: which are drawn, what they stand for, and the bound on what the others can hold."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.calibration import PARTS, CalibrationObserver, Scales, scale_from_amax
from tasks.numerics.kv_scales import scale_keys
from tasks.numerics.token_sample import TokenSample, sample_tokens, subsample_bound
from tests.unit.numerics_support import generator


def pieces(length: int, limit: int) -> list[range]:
    """The documented pieces, in whole numbers."""
    return [range(i * length // limit, (i + 1) * length // limit) for i in range(limit)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 45), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_one_token_of_each_piece_is_drawn_and_stands_for_it(lengths: list[int], limit: int, seed: int) -> None:
    width = 40
    sample = sample_tokens(torch.tensor(lengths), width, limit, seed)
    assert sample.weights.sum(1).tolist() == lengths, "the weights of a row are its real tokens"
    if sample.positions is None:
        assert limit >= width
        return
    u = np.random.Generator(np.random.Philox(key=seed)).random(len(lengths) * limit)
    for row, length in enumerate(lengths):
        for i, piece in enumerate(pieces(length, limit)):
            assert int(sample.weights[row, i]) == len(piece)
            if piece:
                assert int(sample.positions[row, i]) == piece[math.floor(u[row * limit + i] * len(piece))]


def test_short_rows_are_measured_whole_and_empty_ones_not_at_all() -> None:
    sample = sample_tokens(torch.tensor([3, 0, 4]), 20, 4, 7)
    assert sample.positions is not None
    for row, length in enumerate((3, 0, 4)):
        drawn = sample.positions[row][sample.weights[row] > 0]
        assert sorted(drawn.tolist()) == list(range(length))
        assert set(sample.weights[row].tolist()) <= {0, 1}


@pytest.mark.parametrize("limit", [None, 6, 7, 1000])
def test_without_a_limit_that_binds_every_real_token_is_in_its_place(limit: int | None) -> None:
    sample = sample_tokens(torch.tensor([6, 0, 2]), 6, limit)
    assert sample.positions is None
    assert sample.weights.tolist() == [[1] * 6, [0] * 6, [1, 1, 0, 0, 0, 0]]
    x = torch.randn(3, 2, 6, 4)
    assert sample.of(x) is x


def test_a_limit_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_sequence must be at least 1 or null, got 0"):
        sample_tokens(torch.tensor([3]), 3, 0)


def test_the_draw_is_the_same_again_and_another_with_another_seed() -> None:
    lengths = torch.full((4,), 4096)
    first, second, other = (sample_tokens(lengths, 4096, 64, seed) for seed in (3, 3, 4))
    assert first.positions is not None and second.positions is not None and other.positions is not None
    assert torch.equal(first.positions, second.positions)
    assert (first.positions != other.positions).float().mean() > 0.9
    assert (first.positions[0] != first.positions[1]).float().mean() > 0.9, "rows draw for themselves"


def test_every_token_of_a_piece_is_drawn_equally_often() -> None:
    counts = Counter()
    for seed in range(300):
        positions = sample_tokens(torch.full((4,), 8), 8, 2, seed).positions
        assert positions is not None
        counts.update(positions.reshape(-1).tolist())
    assert sum(counts.values()) == 2400
    # 600 draws of each of four tokens: a binomial of mean 300 and deviation 15.
    assert all(240 < counts[token] < 360 for token in range(8))


def test_micro_batches_and_values_follow_the_draw() -> None:
    lengths = torch.tensor([9, 5, 12])
    sample = sample_tokens(lengths, 12, 3, 1)
    x = torch.arange(3 * 2 * 12 * 2, dtype=torch.float32).view(3, 2, 12, 2)
    assert sample.positions is not None
    whole = sample.of(x)
    for row, head, i in itertools.product(range(3), range(2), range(3)):
        assert torch.equal(whole[row, head, i], x[row, head, int(sample.positions[row, i])])
    index = torch.tensor([2, 0])
    part = sample.rows(index)
    assert torch.equal(part.of(x[index]), whole[index])
    assert torch.equal(part.weights, sample.weights[index])
    full = sample_tokens(lengths, 12, None).rows(index)
    assert full.positions is None and full.weights.sum(1).tolist() == [12, 9]


IN_USE: Scales = dict.fromkeys(scale_keys(1), 0.01)


def _observe(observer: CalibrationObserver, x: Tensor, sample: TokenSample) -> CalibrationObserver:
    for part in PARTS:
        observer.observe(0, part, sample.of(x), sample.weights)
    return observer


def test_a_drawn_token_counts_as_often_as_the_tokens_it_stands_for() -> None:
    """Two rows of 8 and 2 tokens, at most 2 each: weights 4 and 1; scale 1 saturates above 448."""
    x = torch.full((2, 1, 8, 1), 1.0)
    x[0, 0, :4], x[1, 0, 0] = 1000.0, 2000.0
    in_use: Scales = dict.fromkeys(scale_keys(1), 1.0)
    observer = CalibrationObserver(1, 1.0, 70.0, in_use, subsampled=True)
    result = _observe(observer, x, sample_tokens(torch.tensor([8, 2]), 8, 2, 0)).result()
    assert result.metrics["calibration/saturated_fraction"] == (4 + 1) / 10
    assert result.metrics["calibration/underflow_fraction"] == 0.0
    # Sorted weighted values: 1 five times, 1000 four times, 2000 once; the 7th of 10 is 1000.
    assert set(result.scales.values()) == {scale_from_amax(1000.0, 1.0)}


def test_tokens_that_are_not_drawn_do_not_count() -> None:
    sample = sample_tokens(torch.tensor([50]), 50, 5, 2)
    assert sample.positions is not None
    x = torch.full((1, 1, 50, 1), math.nan)
    x[0, 0, sample.positions[0]] = 3.0
    result = _observe(CalibrationObserver(1, 1.0, 100.0), x, sample).result()
    assert set(result.scales.values()) == {scale_from_amax(3.0, 1.0)}


def test_weighted_shares_are_unbiased() -> None:
    """Over all seeds the mean saturated share is the share over every token, though rows differ in length."""
    g = generator(1)
    x = torch.randn(3, 2, 24, 4, generator=g) * 3
    lengths = torch.tensor([24, 7, 3])
    real = torch.arange(24) < lengths.unsqueeze(1)
    exact = float((x.transpose(1, 2)[real].abs() > 448 * np.float32(0.01)).double().mean())
    shares = []
    for seed in range(400):
        observer = CalibrationObserver(1, 1.0, 100.0, IN_USE)
        metrics = _observe(observer, x, sample_tokens(lengths, 24, 3, seed)).result().metrics
        shares.append(metrics["calibration/saturated_fraction"])
    error = float(np.std(shares)) / math.sqrt(len(shares))
    assert 0.05 < exact < 0.3
    assert abs(float(np.mean(shares)) - exact) < 4 * error


def test_the_bound_is_reported_with_sub_sampling_and_only_then() -> None:
    x = torch.ones(2, 1, 1000, 1)
    lengths = torch.tensor([1000, 600])
    sample = sample_tokens(lengths, 1000, 100, 0)
    plain = _observe(CalibrationObserver(1, 1.0, 100.0), x, sample).result()
    assert plain.metrics == {}
    # 3 amplitudes, N = 1600 tokens, pieces of at most 10: 10 ln(300) / 1600.
    bound = _observe(CalibrationObserver(1, 1.0, 100.0, subsampled=True), x, sample).result().metrics
    assert bound == {"calibration/subsample_bound": pytest.approx(0.035648640468, rel=1e-9)}
    # Half of it is left, under a root: sqrt(10 ln(300) / 3200).
    below = _observe(CalibrationObserver(1, 1.0, 99.0, subsampled=True), x, sample).result().metrics
    assert below == {"calibration/subsample_bound": pytest.approx(0.133507753479, rel=1e-9)}
    whole = _observe(CalibrationObserver(1, 1.0, 100.0, subsampled=True), x, sample_tokens(lengths, 1000, None))
    assert whole.result().metrics == {"calibration/subsample_bound": 0.0}


def test_two_ranks_that_saw_the_same_tokens_do_not_halve_the_bound() -> None:
    x, sample = torch.ones(1, 1, 1000, 1), sample_tokens(torch.tensor([1000]), 1000, 100, 0)
    alone = _observe(CalibrationObserver(1, 1.0, 100.0, subsampled=True), x, sample)
    merged = CalibrationObserver(1, 1.0, 100.0, subsampled=True, replicas=2)
    for _ in range(2):
        merged.merge(_observe(CalibrationObserver(1, 1.0, 100.0, subsampled=True), x, sample).state_dict())
    assert merged.result().metrics == alone.result().metrics


def test_the_bound_by_hand_and_at_its_ends() -> None:
    assert subsample_bound(1e6, 8, 108) == pytest.approx(8 * math.log(10800) / 1e6, rel=1e-12)
    assert subsample_bound(1e6, 8, 108, 99.9) == pytest.approx(math.sqrt(8 * math.log(10800) / 2e6), rel=1e-12)
    assert subsample_bound(1e6, 1, 108) == subsample_bound(0, 0, 3) == subsample_bound(1e6, 1, 3, 50.0) == 0.0
    assert subsample_bound(10, 10, 3) == subsample_bound(10, 10, 3, 50.0) == 1.0
    # With equal pieces and one amplitude, (1 - eps)^n <= failure at the stated eps.
    n, size = 50, 20
    assert (1 - subsample_bound(n * size, size, 1, failure=0.05)) ** n <= 0.05


def _draws(lengths: list[int], limit: int) -> tuple[list[list[int]], int, int]:
    """Pieces over all tokens of all rows, their number, and the size of the largest."""
    made, start = [], 0
    for length in lengths:
        made += [[start + t for t in piece] for piece in pieces(length, limit) if piece]
        start += length
    return made, start, max(map(len, made))


@pytest.mark.parametrize(("lengths", "limit"), [([6, 5], 2), ([9], 3), ([4, 4, 2], 2), ([8, 1], 3)])
@pytest.mark.parametrize("failure", [0.05, 0.3, 0.7])
def test_the_bound_holds_against_every_possible_draw(lengths: list[int], limit: int, failure: float) -> None:
    """Exact probability, by enumeration, that more than eps of the tokens exceed the drawn maximum."""
    groups, total, largest = _draws(lengths, limit)
    eps = subsample_bound(total, largest, 1, failure=failure)
    draws = list(itertools.product(*groups))
    g = np.random.default_rng(0)
    orders = [np.arange(total), np.arange(total)[::-1], *(g.permutation(total) for _ in range(20))]
    for values in orders:
        failures = sum(int((values > max(values[list(draw)])).sum()) > eps * total for draw in draws)
        assert failures / len(draws) <= failure


@pytest.mark.parametrize(("lengths", "limit", "percentile"), [([8, 8], 4, 75.0), ([12, 3], 5, 60.0), ([15], 7, 50.0)])
@pytest.mark.parametrize("failure", [0.3, 0.7])
def test_the_bound_of_a_percentile_holds_against_every_possible_draw(
    lengths: list[int], limit: int, percentile: float, failure: float
) -> None:
    groups, total, largest = _draws(lengths, limit)
    eps = subsample_bound(total, largest, 1, percentile, failure)
    allowed = 1 - percentile / 100 + eps
    assert allowed < 1, "else the bound says nothing"
    g = np.random.default_rng(1)
    for values in (np.arange(total), np.arange(total)[::-1], g.permutation(total), g.permutation(total)):
        failures = draws = 0
        for draw in itertools.product(*groups):
            weighted = sorted((values[token], len(group)) for token, group in zip(draw, groups, strict=True))
            reached = np.cumsum([weight for _, weight in weighted])
            amplitude = weighted[int(np.searchsorted(reached, percentile / 100 * total - 1e-9))][0]
            failures += int((values > amplitude).sum()) > allowed * total + 1e-9
            draws += 1
        assert failures / draws <= failure
