"""Group-relative advantages, exact values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.numerics.advantage import group_advantages, zero_variance

EPS = 1e-6


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
