"""|d| by position in the response and top offending tokens against loops over tokens; correlation of probabilities."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.mismatch import NonFiniteScoreError, probability_pearson
from tasks.numerics.mismatch_detail import (
    POSITION_EDGES,
    PositionBucket,
    TokenOffence,
    abs_diff_by_position,
    position_metrics,
    top_offenders,
)


def fp64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def batch(*rows: str) -> Tensor:
    """Mask from rows such as "..xxx": x is a response token."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def with_differences(d: Tensor, q: float = -250.0) -> tuple[Tensor, Tensor]:
    return (d + q).to(torch.float64), torch.full(d.shape, q, dtype=torch.float64)


def ids(mask: Tensor) -> Tensor:
    return torch.arange(mask.numel()).reshape(mask.shape) + 100


def test_position_counts_from_the_first_response_token_not_from_the_column() -> None:
    # Prompts of 1, 3 and 0 tokens; |d| is 1, 2, 4, 8 at positions 0, 1, 2, 3 of each response, garbage elsewhere.
    mask = batch(".xxxx.", "...xx.", "xxx...")
    d = torch.full(mask.shape, 99.0)
    d[0, 1:5] = torch.tensor([1.0, -2.0, 4.0, -8.0])
    d[1, 3:5] = torch.tensor([-1.0, 2.0])
    d[2, 0:3] = torch.tensor([1.0, 2.0, -4.0])
    got = abs_diff_by_position(*with_differences(d), mask, edges=(0, 1, 2, 3))
    assert [(b.start, b.end, b.tokens, b.mean_abs, b.max_abs) for b in got] == [
        (0, 1, 3, 1.0, 1.0),
        (1, 2, 3, 2.0, 2.0),
        (2, 3, 2, 4.0, 4.0),
        (3, None, 1, 8.0, 8.0),
    ]
    assert [b.token_mult_prob_error for b in got] == pytest.approx([math.exp(x) for x in (1, 2, 4, 8)], rel=1e-14)


def test_masked_tokens_inside_a_response_keep_their_place() -> None:
    mask = batch(".x..x")
    got = abs_diff_by_position(*with_differences(torch.tensor([[0.0, 1.0, 0.0, 0.0, 3.0]])), mask, edges=(0, 1, 3))
    assert [(b.tokens, b.mean_abs) for b in got] == [(1, 1.0), (0, 0.0), (1, 3.0)]


def test_first_tile_boundary_of_a_long_response_starts_a_bucket() -> None:
    # Exact up to position 127, then off by 1e-3: what a second tile of 128 that computes differently looks like.
    mask = torch.ones(2, 8192, dtype=torch.bool)
    d = -1e-3 * (torch.arange(8192) >= 128).to(torch.float64).expand(2, -1)
    got = abs_diff_by_position(*with_differences(d, q=-1.0), mask)
    assert [b.start for b in got] == list(POSITION_EDGES) and [b.end for b in got] == [*POSITION_EDGES[1:], None]
    assert sum(b.tokens for b in got) == 2 * 8192
    assert [b.mean_abs for b in got if b.start < 128] == [0.0] * 6
    later = [b for b in got if b.start >= 128 and b.tokens]
    assert [b.start for b in later] == [128, 192, 256, 512, 1024, 2048, 4096]
    assert [b.mean_abs for b in later] == pytest.approx([1e-3] * 7, rel=1e-10)
    assert [b.token_mult_prob_error for b in later] == pytest.approx([math.exp(1e-3)] * 7, rel=1e-12)
    # Nothing reaches these, so they are 0 here and absent from the metrics.
    assert got[-2:] == (PositionBucket(8192, 16384, 0, 0.0, 0.0, 0.0), PositionBucket(16384, None, 0, 0.0, 0.0, 0.0))
    assert "mismatch/abs_diff_by_position/04096-08191" in position_metrics(got) and len(position_metrics(got)) == 13


def test_differences_up_to_200_are_unclamped_except_in_the_exponential() -> None:
    mask = batch("xx.")
    (got,) = abs_diff_by_position(*with_differences(torch.tensor([[200.0, -100.0, 200.0]])), mask, edges=(0,))
    assert (got.tokens, got.mean_abs, got.max_abs) == (2, 150.0, 200.0)
    assert got.token_mult_prob_error == pytest.approx(math.exp(20), rel=1e-14)


@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_missing_rollout_logprob_counts_as_no_difference_by_position(absent: float) -> None:
    p, q = torch.full((1, 2), -1.0), torch.tensor([[absent, -1.5]])
    (got,) = abs_diff_by_position(p, q, batch("xx"), edges=(0,))
    assert (got.tokens, got.mean_abs, got.max_abs) == (2, 0.25, 0.5)


@pytest.mark.parametrize("shape", [(3, 4), (0, 5), (3, 0)])
def test_no_valid_token_gives_empty_buckets_and_no_offender(shape: tuple[int, int]) -> None:
    p, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    buckets = abs_diff_by_position(p, p, mask)
    assert len(buckets) == len(POSITION_EDGES)
    assert {(b.tokens, b.mean_abs, b.max_abs, b.token_mult_prob_error) for b in buckets} == {(0, 0.0, 0.0, 0.0)}
    assert position_metrics(buckets) == {}
    assert top_offenders(p, p, mask, ids(mask), 3) == ()


