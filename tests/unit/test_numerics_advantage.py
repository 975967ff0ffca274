"""Group-relative advantages, exact values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tasks.numerics.advantage import (
    AdvantageSettings,
    Baseline,
    Scale,
    advantages,
    zero_variance,
)

EPS = 1e-6

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def group_advantages(rewards: Tensor, eps: float) -> Tensor:
    """GRPO's, the default settings."""
    return advantages(rewards, torch.ones_like(rewards, dtype=torch.int64), AdvantageSettings(eps=eps))


def test_std_has_n_minus_one() -> None:
    # Mean 1/4, sum of squares 3/4, std sqrt(3/4 / 3) = 1/2.
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), EPS)
    assert got.dtype == torch.float64
    assert got[0].tolist() == pytest.approx([0.75 / (0.5 + EPS)] + [-0.25 / (0.5 + EPS)] * 3, rel=1e-14)


def test_group_of_two() -> None:
    got = group_advantages(torch.tensor([[0.0, 1.0]]), 0.0)
    assert got[0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-15)


def test_epsilon_is_added_to_the_std() -> None:
    got = group_advantages(torch.tensor([[3.0, 1.0]]), 0.5)
    assert got[0].tolist() == pytest.approx([1 / (math.sqrt(2) + 0.5), -1 / (math.sqrt(2) + 0.5)], rel=1e-15)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3, 1e20, 1e-30])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    rewards = torch.full((2, size), value)
    rewards[1, 0] = 2 * value + 1
    got = group_advantages(rewards, EPS)
    assert got[0].tolist() == [0.0] * size
    assert zero_variance(rewards).tolist() == [True, False]


def test_equal_rewards_give_zero_even_without_epsilon() -> None:
    assert group_advantages(torch.full((1, 3), 0.1), 0.0).tolist() == [[0.0, 0.0, 0.0]]


def test_groups_do_not_touch_each_other() -> None:
    a, b = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[100.0, -3.0, 7.0]])
    both = group_advantages(torch.cat([a, b]), EPS)
    assert torch.equal(both, torch.cat([group_advantages(a, EPS), group_advantages(b, EPS)]))


def test_zero_variance_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0 + 2.0**-23]])
    assert zero_variance(rewards).tolist() == [True, False, True, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20))
def test_equals_numpy_and_sums_to_zero(rewards: list[float]) -> None:
    got = group_advantages(torch.tensor([rewards]), EPS)[0].numpy()
    r = np.array(rewards, dtype=np.float64)
    want = np.zeros_like(r) if np.ptp(r) == 0 else (r - r.mean()) / (r.std(ddof=1) + EPS)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-7)
    assert abs(got.sum()) < 1e-6


def test_integer_and_boolean_rewards_are_accepted() -> None:
    want = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]), EPS)
    assert torch.equal(group_advantages(torch.tensor([[1, 0, 0]]), EPS), want)
    assert torch.equal(group_advantages(torch.tensor([[True, False, False]]), EPS), want)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 2, 2), (1, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    text = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"rewards must be \[groups, size >= 2\], got {text}"):
        group_advantages(torch.zeros(shape), EPS)


def lengths_like(rewards: Tensor) -> Tensor:
    return torch.full(rewards.shape, 5)


def numpy_advantages(r: FloatArray, lengths: IntArray, chosen: AdvantageSettings) -> FloatArray:
    """Sample by sample from the published formulas; whitening over a list of all tokens."""
    a = np.zeros_like(r)
    for g, i in np.ndindex(*r.shape):
        others = np.delete(r[g], i)
        if np.ptp(r[g]) == 0:
            continue
        a[g, i] = r[g, i] - (r[g].mean() if chosen.baseline == "group_mean" else others.mean())
        if chosen.scale == "group_std":
            a[g, i] /= r[g].std(ddof=1) + chosen.eps
        elif chosen.scale == "leave_one_out_std" and np.ptp(others) > 0:
            a[g, i] /= others.std(ddof=1) + chosen.eps
    if chosen.scale != "batch_whitened":
        return a
    tokens = np.repeat(a.ravel(), lengths.ravel())
    if tokens.size == 0 or np.ptp(tokens) == 0:
        return np.zeros_like(a)
    return (a - tokens.mean()) / (tokens.std() + chosen.eps)


