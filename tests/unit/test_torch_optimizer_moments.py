"""Stored moments: layouts, exact values, unbiased rounding, error bounds, and the averages that must not stall."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.moments import (
    MomentFormat,
    Slot,
    moment_slots,
    pack_moments,
    stochastic_bf16,
    unpack_moments,
)
from tests.unit.numerics_support import MAGNITUDES, generator, one_torch_thread, randn

STEP = 2.0**-3
"""Largest distance of two E4M3 neighbours over the smaller one."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def _through(
    first: Tensor, second: Tensor, storage: MomentFormat, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    stored = pack_moments(first, second, storage, generator(seed))
    return stored, *unpack_moments(stored)


def _grid(count: int = 16) -> Tensor:
    """Every E4M3 magnitude with both signs, in blocks of 256 that hold 448: 4096 values and scale 1."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    return torch.cat([values, torch.zeros(256 - values.numel())]).repeat(count)


def test_slots() -> None:
    fp32, bf16 = Slot((3, 5), torch.float32), Slot((3, 5), torch.bfloat16)
    assert moment_slots((3, 5), "fp32") == {"exp_avg": fp32, "exp_avg_sq": fp32}
    assert moment_slots((3, 5), "bf16") == {"exp_avg": bf16, "exp_avg_sq": bf16}
    assert moment_slots((3, 5), "fp8") == moment_slots((3, 5), "fp32"), "small tensors stay fp32"
    assert moment_slots((63, 65), "fp8")["exp_avg"].dtype is torch.float32, "4095 elements"
    codes, scales = Slot((41, 100), torch.float8_e4m3fn), Slot((17,), torch.float32)
    assert moment_slots((41, 100), "fp8") == {
        "exp_avg_codes": codes,
        "exp_avg_scales": scales,
        "exp_avg_sq_root_codes": codes,
        "exp_avg_sq_root_scales": scales,
    }
    assert (codes.size, scales.size, bf16.size, fp32.size) == (4100, 68, 30, 60)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8': allowed are fp32, bf16, fp8"):
        moment_slots((2,), "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("shape", [(4, 3), (64, 64), (41, 100), (5000,)])
def test_what_is_stored_is_what_the_slots_say(storage: MomentFormat, shape: tuple[int, ...]) -> None:
    stored, first, second = _through(randn(0, *shape), randn(1, *shape).square(), storage)
    assert {key: Slot(tuple(t.shape), t.dtype) for key, t in stored.items()} == moment_slots(shape, storage)
    assert first.shape == second.shape == shape
    assert first.dtype is second.dtype is torch.float32


def test_fp32_is_exact() -> None:
    m, v = randn(0, 5000), randn(1, 5000).square()
    _, first, second = _through(m, v, "fp32")
    assert torch.equal(first, m) and torch.equal(second, v)


def test_values_that_the_format_holds_never_change() -> None:
    grid = _grid()
    _, first, second = _through(grid, grid.square(), "fp8")
    assert torch.equal(first, grid)
    assert torch.equal(second, grid.square())
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    assert torch.equal(stochastic_bf16(every.float(), generator(0)), every)


def test_bf16_rounds_up_with_the_probability_of_the_part_cut_off() -> None:
    """1 + k 2^-23 lies k / 65536 of the way from 1 to the next BF16 value, 1 + 2^-7."""
    draws = 40_000
    for k in (1, 6554, 32768, 65535):
        for sign in (1.0, -1.0):
            x = torch.full((draws,), sign * (1 + k * 2.0**-23))
            rounded = stochastic_bf16(x, generator(k)).float() * sign
            assert set(rounded.unique().tolist()) <= {1.0, 1 + 2.0**-7}
            share, p = float((rounded > 1).float().mean()), k / 65536
            assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / draws) + 1e-12


def test_fp8_keeps_the_mean_of_the_first_and_of_the_square_of_the_root() -> None:
    """Scale 1 by one element of 448 a block. Neighbours around 17.4: 16 and 18; around 0.0005: 0 and 2^-9."""
    blocks = 60
    for value, below, above in (
        (17.4, 16.0, 18.0),
        (-17.4, -18.0, -16.0),
        (0.0005, 0.0, 2.0**-9),
        (0.013, 0.0117, 0.0137),
    ):
        x = torch.full((blocks, 256), value)
        x[:, 0] = 448.0
        _, first, _ = _through(x, x.square(), "fp8", seed=3)
        drawn = first[:, 1:].double()
        assert len(drawn.unique()) == 2
        sigma = (above - below) / 2 / math.sqrt(drawn.numel())
        assert abs(float(drawn.mean()) - value) <= 5 * sigma
    for root, below, above in ((17.4, 16.0, 18.0), (240.5, 240.0, 256.0), (0.003, 2.0**-9, 2.0**-8)):
        v = torch.full((blocks, 256), root**2)
        v[:, 0] = 448.0**2
        _, _, second = _through(torch.zeros_like(v), v, "fp8", seed=4)
        drawn = second[:, 1:].double()
        assert {float(x) for x in drawn.unique()} == {below**2, above**2}
        sigma = (above**2 - below**2) / 2 / math.sqrt(drawn.numel())
        assert abs(float(drawn.mean()) - root**2) <= 5 * sigma


_exponents = st.lists(st.integers(-60, 15), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(_exponents, st.integers(0, 2**31))
def test_errors_stay_within_one_step(exponents: list[int], seed: int) -> None:
    size = 4096 + 10
    scale = torch.tensor([2.0**e for e in exponents]).repeat(size)[:size]
    m, v = randn(seed, size) * scale, (randn(seed + 1, size) * scale).square()
    _, first, second = _through(m, v, "bf16", seed)
    assert bool(((first - m).abs() <= 2.0**-7 * m.abs()).all())
    assert bool(((second - v).abs() <= (2.0**-7 * v).clamp(min=2.0**-133)).all()), "2^-133: BF16's smallest step"
    stored, first, second = _through(m, v, "fp8", seed)
    smallest = stored["exp_avg_scales"].repeat_interleave(256)[:size] * 2.0**-9
    assert bool(((first - m).abs() <= torch.maximum(STEP * m.abs(), smallest) * 1.0001).all())
    smallest = stored["exp_avg_sq_root_scales"].repeat_interleave(256)[:size] * 2.0**-9
    bound = torch.maximum(STEP * v.sqrt(), smallest) * 1.0001
    assert bool(((second.sqrt() - v.sqrt()).abs() <= bound).all())
    assert bool((second[v > 0] > 0).all())


def test_a_vanishing_second_moment_does_not_blow_up_the_step() -> None:
    """1e-7 beside 1: neither moment can hold it in E4M3. The step of a small gradient must stay at most Adam's own."""
    grad = torch.full((4096,), 1e-7)
    grad[::256] = 1.0
    for seed in range(20):
        _, first, second = _through(0.1 * grad, 0.05 * grad.square(), "fp8", seed)
        step = first.abs() / (second.sqrt() + 1e-12)
        assert bool((second[grad > 0] > 0).all())
        # Adam's own first step is 0.1 / sqrt(0.05); either moment may be off by a step of the format.
        assert float(step.max()) <= 0.1 / math.sqrt(0.05) * (1 + STEP) ** 2


