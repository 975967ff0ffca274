"""E4M3 codes and rounding against a decoder and a rounding written from the format's definition."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.numerics.fp8 import E4M3_MAX, decode, decode_table, quantize_static, to_e4m3
from tests.unit.numerics_support import (
    MAGNITUDES,
    MAX_CODE,
    bits_equal,
    bytes_of,
    nearest_byte,
    randn,
    value_of,
)

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def assert_rounds_like_the_table(x: torch.Tensor) -> None:
    got = bytes_of(to_e4m3(x)).reshape(-1).tolist()
    for value, byte in zip(x.to(torch.float64).reshape(-1).tolist(), got, strict=True):
        want = nearest_byte(value)
        if math.isnan(value):
            assert byte & 0x7F == 0x7F, f"NaN became {byte:#04x}"
        else:
            assert byte == want, f"{value!r} became {byte:#04x} = {value_of(byte)}, want {want:#04x}"


def float32_neighbours(value: float) -> list[float]:
    x = np.float32(value)
    return [float(np.nextafter(x, np.float32(-np.inf))), float(x), float(np.nextafter(x, np.float32(np.inf)))]


def test_reference_decoder_has_the_published_landmarks() -> None:
    assert value_of(0x7E) == 448.0 and value_of(0xFE) == -448.0
    assert value_of(0x01) == 2.0**-9 and value_of(0x07) == 0.875 * 2.0**-6 and value_of(0x08) == 2.0**-6
    assert value_of(0x38) == 1.0 and value_of(0x3C) == 1.5
    assert math.isnan(value_of(0x7F)) and math.isnan(value_of(0xFF))
    assert sum(math.isnan(value_of(b)) for b in range(256)) == 2
    assert list(MAGNITUDES) == sorted(set(MAGNITUDES)) and len(MAGNITUDES) == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_256_codes_decode_to_the_definition(dtype: torch.dtype) -> None:
    want = torch.tensor([value_of(b) for b in range(256)], dtype=torch.float64)
    got = decode(ALL_CODES, dtype)
    assert got.dtype == dtype
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    finite = ~torch.isnan(want)
    assert torch.equal(got.to(torch.float64)[finite], want[finite])
    assert torch.equal(torch.signbit(got)[finite], torch.signbit(want)[finite])
    assert math.copysign(1.0, float(got[0x80])) == -1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_lookup_equals_the_cast(dtype: torch.dtype) -> None:
    assert bits_equal(decode(ALL_CODES, dtype), ALL_CODES.to(dtype))
    assert bits_equal(decode_table(dtype), ALL_CODES.to(dtype))
    shuffled = ALL_CODES.view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
    assert bits_equal(decode(shuffled, dtype), shuffled.to(dtype))


def test_decode_keeps_shape_of_any_layout() -> None:
    codes = to_e4m3(randn(0, 3, 5, 7) * 50)
    assert bits_equal(decode(codes), codes.to(torch.float32))
    transposed = codes.view(torch.uint8).permute(2, 0, 1).view(torch.float8_e4m3fn)
    assert not transposed.is_contiguous()
    assert bits_equal(decode(transposed), transposed.to(torch.float32))
    assert decode(codes[:0]).shape == (0, 5, 7)
    assert decode(codes[0, 0, 0]).shape == ()


def test_every_code_survives_a_round_trip() -> None:
    again = bytes_of(to_e4m3(decode(ALL_CODES)))
    finite = [b for b in range(256) if b & 0x7F != 0x7F]
    assert [int(again[b]) for b in finite] == finite
    assert all(int(again[b]) & 0x7F == 0x7F for b in (0x7F, 0xFF))


def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearest() -> None:
    values = [n for a, b in pairwise(MAGNITUDES) for n in float32_neighbours((a + b) / 2)]
    x = torch.tensor([*values, *(-v for v in values)], dtype=torch.float32)
    assert_rounds_like_the_table(x)
    # Spelled out: the middle of codes n and n + 1 has the even one of the two.
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], dtype=torch.float32)
    assert bytes_of(to_e4m3(middles)).tolist() == [n + n % 2 for n in range(MAX_CODE)]


def test_hand_worked_ties() -> None:
    step = 2.0**-9  # the smallest subnormal
    x = torch.tensor([0.5 * step, 1.5 * step, 2.5 * step, 7.5 * step, 17.0, 19.0, 432.0, 416.0 + 16.0, -17.0])
    want = [0.0, 2 * step, 2 * step, 8 * step, 16.0, 20.0, 448.0, 448.0, -16.0]
    assert decode(to_e4m3(x)).tolist() == want


def test_subnormals_and_what_vanishes() -> None:
    step = 2.0**-9
    just_above_half = float(np.nextafter(np.float32(step / 2), np.float32(1)))
    x = torch.tensor([step / 2, just_above_half, 1e-30, 1e-45, -1e-45, -step / 2, 6.9 * step, 7.6 * step])
    got = decode(to_e4m3(x))
    assert got.tolist() == [0.0, step, 0.0, 0.0, 0.0, 0.0, 7 * step, 8 * step]
    assert torch.signbit(got).tolist() == [False, False, False, False, True, True, False, False]


def test_saturation_at_448_and_far_beyond() -> None:
    far = [448.0, 448.00003, 463.9, 464.0, 464.1, 480.0, 512.0, 1e4, 3e38, math.inf]
    x = torch.tensor([*far, *(-v for v in far)])
    assert decode(to_e4m3(x)).tolist() == [448.0] * len(far) + [-448.0] * len(far)
    assert E4M3_MAX == max(MAGNITUDES) == 448.0


def test_nan_stays_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([math.nan, -math.nan, 1.0], dtype=dtype)
        assert torch.isnan(decode(to_e4m3(x))).tolist() == [True, True, False]


def test_every_bf16_number_rounds_like_the_table() -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    assert_rounds_like_the_table(bits.view(torch.bfloat16))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_any_fp32_number_rounds_like_the_table(values: list[float]) -> None:
    assert_rounds_like_the_table(torch.tensor(values, dtype=torch.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=64))
def test_fp32_numbers_in_range_round_like_the_table(values: list[float]) -> None:
    assert_rounds_like_the_table(torch.tensor(values, dtype=torch.float32))


def test_static_scale_divides_then_rounds_and_saturates() -> None:
    x = torch.tensor([0.0, 1.0, -2.0, 4.25, 896.0, 897.0, 5000.0, -5000.0, 2.0**-9, 1.1 * 2.0**-9])
    got = decode(quantize_static(x, 2.0)).tolist()
    assert got == [0.0, 0.5, -1.0, 2.0, 448.0, 448.0, 448.0, -448.0, 0.0, 2.0**-9]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=32), st.floats(2.0**-20, 2.0**20, width=32))
def test_static_scale_equals_fp32_division_and_table(values: list[float], scale: float) -> None:
    got = bytes_of(quantize_static(torch.tensor(values, dtype=torch.float32), scale)).tolist()
    assert got == [nearest_byte(float(np.float32(v / scale))) for v in values]


def test_static_scale_reads_bf16_in_fp32() -> None:
    x = randn(3, 64, dtype=torch.bfloat16)
    assert bytes_of(quantize_static(x, 0.0031)).tolist() == bytes_of(quantize_static(x.float(), 0.0031)).tolist()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_static_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match=f"an FP8 scale must be positive, got {scale}"):
        quantize_static(torch.ones(2), scale)
