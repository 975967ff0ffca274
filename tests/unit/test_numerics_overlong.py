"""The soft overlong punishment: the paper's setting by hand, its bounds, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.numerics.overlong import overlong_penalty


def test_the_papers_setting_by_hand() -> None:
    # Limit 20480 with a buffer of 4096: punished from 16384 on.
    lengths = torch.tensor([0, 1, 16384, 16385, 17408, 18432, 20479, 20480, 20481, 40000])
    got = overlong_penalty(lengths, 20480, 4096, 1.0)
    assert got.dtype == torch.float64
    assert got.tolist() == [0.0, 0.0, 0.0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1.0, -1.0, -1.0]


def test_no_punishment_is_plus_zero() -> None:
    assert math.copysign(1.0, float(overlong_penalty(torch.tensor([3]), 10, 5, 1.0))) == 1.0


def test_penalty_scales_and_the_shape_is_kept() -> None:
    got = overlong_penalty(torch.tensor([[6, 8], [10, 12]], dtype=torch.int32), 10, 4, 0.3)
    assert got.tolist() == [[0.0, pytest.approx(-0.15, rel=1e-15)], [-0.3, -0.3]]


def test_a_buffer_of_the_whole_limit_punishes_from_the_first_token() -> None:
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4, 1.0).tolist() == [0.0, -0.25, -1.0]


def test_a_buffer_of_one_token_punishes_the_limit_alone() -> None:
    assert overlong_penalty(torch.tensor([3, 4, 5]), 4, 1, 2.0).tolist() == [0.0, -2.0, -2.0]


def test_no_samples() -> None:
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), 4, 1, 2.0).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.data(), st.floats(0, 10))
def test_equals_the_published_cases(limit: int, data: st.DataObject, penalty: float) -> None:
    buffer, length = data.draw(st.integers(1, limit)), data.draw(st.integers(0, 2 * limit))
    if length <= limit - buffer:
        want = 0.0
    elif length <= limit:
        want = ((limit - buffer) - length) / buffer * penalty
    else:
        want = -penalty
    got = float(overlong_penalty(torch.tensor(length), limit, buffer, penalty))
    assert got == pytest.approx(want, rel=1e-14, abs=1e-300) and -penalty <= got <= 0


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=rf"buffer = {buffer}: allowed are 1 to limit = 10"):
        overlong_penalty(torch.tensor([1]), 10, buffer, 1.0)


@pytest.mark.parametrize("penalty", [-1.0, math.nan, math.inf])
def test_a_penalty_that_rewards_or_is_not_finite_is_refused(penalty: float) -> None:
    with pytest.raises(ValueError, match=rf"penalty = {penalty}: allowed are finite numbers >= 0"):
        overlong_penalty(torch.tensor([1]), 10, 5, penalty)