def test_a_block_of_zeros_stays_zero() -> None:
    stored, first, second = _through(torch.zeros(4200), torch.zeros(4200), "fp8")
    assert not first.any() and not second.any()
    assert stored["exp_avg_scales"].tolist() == stored["exp_avg_sq_root_scales"].tolist() == [1.0] * 17
    assert not stochastic_bf16(torch.zeros(9), generator(0)).any()


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_extreme_magnitudes_stay_finite(storage: MomentFormat) -> None:
    """A finite gradient of 1e20 squares to infinity in fp32; what is stored must still be finite."""
    m = torch.full((4096,), 3.4e38)
    v = torch.full((4096,), math.inf)
    m[256:512], v[256:512] = 1e-30, 1e-38
    stored, first, second = _through(m, v, storage)
    assert all(bool(t.float().isfinite().all()) for t in stored.values())
    assert bool(first.isfinite().all()) and bool(second.isfinite().all())
    assert float(first[0]) == pytest.approx(3.4e38, rel=0.13) and float(second[0]) > 1e38
    assert float(first[300]) == pytest.approx(1e-30, rel=0.13)


@pytest.mark.parametrize(
    "storage, beta, n", [("bf16", 0.95, 30), ("bf16", 0.999, 700), ("fp8", 0.95, 30), ("fp8", 0.99, 150)]
)
def test_averages_decay_at_their_rate(storage: MomentFormat, beta: float, n: int) -> None:
    """Without gradient a moment falls by beta^n. Rounded to nearest it would not move: see the next test."""
    source = generator(5)
    m = v = torch.rand(4096, generator=generator(1)) + 1.0
    for _ in range(n):
        stored = pack_moments(m * beta, v * beta, storage, source)
        m, v = unpack_moments(stored)
    start = float((torch.rand(4096, generator=generator(1)) + 1.0).mean())
    assert float(m.mean()) == pytest.approx(start * beta**n, rel=0.05)
    assert float(v.mean()) == pytest.approx(start * beta**n, rel=0.05)


def test_rounding_to_nearest_would_stall() -> None:
    """Why the rounding is random: from these values the nearest neighbour is the value itself, for ever."""
    v = torch.tensor(1.5, dtype=torch.bfloat16)
    assert torch.equal((v.float() * 0.999).to(torch.bfloat16), v)
    root = torch.tensor(1.25, dtype=torch.float8_e4m3fn)
    assert float((root.float() * math.sqrt(0.95)).to(torch.float8_e4m3fn)) == 1.25


def test_the_generator_alone_decides_the_rounding() -> None:
    m, v = randn(0, 4096), randn(1, 4096).square()
    for storage in ("bf16", "fp8"):
        a, b, c = (pack_moments(m, v, storage, generator(seed)) for seed in (1, 1, 2))
        assert all(torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)) for key in a)
        assert any(not torch.equal(a[key].view(torch.uint8), c[key].view(torch.uint8)) for key in a)


def test_codes_share_no_memory_with_a_larger_tensor() -> None:
    stored = pack_moments(randn(0, 4097), randn(1, 4097).square(), "fp8", generator(0))
    assert stored["exp_avg_codes"].untyped_storage().nbytes() == 4097