def test_position_metric_names() -> None:
    buckets = [
        PositionBucket(0, 8, 4, 0.5, 1.0, 1.1),
        PositionBucket(8, 16, 0, 0.0, 0.0, 0.0),
        PositionBucket(8192, 16384, 1, 0.25, 0.25, 1.2),
        PositionBucket(16384, None, 2, 0.125, 0.5, 1.3),
    ]
    assert position_metrics(buckets) == {
        "mismatch/abs_diff_by_position/00000-00007": 0.5,
        "mismatch/abs_diff_by_position/08192-16383": 0.25,
        "mismatch/abs_diff_by_position/16384-up": 0.125,
    }


@pytest.mark.parametrize("edges", [(), (1, 2), (0, 8, 8), (0, 16, 8), (-1, 0)])
def test_edges_that_lose_or_repeat_a_position_are_refused(edges: tuple[int, ...]) -> None:
    p = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="edges must ascend strictly from 0"):
        abs_diff_by_position(p, p, batch("xx"), edges)


def test_offenders_by_hand() -> None:
    mask = batch("..xxx", ".xx..")
    p = torch.tensor([[9.0, 9.0, -1.0, -4.0, -0.5], [9.0, -2.0, -3.0, 9.0, 9.0]])
    q = torch.tensor([[-9.0, 0.0, -1.25, -1.0, -0.5], [0.0, -202.0, -1.0, 0.0, 0.0]])
    got = top_offenders(p, q, mask, ids(mask), 3)
    assert got == (
        TokenOffence(sample=1, position=0, token_id=106, p=-2.0, q=-202.0, d=200.0),
        TokenOffence(sample=0, position=1, token_id=103, p=-4.0, q=-1.0, d=-3.0),
        TokenOffence(sample=1, position=1, token_id=107, p=-3.0, q=-1.0, d=-2.0),
    )
    assert all(type(value) in (int, float) for value in vars(got[0]).values())
    assert top_offenders(p, q, mask, ids(mask), 0) == ()
    assert len(top_offenders(p, q, mask, ids(mask), 99)) == 5


def test_equal_offenders_come_by_sample_then_position() -> None:
    mask = torch.ones(40, 50, dtype=torch.bool)
    d = torch.where(torch.arange(2000).reshape(40, 50) % 3 == 0, 0.5, -0.5)
    got = top_offenders(*with_differences(d), mask, ids(mask), 1999)
    assert [(t.sample, t.position) for t in got] == [divmod(i, 50) for i in range(1999)]


@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_missing_rollout_logprobs_are_no_offenders(absent: float) -> None:
    p, q = torch.full((1, 3), -1.0), torch.tensor([[absent, -1.0, -1.5]])
    got = top_offenders(p, q, batch("xxx"), ids(batch("xxx")), 3)
    # An agreeing token is still ranked, a missing one is not, and positions are not shifted by it.
    assert [(t.position, t.d) for t in got] == [(2, 0.5), (1, 0.0)]


def test_non_finite_score_is_an_error_also_where_q_is_missing() -> None:
    p, q, mask = torch.tensor([[-1.0, math.inf]]), torch.tensor([[-1.0, math.nan]]), batch("xx")
    with pytest.raises(NonFiniteScoreError):
        top_offenders(p, q, mask, ids(mask), 1)
    with pytest.raises(NonFiniteScoreError):
        abs_diff_by_position(p, q, mask)


def test_wrong_arguments_are_refused() -> None:
    p, mask = torch.zeros(1, 2), batch("xx")
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        top_offenders(p, p, mask, ids(mask), -1)
    with pytest.raises(ValueError, match=r"tokens must have the mask's shape \(1, 2\), got \(2,\)"):
        top_offenders(p, p, mask, torch.tensor([1, 2]), 1)
    with pytest.raises(ValueError, match="must share one shape"):
        top_offenders(p, p, mask.to(torch.int64), ids(mask), 1)
    with pytest.raises(ValueError, match="must share one shape"):
        abs_diff_by_position(p, torch.zeros(1, 1), mask)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.integers(0, 8))
