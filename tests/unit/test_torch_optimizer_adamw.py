"""AdamW's update against float64, Kahan summation and weight clipping against values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.adamw import (
    AdamWSettings,
    adamw_step,
    add_rounded,
    clip_weights_,
    kahan_add,
    largest_within,
)
from tests.unit.numerics_support import one_torch_thread, randn

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def _bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=BF16)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_follow_the_published_formula_in_float64(decay: float) -> None:
    constants = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=decay)
    rate = 3e-3
    weight = randn(0, 7, 5)
    first, second = torch.zeros(7, 5), torch.zeros(7, 5)
    w, m, v = weight.numpy().astype(np.float64), np.zeros((7, 5)), np.zeros((7, 5))
    for t in range(1, 13):
        grad = randn(t, 7, 5) * 10.0 ** (-t / 2)
        g = grad.numpy().astype(np.float64)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        expected = -rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6) - rate * decay * w
        step = adamw_step(weight, grad, first, second, t, rate, constants)
        np.testing.assert_allclose(step.update.numpy(), expected, rtol=2e-5, atol=1e-9)
        np.testing.assert_allclose(step.first.numpy(), m, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(step.second.numpy(), v, rtol=1e-5)
        weight, first, second = weight + step.update, step.first, step.second
        w = w + expected


def test_the_first_update_is_the_rate_in_the_gradients_direction() -> None:
    constants = AdamWSettings(0.9, 0.999, 1e-8, 0.0)
    grad = torch.tensor([4.0, -1e-3, 0.0, 1e-8])
    step = adamw_step(torch.ones(4), grad, torch.zeros(4), torch.zeros(4), 1, 0.01, constants)
    # m / (1 - beta1) = g and sqrt(v / (1 - beta2)) = |g|; the last has |g| = eps, so half the rate.
    expected = torch.tensor([-0.01, 0.01 * 1e-3 / (1e-3 + 1e-8), 0.0, -0.005])
    torch.testing.assert_close(step.update, expected, rtol=1e-5, atol=0.0)


def test_updates_agree_with_torch() -> None:
    reference = torch.nn.Parameter(randn(1, 64))
    adam = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    weight, first, second = reference.detach().clone(), torch.zeros(64), torch.zeros(64)
    for t in range(1, 21):
        grad = randn(100 + t, 64)
        reference.grad = grad.clone()
        adam.step()
        step = adamw_step(weight, grad, first, second, t, 1e-2, AdamWSettings(0.9, 0.95, 1e-8, 0.1))
        weight, first, second = add_rounded(weight, step.update), step.first, step.second
    torch.testing.assert_close(weight, reference.detach(), rtol=1e-5, atol=1e-6)


def test_arguments_are_left_as_they_were() -> None:
    tensors = [randn(seed, 8).abs() for seed in range(4)]
    before = [t.clone() for t in tensors]
    adamw_step(*tensors, 3, 0.1, AdamWSettings(0.9, 0.95, 1e-8, 0.1))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_updates_are_counted_from_one() -> None:
    zero = torch.zeros(2)
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        adamw_step(zero, zero, zero, zero, 0, 0.1, AdamWSettings(0.9, 0.95, 1e-8, 0.0))


def test_kahan_summation_by_hand() -> None:
    """At 1.0 a BF16 step is 2^-7. An update of 2^-9 is lost alone; the third makes 3 * 2^-9, over half a step."""
    update = torch.tensor([2.0**-9])
    weight, compensation = _bf16(1.0), _bf16(0.0)
    assert torch.equal(add_rounded(weight, update), weight)
    states = []
    for _ in range(4):
        weight, compensation = kahan_add(weight, compensation, update)
        states.append((float(weight), float(compensation)))
    step = 2.0**-7
    # The second sum is a tie between 1 and 1 + 2^-7: to the even one, 1.
    assert states == [(1.0, step / 4), (1.0, step / 2), (1.0 + step, -step / 4), (1.0 + step, 0.0)]
    assert weight.dtype is compensation.dtype is BF16


def test_a_thousand_small_updates() -> None:
    """Updates of 1e-5 on weights of 0.1 (half a BF16 step: 2.4e-4): plain BF16 stands still, Kahan goes all the way."""
    weight = plain = torch.full((4,), 0.1, dtype=BF16)
    compensation, update = torch.zeros(4, dtype=BF16), torch.full((4,), 1e-5)
    for _ in range(1000):
        weight, compensation = kahan_add(weight, compensation, update)
        plain = add_rounded(plain, update)
    start = float(torch.tensor(0.1, dtype=BF16))
    assert torch.equal(plain, torch.full((4,), 0.1, dtype=BF16))
    total = weight.double() + compensation.double()
    torch.testing.assert_close(total, torch.full((4,), start + 1e-2, dtype=torch.float64), rtol=0.0, atol=3e-4)
    assert float(total[0] - start) == pytest.approx(1e-2, rel=0.03)


_finite = st.floats(-4.0, 4.0, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


@settings(max_examples=150, deadline=None)
@given(_finite, st.floats(-0.5, 0.5), _finite, st.integers(0, 12))
def test_kahan_loses_at_most_the_last_bit_of_the_compensation(
    weight: float, share: float, update: float, shift: int
) -> None:
    w = _bf16(weight)
    c = _bf16(share * abs(float(w)) * 2.0**-8)
    u = torch.tensor([update * 2.0**-shift])
    exact = float(w) + float(c) + float(u)
    new, kept = kahan_add(w, c, u)
    nearest = abs(float(new) - exact)
    fp32 = 2.0**-23 * (abs(float(w)) + abs(float(c)) + abs(float(u)))
    assert nearest <= 2.0**-8 * abs(float(new)) + fp32
    assert abs(float(new) + float(kept) - exact) <= 2.0**-8 * nearest + fp32


def test_the_largest_value_within_a_limit() -> None:
    assert float(largest_within(1.0, BF16)) == 1.0
    # 0.3 lies between the BF16 neighbours 153 * 2^-9 and 154 * 2^-9, and nearer to the upper.
    assert float(largest_within(0.3, BF16)) == 153 * 2.0**-9 < 0.3 < 154 * 2.0**-9
    assert float(torch.tensor(0.3)) > 0.3 > float(largest_within(0.3, torch.float32)) > 0.3 - 1e-7
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            largest_within(wrong, BF16)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_weights_are_clipped_and_counted(dtype: torch.dtype) -> None:
    weight = torch.tensor([0.5, 2.0, -2.0, 0.25, -0.5, 0.0], dtype=dtype)
    assert int(clip_weights_(weight, 0.5)) == 2
    assert weight.tolist() == [0.5, 0.5, -0.5, 0.25, -0.5, 0.0]
    assert int(clip_weights_(weight, 0.5)) == 0
    assert int(clip_weights_(weight, 0.3)) == 4
    assert float(weight.abs().max()) <= 0.3


def test_clipping_takes_the_compensation_along() -> None:
    """The bound is one on weight + compensation: 0.5 with a rest outwards is clipped, with one inwards it is not."""
    weight = _bf16(0.5, 0.5, 2.0, -0.5, 0.25)
    compensation = _bf16(2.0**-11, -(2.0**-11), -(2.0**-9), -(2.0**-11), 2.0**-12)
    assert int(clip_weights_(weight, 0.5, compensation)) == 3
    assert weight.tolist() == [0.5, 0.5, 0.5, -0.5, 0.25]
    assert compensation.tolist() == [0.0, -(2.0**-11), 0.0, 0.0, 2.0**-12]
