"""Learning rates by hand, and what every schedule keeps to."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Optimizer
from tasks.engines.torch_optimizer import build_optimizer
from tasks.numerics.lr_schedule import LearningRate


def test_a_linear_fall_by_hand() -> None:
    rate = LearningRate(peak=1.0, warmup=2, shape="linear", low=0.2, end=6)
    assert [rate.at(done) for done in range(8)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_half_a_cosine_by_hand() -> None:
    rate = LearningRate(peak=3.0, shape="cosine", low=1.0, end=4)
    # cos of 45, 90, 135 and 180 degrees.
    assert [rate.at(done) for done in range(5)] == pytest.approx([2 + 0.5**0.5, 2.0, 2 - 0.5**0.5, 1.0, 1.0])


def test_constant_is_what_the_torch_optimizer_does() -> None:
    """Up to 5 updates of warm-up, then the rate itself."""
    settings = Optimizer()
    weights = {"w": torch.nn.Parameter(torch.zeros(2))}
    optimizer = build_optimizer(weights, lambda: {"w": torch.zeros(2)}, settings)
    rate = LearningRate(settings.learning_rate, settings.warmup_steps)
    for done in range(8):
        optimizer.updates = done
        assert rate.at(done) == pytest.approx(optimizer.learning_rate, rel=1e-15)


@given(
    st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 9), st.integers(1, 20), st.floats(0, 1), st.data()
)
def test_rises_then_falls_and_stays_within(
    shape: Literal["constant", "linear", "cosine"], warmup: int, fall: int, low: float, data: st.DataObject
) -> None:
    rate = LearningRate(1.0, warmup, shape, low, warmup + fall)
    rates = [rate.at(done) for done in range(warmup + fall + 3)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) <= 1.0
    assert min(rates[warmup:]) >= min(low, 1.0) - 1e-12
    assert rates[-1] == pytest.approx(1.0 if shape == "constant" else low)
    # A continued run asks for the same rates.
    done = data.draw(st.integers(0, len(rates) - 1))
    assert LearningRate(1.0, warmup, shape, low, warmup + fall).at(done) == rates[done]


@pytest.mark.parametrize("end", [None, 3])
def test_a_fall_without_room_is_refused(end: int | None) -> None:
    with pytest.raises(ValueError, match="above warmup 3 for a linear fall"):
        LearningRate(1.0, 3, "linear", 0.0, end)