def test_both_equal_a_loop_over_tokens(data: st.DataObject, rows: int, columns: int, count: int) -> None:
    n = rows * columns
    few = st.sampled_from([0.0, -0.5, -1.0, -30.0, -1e4])
    p, q = (
        torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n)), dtype=torch.float64).reshape(rows, columns)
        for values in (few, st.one_of(few, st.just(math.nan)))
    )
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))).reshape(rows, columns)
    edges = (0, *sorted(data.draw(st.sets(st.integers(1, 13), max_size=4))))

    found: list[TokenOffence] = []
    by_position: dict[int, list[float]] = {}
    for i in range(rows):
        start = None
        for j in range(columns):
            if not mask[i, j]:
                continue
            start = j if start is None else start
            pv, qv = float(p[i, j]), float(q[i, j])
            by_position.setdefault(j - start, []).append(0.0 if math.isnan(qv) else abs(pv - qv))
            if not math.isnan(qv):
                found.append(TokenOffence(i, j - start, int(ids(mask)[i, j]), pv, qv, pv - qv))
    want = sorted(found, key=lambda t: (-abs(t.d), t.sample, t.position))[:count]
    assert top_offenders(p, q, mask, ids(mask), count) == tuple(want)

    buckets = abs_diff_by_position(p, q, mask, edges)
    for bucket, start, end in zip(buckets, edges, (*edges[1:], None), strict=True):
        inside = [v for k, vs in by_position.items() if k >= start and (end is None or k < end) for v in vs]
        assert (bucket.start, bucket.end, bucket.tokens) == (start, end, len(inside))
        assert bucket.max_abs == max(inside, default=0.0)
        assert bucket.mean_abs == pytest.approx(sum(inside) / max(1, len(inside)), rel=1e-14)
        error = sum(math.exp(min(20.0, v)) for v in inside) / max(1, len(inside))
        assert bucket.token_mult_prob_error == pytest.approx(error, rel=1e-14)
    assert math.isfinite(sum(position_metrics(buckets).values()))


def exact_pearson(p: Tensor, q: Tensor) -> float:
    with localcontext() as context:
        context.prec = 60
        sides = [[Decimal(value).exp() for value in side.tolist()] for side in (p, q)]
        means = [sum(side, Decimal(0)) / len(side) for side in sides]
        x, y = ([value - mean for value in side] for side, mean in zip(sides, means, strict=True))
        xy, xx, yy = (sum((a * b for a, b in zip(*pair, strict=True)), Decimal(0)) for pair in ((x, y), (x, x), (y, y)))
        return float(xy / (xx * yy).sqrt())


def test_pearson_by_hand() -> None:
    # Deviations (1/6, -1/12, -1/12) and (-1/12, -1/12, 1/6): covariance -3/144, variances 6/144.
    assert probability_pearson(fp64(0.5, 0.25, 0.25).log(), fp64(0.25, 0.25, 0.5).log()) == pytest.approx(-0.5)
    # (1, 2, 3) and (1, 3, 2): covariance 1, variances 2. At 1e-200 below 1 their squares are 0 in fp64.
    x, y = -1e-200 * fp64(1.0, 2.0, 3.0), -1e-200 * fp64(1.0, 3.0, 2.0)
    assert probability_pearson(x, y) == pytest.approx(0.5, rel=1e-14)
    # Any two tokens lie on a line, rising or falling.
    assert probability_pearson(fp64(-1.0, -2.0), fp64(-0.1, -0.3)) == pytest.approx(1.0, abs=1e-15)
    assert probability_pearson(fp64(-1.0, -2.0), fp64(-0.3, -0.1)) == pytest.approx(-1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("p", "q"), [(fp64(), fp64()), (fp64(-1.0), fp64(-2.0)), (fp64(-0.1).expand(7), torch.linspace(-3, 0, 7).double())]
)
def test_pearson_of_a_constant_side_is_zero(p: Tensor, q: Tensor) -> None:
    assert probability_pearson(p, q) == probability_pearson(q, p) == 0.0


@pytest.mark.parametrize(
    ("offset", "scale"), [(0.0, 1e-13), (0.0, 1e-6), (0.0, 30.0), (-5.0, 1e-9), (-800.0, 1.0), (-9000.0, 30.0)]
)
def test_pearson_of_confident_and_of_improbable_tokens(offset: float, scale: float) -> None:
    # Probabilities within 1e-13 of 1 lose all digits, and those of e^-800 all bits, when formed naively.
    g = torch.Generator().manual_seed(2)
    p, q = (offset - scale * torch.rand(20, generator=g, dtype=torch.float64) for _ in range(2))
    # Against the log-probabilities as rounded next to the offset, so that no error is left but the function's.
    assert probability_pearson(p, q) == pytest.approx(exact_pearson(p, q), rel=1e-12, abs=1e-14)


def test_pearson_of_nearly_equal_vectors() -> None:
    g = torch.Generator().manual_seed(3)
    p = -torch.rand(50, generator=g, dtype=torch.float64)
    q = p + 1e-6 * torch.randn(50, generator=g, dtype=torch.float64)
    got = probability_pearson(p, q)
    assert got < 1.0 and got == pytest.approx(exact_pearson(p, q), rel=0, abs=4e-16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-9, 0), min_size=3, max_size=9), st.floats(-9, 0))
def test_pearson_does_not_see_a_common_factor_and_stays_within_one(p: list[float], shift: float) -> None:
    x = fp64(*p)
    # Probabilities that differ by a factor lie on a line; rounded, their correlation often passes 1 by an ulp.
    got = probability_pearson(x, x + shift)
    assert got <= 1.0
    assert got == pytest.approx(1.0, abs=1e-12) or float(x.max() - x.min()) < 1e-3
    assert got == probability_pearson(x + shift, x)
    assert all(probability_pearson(v, v - 1.0) <= 1.0 for v in -torch.rand(20, 7, generator=seeded()).double())