def test_no_scale_by_hand() -> None:
    chosen = AdvantageSettings(scale="none")
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert advantages(rewards, lengths_like(rewards), chosen).tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_leave_one_out_baseline_by_hand() -> None:
    chosen = AdvantageSettings("leave_one_out", "none")
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 6.0]])
    got = advantages(rewards, lengths_like(rewards), chosen)
    assert got[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    assert got[1].tolist() == pytest.approx([3 - 3, 1 - 11 / 3, 2 - 10 / 3, 6 - 2], rel=1e-14, abs=1e-15)


def test_leave_one_out_of_two_is_the_difference() -> None:
    rewards = torch.tensor([[0.25, 1.0]])
    got = advantages(rewards, lengths_like(rewards), AdvantageSettings("leave_one_out", "none"))
    assert got.tolist() == [[-0.75, 0.75]]


def test_leave_one_out_std_by_hand() -> None:
    # The others of the first sample are 0, 1/2, 0: mean 1/6, squares 1/36 + 4/36 + 1/36, over n - 2 = 2: 1/12.
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    got = advantages(rewards, lengths_like(rewards), AdvantageSettings("leave_one_out", "leave_one_out_std"))
    assert float(got[0, 0]) == pytest.approx((1 - 1 / 6) / (math.sqrt(1 / 12) + EPS), rel=1e-14)
    # Those of the third are 1, 0, 0: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2).
    assert float(got[0, 2]) == pytest.approx((0.5 - 1 / 3) / (math.sqrt(1 / 3) + EPS), rel=1e-13)


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_the_only_solved_answer_is_not_divided_by_epsilon(wrong: float) -> None:
    rewards = torch.tensor([[1.0, wrong, wrong, wrong]], dtype=torch.float64)
    got = advantages(rewards, lengths_like(rewards), AdvantageSettings("leave_one_out", "leave_one_out_std"))
    assert float(got[0, 0]) == pytest.approx(1 - wrong, rel=1e-14)


def test_leave_one_out_std_needs_three_samples() -> None:
    rewards = torch.tensor([[1.0, 0.0]])
    with pytest.raises(ValueError, match="leave_one_out_std on groups of 2: allowed are groups of at least 3"):
        advantages(rewards, lengths_like(rewards), AdvantageSettings(scale="leave_one_out_std"))


def test_whitening_by_hand() -> None:
    # Centred 1/2, -1/2, 0, 0 on 1, 3, 2, 2 tokens: mean (1/2 - 3/2) / 8 = -1/8,
    # variance (0.625^2 + 3 * 0.375^2 + 4 * 0.125^2) / 8 = 0.875 / 8.
    rewards, lengths = torch.tensor([[1.0, 0.0], [3.0, 3.0]]), torch.tensor([[1, 3], [2, 2]])
    got = advantages(rewards, lengths, AdvantageSettings(scale="batch_whitened"))
    scale = math.sqrt(0.875 / 8) + EPS
    assert got.flatten().tolist() == pytest.approx([0.625 / scale, -0.375 / scale] + [0.125 / scale] * 2, rel=1e-14)


def test_an_empty_response_does_not_weigh_in_whitening() -> None:
    chosen = AdvantageSettings(scale="batch_whitened", eps=0.0)
    rewards, lengths = torch.tensor([[5.0, 3.0, 1.0]]), torch.tensor([[0, 4, 4]])
    # Tokens: four at 0, four at -2; mean -1, std 1. The sample without tokens keeps a finite value.
    assert advantages(rewards, lengths, chosen).tolist() == [[3.0, 1.0, -1.0]]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "leave_one_out_std", "batch_whitened", "none"])
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e20])
def test_a_batch_of_equal_rewards_is_exactly_zero(baseline: Baseline, scale: Scale, eps: float, value: float) -> None:
    rewards = torch.full((2, 3), value, dtype=torch.float64)
    rewards[1] += 1
    got = advantages(rewards, torch.tensor([[3, 0, 7], [1, 1, 1]]), AdvantageSettings(baseline, scale, eps))
    assert got.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 7, 0]])
def test_whitening_of_no_or_equal_tokens_is_exactly_zero(lengths: list[int], eps: float) -> None:
    rewards = torch.tensor([[1.0, 0.1, 0.3]], dtype=torch.float64)
    got = advantages(rewards, torch.tensor([lengths]), AdvantageSettings(scale="batch_whitened", eps=eps))
    assert got.tolist() == [[0.0] * 3]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(3, 6),
    st.sampled_from(["group_mean", "leave_one_out"]),
    st.sampled_from(["group_std", "leave_one_out_std", "batch_whitened", "none"]),
    st.sampled_from([0.0, 1e-6, 0.5]),
)
def test_equals_the_formulas_in_numpy(
    seed: int, groups: int, size: int, baseline: Baseline, scale: Scale, eps: float
) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct rewards, so that equal groups and equal remainders occur.
    rewards = rng.choice([0.0, 0.5, 1.0], size=(groups, size))
    lengths = rng.integers(0, 6, size=(groups, size))
    # Tokens that are equal but for a rounding are whitened by eps alone: without one, by a std of roundings.
    chosen = AdvantageSettings(baseline, scale, max(eps, 1e-6) if scale == "batch_whitened" else eps)
    got = advantages(torch.from_numpy(rewards), torch.from_numpy(lengths), chosen).numpy()
    want = numpy_advantages(rewards, lengths, chosen)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["group_std", "leave_one_out_std", "none"])
def test_lengths_are_read_by_whitening_alone(scale: Scale) -> None:
    rewards, chosen = torch.tensor([[1.0, 0.0, 0.5]]), AdvantageSettings(scale=scale)
    lengths = torch.tensor([[1, 0, 99]])
    assert torch.equal(advantages(rewards, lengths, chosen), advantages(rewards, lengths_like(rewards), chosen))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    rewards = torch.tensor([[1.0, bad]])
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        advantages(rewards, lengths_like(rewards), AdvantageSettings())


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_a_bad_epsilon_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=rf"eps = {eps}: allowed are finite numbers >= 0"):
        AdvantageSettings(eps=eps)


def test_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths must be \(1, 2\) like rewards, got \(2,\)"):
        advantages(torch.tensor([[1.0, 0.0]]), torch.tensor([1, 2]), AdvantageSettings())
