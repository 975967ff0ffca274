"""Static scales of Q, K and V: values, padding, percentiles, refusals, and stale scales after K grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.numerics.calibration import (
    PARTS,
    CalibrationError,
    CalibrationObserver,
    CalibrationResult,
    Scales,
    scale_from_amax,
)
from tasks.numerics.fp8 import decode, quantize_static, to_e4m3
from tests.unit.numerics_support import nearest_value, one_torch_thread, randn

MARGIN = 1.05
BATCH, HEADS, TOKENS, DIM = 2, 3, 5, 8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def values(seed: int, amax: float | None = None, tokens: int = TOKENS) -> Tensor:
    x = randn(seed, BATCH, HEADS, tokens, DIM)
    if amax is not None:
        x = x.clamp(-amax / 2, amax / 2)
        x[1, 2, 0, 3] = -amax
    return x


def all_real(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool)


def calibrate(
    layers: list[dict[str, Tensor]], percentile: float = 100.0, in_use: Scales | None = None, margin: float = MARGIN
) -> CalibrationResult:
    observer = CalibrationObserver(len(layers), margin, percentile, in_use)
    for number, parts in enumerate(layers):
        for part, x in parts.items():
            observer.observe(number, part, x, all_real(x))
    return observer.result()


def layer(seed: int, **replaced: Tensor) -> dict[str, Tensor]:
    return {part: values(seed + i) for i, part in enumerate(PARTS)} | replaced


def test_scale_is_margin_times_amax_over_448_in_fp32() -> None:
    got = calibrate([layer(0, k=values(9, amax=7.0))], margin=1.05).scales
    assert set(got) == {(0, "q"), (0, "k"), (0, "v")}
    assert got[(0, "k")] == float(np.float32(1.05 * 7.0 / 448.0))
    for i, part in enumerate(PARTS):
        if part != "k":
            assert got[(0, part)] == float(np.float32(1.05 * float(values(i).abs().max()) / 448.0))
    assert scale_from_amax(448.0, 1.0) == 1.0
    assert scale_from_amax(0.1, 1.0) == float(np.float32(0.1 / 448.0)) != 0.1 / 448.0


def test_every_layer_and_part_has_its_own_scale() -> None:
    layers = [layer(10 * n) for n in range(3)]
    got = calibrate(layers).scales
    assert len(got) == len(set(got.values())) == 9
    for n, parts in enumerate(layers):
        for part, x in parts.items():
            assert got[(n, part)] == scale_from_amax(float(x.abs().max()), MARGIN)


def test_padding_tokens_are_excluded() -> None:
    x = values(0, amax=3.0)
    real = all_real(x)
    real[0, 4] = real[1, 3] = real[1, 4] = False
    for poison in (1e6, math.nan, math.inf):
        padded = x.clone()
        padded[0, :, 4], padded[1, :, 3], padded[1, :, 4] = poison, -poison, poison
        observer = CalibrationObserver(1, MARGIN, 100.0, dict.fromkeys(((0, p) for p in PARTS), 1.0))
        for part in PARTS:
            observer.observe(0, part, padded, real)
        result = observer.result()
        assert set(result.scales.values()) == {scale_from_amax(3.0, MARGIN)}
        assert result.metrics["calibration/saturated_fraction"] == 0.0


def test_bf16_values_are_read_exactly() -> None:
    x = values(1).to(torch.bfloat16)
    got = calibrate([{part: x for part in PARTS}]).scales
    assert set(got.values()) == {scale_from_amax(float(x.float().abs().max()), MARGIN)}


@pytest.mark.parametrize(("percentile", "rank"), [(100.0, 240), (99.9, 240), (99.5, 239), (90.0, 216), (50.0, 120)])
def test_percentile_is_the_nearest_rank_over_elements(percentile: float, rank: int) -> None:
    elements = torch.arange(1, BATCH * HEADS * TOKENS * DIM + 1).to(torch.float32)
    signs = 1 - 2 * (elements % 2)
    x = (elements * signs)[torch.randperm(240, generator=torch.Generator().manual_seed(0))].view(2, 3, 5, 8)
    got = calibrate([{part: x for part in PARTS}], percentile)
    assert set(got.scales.values()) == {scale_from_amax(float(rank), MARGIN)}


def test_percentile_counts_over_all_observations() -> None:
    low, high = torch.full((1, 1, 99, 1), 1.0), torch.full((1, 1, 1, 1), 50.0)
    for percentile, amax in ((99.0, 1.0), (99.5, 50.0), (100.0, 50.0)):
        observer = CalibrationObserver(1, 1.0, percentile)
        for part in PARTS:
            observer.observe(0, part, high, all_real(high))
            observer.observe(0, part, low, all_real(low))
        assert set(observer.result().scales.values()) == {scale_from_amax(amax, 1.0)}


@pytest.mark.parametrize("percentile", [100.0, 97.0])
def test_several_observations_equal_one(percentile: float) -> None:
    in_use = {(n, part): 0.004 for n in range(2) for part in PARTS}
    whole = CalibrationObserver(2, MARGIN, percentile, in_use)
    pieces = CalibrationObserver(2, MARGIN, percentile, in_use)
    for n in range(2):
        for i, part in enumerate(PARTS):
            x = values(10 * n + i, tokens=12)
            x[0, 0, 0, :4] = 0.0
            real = torch.rand(BATCH, 12, generator=torch.Generator().manual_seed(n)) < 0.6
            whole.observe(n, part, x, real)
            for columns in (slice(0, 5), slice(5, 6), slice(6, 12)):
                pieces.observe(n, part, x[:, :, columns], real[:, columns])
            pieces.observe(n, part, x, torch.zeros_like(real))
    assert pieces.result() == whole.result()
    assert 0 < whole.result().metrics["calibration/saturated_fraction"] < 1


def test_amax_of_zero_is_an_error_that_names_layer_and_part() -> None:
    zeros = torch.zeros(BATCH, HEADS, TOKENS, DIM)
    with pytest.raises(CalibrationError, match=r"^layer 1 v: amax is 0, no scale can be formed$"):
        calibrate([layer(0), layer(3, v=zeros)])
    with pytest.raises(CalibrationError, match=r"^layer 0 q: amax is 0"):
        calibrate([layer(0, q=zeros)], percentile=99.0)


def test_percentile_that_falls_on_zero_is_an_error() -> None:
    mostly_zero = torch.zeros(BATCH, HEADS, TOKENS, DIM)
    mostly_zero[0, 0, 0, 0] = 5.0
    with pytest.raises(CalibrationError, match=r"^layer 0 k: amax is 0"):
        calibrate([layer(0, k=mostly_zero)], percentile=99.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("percentile", [100.0, 50.0])
def test_non_finite_values_are_an_error(bad: float, percentile: float) -> None:
    poisoned = values(5)
    poisoned[0, 1, 2, 3] = bad
    observer = CalibrationObserver(1, MARGIN, percentile)
    for part in PARTS:
        # The good values afterwards must not hide the bad one.
        for x in (poisoned if part == "k" else values(6), values(7, amax=100.0)):
            observer.observe(0, part, x, all_real(x))
    with pytest.raises(CalibrationError, match=r"^layer 0 k: values are not finite \(amax inf\)$"):
        observer.result()


def test_a_layer_never_seen_is_an_error() -> None:
    observer = CalibrationObserver(2, MARGIN, 100.0)
    for part in PARTS:
        observer.observe(0, part, values(0), all_real(values(0)))
    observer.observe(1, "q", values(1), all_real(values(1)))
    observer.observe(1, "k", values(2), torch.zeros(BATCH, TOKENS, dtype=torch.bool))
    with pytest.raises(CalibrationError, match=r"^layer 1 k: no real token was seen$"):
        observer.result()


def test_an_amax_too_small_for_an_fp32_scale_is_an_error() -> None:
    tiny = torch.full((1, 1, 1, 1), 1e-44)
    with pytest.raises(CalibrationError, match=r"^layer 0 q: amax gives the scale 0\.0, which is not usable$"):
        calibrate([{part: tiny for part in PARTS}])


@pytest.mark.parametrize(("margin", "percentile"), [(0.99, 100.0), (1.05, 0.0), (1.05, 100.1), (math.nan, 100.0)])
def test_settings_out_of_range_are_refused(margin: float, percentile: float) -> None:
    with pytest.raises(
        ValueError, match=f"margin must be >= 1 and 0 < percentile <= 100, got {margin} and {percentile}"
    ):
        CalibrationObserver(1, margin, percentile)


def test_scales_in_use_must_cover_every_layer_and_part() -> None:
    in_use = {(n, part): 1.0 for n in range(2) for part in PARTS}
    del in_use[(1, "k")]
    with pytest.raises(CalibrationError, match=r"^layer 1 k: has no scale in use$"):
        CalibrationObserver(2, MARGIN, 100.0, in_use)
    with pytest.raises(CalibrationError, match=r"^layer 1 q: is not one of the 1 layers$"):
        CalibrationObserver(1, MARGIN, 100.0, in_use)


def test_metrics_are_absent_at_bootstrap() -> None:
    assert calibrate([layer(0)]).metrics == {}


def test_metrics_by_hand() -> None:
    # Scale 2: saturates above 896; rounds to 0 at or below 2 * 2^-10.
    x = torch.tensor([0.0, 896.0, 896.5, -1e4, 2.0**-9, -(2.0**-9), 1.001 * 2.0**-9, 1.0]).view(1, 1, 8, 1)
    result = calibrate([{part: x for part in PARTS}], in_use=dict.fromkeys(((0, p) for p in PARTS), 2.0), margin=1.0)
    assert result.metrics["calibration/saturated_fraction"] == 2 / 8
    assert result.metrics["calibration/underflow_fraction"] == 2 / 7
    assert result.metrics["calibration/max_rel_change"] == pytest.approx(1e4 / 448 / 2 - 1, rel=1e-6)


def test_max_rel_change_takes_the_largest_of_all_layers_in_both_directions() -> None:
    layers = [layer(0), layer(3)]
    first = calibrate(layers).scales
    assert calibrate(layers, in_use=first).metrics["calibration/max_rel_change"] == 0.0
    in_use = {**first, (0, "q"): first[(0, "q")] * 1.5, (1, "v"): first[(1, "v")] * 10}
    got = calibrate(layers, in_use=in_use).metrics["calibration/max_rel_change"]
    assert got == pytest.approx(0.9, rel=1e-12)
    in_use[(1, "v")] = first[(1, "v")] / 10
    assert calibrate(layers, in_use=in_use).metrics["calibration/max_rel_change"] == pytest.approx(9.0, rel=1e-12)


@dataclass(frozen=True)
class Fit:
    """How scales serve q, k, v: fractions over all three, mean relative error of K by channel group."""

    saturated: float
    underflow: float
    all_channels: float
    calm_channels: float
    grown_channel: float


def fit(parts: dict[str, Tensor], scales: Scales) -> Fit:
    metrics = calibrate([parts], in_use=scales).metrics
    k, scale = parts["k"].double(), scales[(0, "k")]
    error = (decode(quantize_static(parts["k"], scale)).double() * scale - k).abs() / k.abs()
    return Fit(
        metrics["calibration/saturated_fraction"],
        metrics["calibration/underflow_fraction"],
        float(error.mean()),
        float(error[..., 1:].mean()),
        float(error[..., 0].mean()),
    )


def test_one_k_channel_a_hundred_times_larger_under_old_scales_and_after_recalibration() -> None:
    before = {part: randn(20 + i, 4, 2, 64, 32) for i, part in enumerate(PARTS)}
    after = {**before, "k": before["k"].clone()}
    after["k"][..., 0] *= 100
    old, new = calibrate([before]).scales, calibrate([after]).scales
    healthy, stale, fresh = fit(before, old), fit(after, old), fit(after, new)

    limit = 448.0 * old[(0, "k")]
    cut = int((after["k"].abs() > limit).sum())
    assert healthy.saturated == 0.0
    assert stale.saturated == cut / (3 * after["k"].numel()) > 0.005
    assert cut == int((after["k"][..., 0].abs() > limit).sum())
    assert fresh.saturated == 0.0

    # The other channels do not notice the old scale; the new one, made for the large channel, is coarse for them.
    assert stale.underflow == healthy.underflow and stale.calm_channels == healthy.calm_channels
    assert fresh.underflow > stale.underflow
    assert fresh.calm_channels > 1.03 * stale.calm_channels
    assert fresh.all_channels > 1.03 * healthy.all_channels
    # What recalibration buys: the grown channel was cut to about a fiftieth, and is now as exact as any.
    assert stale.grown_channel > 0.8 and 0.02 < fresh.grown_channel < 0.025
    assert fresh.all_channels < stale.all_channels


def test_small_keys_pay_most_for_a_scale_made_for_a_large_channel() -> None:
    k = randn(21, 4, 2, 64, 32)
    small = k[k.abs() < 0.05].view(1, 1, -1, 1)
    old = scale_from_amax(float(k.abs().max()), MARGIN)
    coarse = dict.fromkeys(((0, part) for part in PARTS), 100 * old)
    fine = dict.fromkeys(coarse, old)
    parts = {part: small for part in PARTS}
    assert fit(parts, fine).underflow < 0.001 < 0.01 < fit(parts, coarse).underflow
    assert fit(parts, coarse).all_channels > 2 * fit(parts, fine).all_channels


def test_static_codes_are_those_of_the_format() -> None:
    k = values(30)
    scale = calibrate([layer(0, k=k)]).scales[(0, "k")]
    got = decode(quantize_static(k, scale)).reshape(-1).tolist()
    quotient = (k.numpy() / np.float32(scale)).reshape(-1).tolist()
    assert got == [nearest_value(v) for v in quotient]


def test_what_underflows_is_what_the_cast_makes_zero() -> None:
    bits = torch.arange(0x7F80, dtype=torch.int32)
    every = (bits << 16).view(torch.float32)
    # BF16 numbers, and fp32 ones beside the thresholds of their own scale.
    for scale in (1.0, 0.7312, 3.0e-3, 1.05 / 448, 12345.678, 2.0**-60 * 1.9999999):
        by = torch.tensor(scale, dtype=torch.float32)
        edges = torch.stack([by * 2.0**-10, by * 448])
        beside = [torch.nextafter(edges, torch.full_like(edges, way)) for way in (0.0, torch.inf)]
        values = torch.cat([every, edges, *beside])
        zero = (to_e4m3(values / by).view(torch.uint8) & 0x7F) == 0
        observer = CalibrationObserver(1, 1.0, 100.0, {(0, part): float(by) for part in PARTS})
        for part in PARTS:
            observer.observe(0, part, values.view(1, 1, -1, 1), torch.ones(1, values.numel(), dtype=torch.bool))
        metrics = observer.result().metrics
        assert metrics["calibration/underflow_fraction"] == int((zero & (values != 0)).sum()) / int((values != 0).sum())
        assert metrics["calibration/saturated_fraction"] == int((values > by * 448).sum()) / values.numel()
