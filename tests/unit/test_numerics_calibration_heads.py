"""Scales for each KV head, the forms of scales, and what makes them usable."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.calibration import PARTS, CalibrationError, CalibrationObserver, Scales
from tasks.numerics.kv_scales import (
    grouped_scales,
    named_scales,
    scale_faults,
    scale_keys,
    scale_values,
    scales_from_json,
    scales_to_json,
)
from tests.unit.numerics_support import nearest_value, randn


def amplitudes(*heads: float) -> Tensor:
    """`[1, heads, 3, 2]`: head h has the amax heads[h], once negative, at a token each."""
    x = 0.01 * torch.ones(1, len(heads), 3, 2)
    for head, value in enumerate(heads):
        x[0, head, head % 3, head % 2] = -value if head % 2 else value
    return x


ALL = torch.ones(1, 3, dtype=torch.bool)
LAYER: dict[str, Tensor] = {
    "q": amplitudes(1.0, 8.0, 2.0, 4.0),
    "k": amplitudes(3.0, 30.0),
    "v": amplitudes(0.5, 0.25),
}


def calibrated(heads: int | None, in_use: Scales | None = None, percentile: float = 100.0) -> CalibrationObserver:
    observer = CalibrationObserver(1, 1.0, percentile, in_use, heads)
    for part, x in LAYER.items():
        observer.observe(0, part, x, ALL)
    return observer


def fp32(amax: float) -> float:
    return float(np.float32(amax / 448.0))


def test_a_head_has_its_own_scale_and_query_heads_share_that_of_their_kv_head() -> None:
    assert calibrated(2).result().scales == {
        (0, "q"): (fp32(8.0), fp32(4.0)),
        (0, "k"): (fp32(3.0), fp32(30.0)),
        (0, "v"): (fp32(0.5), fp32(0.25)),
    }


def test_the_layer_scale_is_the_largest_of_its_heads() -> None:
    by_head, by_layer = calibrated(2).result().scales, calibrated(None).result().scales
    assert by_layer == {key: max(scale_values(scale)) for key, scale in by_head.items()}
    assert all(isinstance(scale, float) for scale in by_layer.values())


def test_one_kv_head_gives_a_tuple_of_one() -> None:
    scales = calibrated(1).result().scales
    assert scales == {key: (scale,) for key, scale in calibrated(None).result().scales.items()}


def test_a_percentile_is_taken_within_a_head() -> None:
    x = torch.zeros(1, 2, 3, 2)
    x[0, 0].view(-1).copy_(torch.arange(1.0, 7.0))
    x[0, 1].view(-1).copy_(10 * torch.arange(1.0, 7.0))
    observer = CalibrationObserver(1, 1.0, 50.0, None, 2)
    for part in PARTS:
        observer.observe(0, part, x, ALL)
    assert observer.result().scales == dict.fromkeys(scale_keys(1), (fp32(3.0), fp32(30.0)))


def test_metrics_by_head_by_hand() -> None:
    """Head 0 under scale 2 saturates above 896, head 1 under 0.5 above 224; 2^-10 scales and less become 0."""
    head_0 = [0.0, 896.0, 900.0, 1e-6]
    head_1 = [224.0, 225.0, -300.0, 2.0**-11]
    x = torch.tensor([head_0, head_1]).view(1, 2, 4, 1)
    in_use: Scales = dict.fromkeys(scale_keys(1), (2.0, 0.5))
    observer = CalibrationObserver(1, 1.0, 100.0, in_use, 2)
    for part in PARTS:
        observer.observe(0, part, x, torch.ones(1, 4, dtype=torch.bool))
    metrics = observer.result().metrics
    assert metrics["calibration/saturated_fraction"] == 3 / 8
    assert metrics["calibration/underflow_fraction"] == 2 / 7
    change = max(abs(900 / 448 / 2.0 - 1), abs(300 / 448 / 0.5 - 1))
    assert metrics["calibration/max_rel_change"] == pytest.approx(change, rel=1e-6)


def test_drift_of_one_head_is_seen() -> None:
    scales = calibrated(2).result().scales
    before = scales | {(0, "k"): (fp32(3.0), fp32(15.0))}
    assert calibrated(2, before).result().metrics["calibration/max_rel_change"] == pytest.approx(1.0, rel=1e-6)
    assert calibrated(2, scales).result().metrics["calibration/max_rel_change"] == 0.0


def test_scales_for_heads_waste_less_on_the_quiet_head() -> None:
    """Value of per-head scales: codes of a head a million times smaller than its neighbour do not fall to zero."""
    x = randn(3, 1, 2, 64, 16)
    x[:, 1] *= 1e-6
    real = torch.ones(1, 64, dtype=torch.bool)

    def underflow(heads: int | None) -> float:
        first = CalibrationObserver(1, 1.0, 100.0, None, heads)
        for part in PARTS:
            first.observe(0, part, x, real)
        second = CalibrationObserver(1, 1.0, 100.0, first.result().scales, heads)
        for part in PARTS:
            second.observe(0, part, x, real)
        return second.result().metrics["calibration/underflow_fraction"]

    def expected(scales: tuple[float, float]) -> float:
        zeros = [nearest_value(float(np.float32(v) / np.float32(scales[h]))) == 0 for h in (0, 1) for v in heads[h]]
        return sum(zeros) / len(zeros)

    heads = [x[0, h].reshape(-1).tolist() for h in (0, 1)]
    own = tuple(fp32(max(map(abs, head))) for head in heads)
    assert underflow(2) == expected((own[0], own[1])) < 0.01
    assert underflow(None) == expected((own[0], own[0])) > 0.4


@pytest.mark.parametrize("part", PARTS)
def test_errors_name_the_head(part: str) -> None:
    observer = CalibrationObserver(1, 1.0, 100.0, None, 2)
    for other, x in LAYER.items():
        values = x.clone()
        if other == part:
            values[:, values.shape[1] // 2 :] = 0
        observer.observe(0, other, values, ALL)
    with pytest.raises(CalibrationError, match=f"^layer 0 {part} head 1: amax is 0, no scale can be formed$"):
        observer.result()


def test_what_does_not_fit_is_refused() -> None:
    observer = CalibrationObserver(1, 1.0, 100.0, None, 2)
    with pytest.raises(CalibrationError, match=r"^layer 0 k: 3 heads do not share 2 scales$"):
        observer.observe(0, "k", torch.ones(1, 3, 3, 2), ALL)
    with pytest.raises(CalibrationError, match=r"^layer 1 k: is not one of the 1 layers$"):
        observer.observe(1, "k", LAYER["k"], ALL)
    for wrong in (range(1, 3), range(0), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(CalibrationError, match=r"^layer 0 k: range\(.*\) are not some of 2 heads$"):
            observer.observe(0, "k", LAYER["k"], ALL, wrong)


@pytest.mark.parametrize(
    ("in_use", "heads"), [(0.5, 2), ((0.5,), 2), ((0.5, 0.5, 0.5), 2), ((0.5, 0.5), None), ((0.5,), None)]
)
def test_scales_in_use_of_another_granularity_are_refused(in_use: float | tuple[float, ...], heads: int | None) -> None:
    with pytest.raises(CalibrationError, match=r"^layer 0 q: the scale in use is .* does not fit heads (2|None)$"):
        CalibrationObserver(1, 1.0, 100.0, dict.fromkeys(scale_keys(1), in_use), heads)


GOOD: Scales = dict.fromkeys(scale_keys(2), 0.5)
GOOD_HEADS: Scales = dict.fromkeys(scale_keys(2), (0.5, 0.25))


@pytest.mark.parametrize(
    ("scales", "layers", "heads", "faults"),
    [
        (GOOD, 2, None, ()),
        (GOOD_HEADS, 2, 2, ()),
        ({}, 0, None, ()),
        ({}, 0, 2, ()),
        (GOOD, 0, None, ("missing [], extra [(0, 'k'), (0, 'q'), (0, 'v')]",)),
        ({}, 1, 2, ("missing [(0, 'k'), (0, 'q'), (0, 'v')], extra []",)),
        (GOOD | {(2, "v"): 1.0}, 2, None, ("missing [], extra [(2, 'v')]",)),
        (GOOD | {(1, "v"): 0.0}, 2, None, ("layer 1 v: scale 0.0 is not a positive finite number",)),
        (GOOD | {(1, "v"): -1.0}, 2, None, ("layer 1 v: scale -1.0 is not a positive finite number",)),
        (GOOD | {(0, "k"): math.nan}, 2, None, ("layer 0 k: scale nan is not a positive finite number",)),
        (
            GOOD_HEADS | {(0, "k"): (1.0, math.inf)},
            2,
            2,
            ("layer 0 k head 1: scale inf is not a positive finite number",),
        ),
        (GOOD | {(0, "k"): (1.0, 1.0)}, 2, None, ("layer 0 k: scales for 2 heads, needed for the whole layer",)),
        (GOOD_HEADS | {(1, "q"): 1.0}, 2, 2, ("layer 1 q: scales for the whole layer, needed for 2 heads",)),
        (GOOD_HEADS | {(1, "q"): (1.0,)}, 2, 2, ("layer 1 q: scales for 1 heads, needed for 2 heads",)),
    ],
)
def test_faults_of_scales(scales: Scales, layers: int, heads: int | None, faults: tuple[str, ...]) -> None:
    assert scale_faults(scales, layers, heads) == faults


def test_every_number_has_a_name() -> None:
    assert named_scales({(0, "k"): 0.5, (1, "q"): (0.25, 0.125)}) == {
        "layer 0 k": 0.5,
        "layer 1 q head 0": 0.25,
        "layer 1 q head 1": 0.125,
    }
    assert not named_scales({(0, "k"): 0.5}).keys() & named_scales({(0, "k"): (0.5,)}).keys()


def test_numbers_are_grouped_in_the_order_of_layers_parts_and_heads() -> None:
    assert grouped_scales(range(6), 2, None) == {
        (0, "q"): 0, (0, "k"): 1, (0, "v"): 2, (1, "q"): 3, (1, "k"): 4, (1, "v"): 5,
    }  # fmt: skip
    assert grouped_scales(range(6), 1, 2) == {(0, "q"): (0, 1), (0, "k"): (2, 3), (0, "v"): (4, 5)}


POSITIVE = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False, width=32)


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 99), st.sampled_from(PARTS)),
        POSITIVE | st.lists(POSITIVE, min_size=1, max_size=4).map(tuple),
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_scales_keep_every_bit_through_json(scales: Scales) -> None:
    written = json.loads(json.dumps(scales_to_json(scales)))
    assert scales_from_json(written) == scales


def test_the_written_form_of_a_layer_scale() -> None:
    """Checkpoints hold it: it must not change."""
    assert scales_to_json({(3, "k"): 0.75, (12, "v"): (0.5, 0.1)}) == {
        "3.k": "0x1.8000000000000p-1",
        "12.v": ["0x1.0000000000000p-1", "0x1.999999999999ap-4"],
    }


@pytest.mark.parametrize("name", ["k", "3", "3.w", "x.k", "-1.k", "3.k.v", ""])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(CalibrationError, match="is no name of a scale"):
        scales_from_json({name: "0x1p0"})


@pytest.mark.parametrize("text", ["one", ["0x1p0", "x"], [1.0], None, "0x1p9999"])
def test_numbers_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(CalibrationError, match=r"scale 0\.k: .* is no hexadecimal number"):
        scales_from_json({"0.k": text})  # type: ignore[dict-item]


@pytest.mark.parametrize("heads, percentile", [(None, 100.0), (2, 100.0), (2, 99.0)])
def test_layers_seen_together_are_as_seen_one_by_one(heads: int | None, percentile: float) -> None:
    x = {part: randn(i, 3, 2, 4 if part == "q" else 2, 5, 8) for i, part in enumerate(PARTS)}
    x["k"][2, 0, 1, 3, 0] = 50.0
    weights = torch.tensor([[1, 2, 0, 1, 1], [3, 0, 0, 0, 1]])
    first = CalibrationObserver(3, 1.0, percentile, None, heads)
    for part in PARTS:
        first.observe_layers(range(3), part, x[part], weights)
    scales = first.result().scales
    together, apart = (CalibrationObserver(3, 1.0, percentile, scales, heads) for _ in range(2))
    for part in PARTS:
        together.observe_layers(range(1), part, x[part][:1], weights)
        together.observe_layers(range(1, 3), part, x[part][1:] * 1.25, weights)
        for layer in range(3):
            apart.observe(layer, part, x[part][layer] * (1.25 if layer else 1.0), weights)
    assert together.state_dict()["state"].equal(apart.state_dict()["state"])
    assert together.result() == apart.result()
    assert together.result().metrics["calibration/saturated_fraction"] > 0
