"""Every FP8 format against a reference from its definition: codes, scales, layout, bounds, zeros, inf and NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.formats import (
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    Block,
    Element,
    Format,
    ScaleKind,
    element_of,
    element_type,
)
from tasks.numerics.fp8 import (
    NonFiniteError,
    Quantized,
    decode,
    dequantize,
    error_bound,
    fake_quantize,
    fake_quantize_as,
    quantize,
    quantize_as,
    quantize_weight_as,
    to_e8m0,
    to_element,
)
from tests.unit.formats_support import E5M2_MAGNITUDES, e5m2_value, nearest_e5m2, reference
from tests.unit.numerics_support import bits_equal, bytes_of, generator, one_torch_thread, randn

FORMATS = [
    Format(block, element, scale)
    for block, scale in (
        (PER_TENSOR, "fp32"),
        (PER_TENSOR, "power_of_two"),
        (PER_ROW, "fp32"),
        (PER_COLUMN, "power_of_two"),
        ((1, 32), "e8m0"),
        ((32, 1), "e8m0"),
        ((16, 24), "fp32"),
    )
    for element in ("e4m3", "e5m2")
]
LIMITS = {"e4m3": (448.0, 2.0**-6, 2.0**-9, 2.0**-4), "e5m2": (57344.0, 2.0**-14, 2.0**-16, 2.0**-3)}
"""Largest value, smallest normal, smallest subnormal, half a relative step."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def named(fmt: Format) -> str:
    return f"{fmt.element}-{fmt.block[0]}x{fmt.block[1]}-{fmt.scale}"


def wide_range(seed: int, rows: int, columns: int) -> Tensor:
    """Values over 24 binades with zeros among them."""
    x = randn(seed, rows, columns) * torch.exp2(torch.randint(-18, 6, (rows, columns), generator=generator(seed + 1)))
    return torch.where(torch.rand(rows, columns, generator=generator(seed + 2)) < 0.05, 0.0, x)


def test_e5m2_codes_have_the_published_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2)
    want = torch.tensor([e5m2_value(byte) for byte in range(256)])
    assert bits_equal(decode(codes), want)
    assert bits_equal(decode(codes, torch.bfloat16), want.to(torch.bfloat16))
    assert float(want[0x7B]) == 57344.0 and float(want[0x01]) == 2.0**-16 and float(want[0x04]) == 2.0**-14


def test_e5m2_rounds_to_nearest_even_and_saturates() -> None:
    middles = [(a + b) / 2 for a, b in pairwise(E5M2_MAGNITUDES)]
    near = [float(np.nextafter(np.float32(m), np.float32(s))) for m in middles for s in (0.0, 1e9)]
    far = [57344.0, 61439.0, 61440.0, 65536.0, 3e38]
    values = [*middles, *near, *far]
    x = torch.tensor([*values, *(-v for v in values)])
    got = bytes_of(to_element(x, "e5m2")).tolist()
    assert got == [nearest_e5m2(v) for v in x.double().tolist()]
    assert got[: len(middles)] == [n + n % 2 for n in range(len(middles))]
    ends = to_element(torch.tensor([math.inf, -math.inf, math.nan]), "e5m2").float().tolist()
    assert ends[:2] == [57344.0, -57344.0] and math.isnan(ends[2])


def test_limits_of_the_element_types() -> None:
    for element in ("e4m3", "e5m2"):
        kind = element_type(element)  # type: ignore[arg-type]
        assert (kind.largest, kind.smallest_normal, kind.smallest_subnormal, kind.half_step) == LIMITS[element]
        assert element_of(kind.dtype) == kind
        assert torch.finfo(kind.dtype).max == kind.largest and torch.finfo(kind.dtype).tiny == kind.smallest_normal
    with pytest.raises(ValueError, match=r"torch\.float32 holds no FP8 codes; allowed: torch\.float8_e4m3fn"):
        element_of(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=named)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (64, 32)])
def test_equals_the_reference(fmt: Format, shape: tuple[int, int]) -> None:
    x = wide_range(1, *shape)
    q, want = quantize_as(x, fmt), reference(x.double().numpy(), fmt.block, fmt.element, fmt.power_of_two)
    assert q.codes.dtype == fmt.limits.dtype and q.scales.dtype == fmt.scale_dtype
    assert tuple(q.scales.shape) == fmt.scale_shape(shape) == want.scales.shape
    np.testing.assert_array_equal(q.scales.to(torch.float32).numpy(), want.scales)
    np.testing.assert_array_equal(bytes_of(q.codes), want.bytes)
    np.testing.assert_array_equal(dequantize(q).numpy(), want.values.astype(np.float32))
    assert bits_equal(fake_quantize_as(x, fmt), dequantize(q))


def test_scale_layouts_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [4.0, 8.0, -3.5]])
    assert torch.equal(quantize_as(x, Format(PER_TENSOR)).scales, torch.tensor([[8.0]]) / 448)
    assert torch.equal(quantize_as(x, Format(PER_ROW)).scales, torch.tensor([[2.0], [8.0]]) / 448)
    assert torch.equal(quantize_as(x, Format(PER_COLUMN)).scales, torch.tensor([[4.0, 8.0, 3.5]]) / 448)
    # E8M0 bytes: 127 + log2 of the smallest power of two at or above amax / 448; 448 / 64 = 7, so 3.5 / 448 = 2^-7.
    x = torch.cat([torch.full((1, 32), 3.5), torch.full((1, 32), 3.6), torch.full((1, 6), 448.0)], 1)
    scales = quantize_as(x, Format((1, 32), "e4m3", "e8m0")).scales
    assert scales.view(torch.uint8).tolist() == [[120, 121, 127]]
    wide = quantize_as(x * 2.0**7, Format((1, 32), "e5m2", "e8m0")).scales
    assert wide.view(torch.uint8).tolist() == [[120, 121, 127]]


def test_bytes_count_codes_scales_and_edge_blocks() -> None:
    sizes = {
        Format((128, 128)): 200 * 300 + 4 * 2 * 3,
        Format((128, 128), "e4m3", "power_of_two"): 200 * 300 + 4 * 2 * 3,
        Format(PER_TENSOR): 200 * 300 + 4,
        Format(PER_ROW): 200 * 300 + 4 * 200,
        Format(PER_COLUMN): 200 * 300 + 4 * 300,
        Format((1, 32), "e4m3", "e8m0"): 200 * 300 + 200 * 10,
    }
    for fmt, size in sizes.items():
        q = quantize_as(torch.ones(200, 300), fmt)
        assert fmt.nbytes((200, 300)) == size == q.codes.nbytes + q.scales.nbytes


@pytest.mark.parametrize("fmt", FORMATS, ids=named)
def test_all_zero_block_is_zeros_with_scale_one(fmt: Format) -> None:
    q = quantize_as(torch.zeros(40, 70), fmt)
    assert torch.equal(q.scales.to(torch.float32), torch.ones(fmt.scale_shape((40, 70))))
    assert not bytes_of(q.codes).any() and bits_equal(dequantize(q), torch.zeros(40, 70))
    assert bits_equal(fake_quantize_as(torch.zeros(40, 70), fmt), torch.zeros(40, 70))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fmt", FORMATS, ids=named)
def test_inf_and_nan_poison_their_block_and_no_other(fmt: Format, bad: float) -> None:
    x = randn(2, 40, 70)
    clean = dequantize(quantize_as(x, fmt))
    poisoned = x.clone()
    poisoned[17, 35] = bad
    height, width = fmt.block_of((40, 70))
    group = torch.zeros(40, 70, dtype=torch.bool)
    top, left = 17 // height * height, 35 // width * width
    group[top : top + height, left : left + width] = True
    q = quantize_as(poisoned, fmt)
    for got in (dequantize(q), fake_quantize_as(poisoned, fmt)):
        assert bool(torch.isnan(got[group]).all())
        assert bits_equal(got[~group], clean[~group])
    if fmt.scale == "e8m0":
        assert int((q.scales.view(torch.uint8) == 0xFF).sum()) == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_weight_is_named_in_every_format(bad: float) -> None:
    weight = randn(3, 40, 64, dtype=torch.bfloat16)
    weight[39, 1] = bad
    for fmt in FORMATS:
        with pytest.raises(NonFiniteError, match=r"weight a\.b holds inf or NaN"):
            quantize_weight_as("a.b", weight, fmt)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Rows of unlike size (up to 2^36 apart), some elements zero."""
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    g = generator(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, columns, generator=g)
    x = x * torch.exp2(torch.randint(-18, 19, (rows, 1), generator=g).to(torch.float32))
    x = torch.where(torch.rand(rows, columns, generator=g) < draw(st.sampled_from([0.0, 0.5, 0.99])), 0.0, x)
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def spread(q: Quantized) -> Tensor:
    rows, columns = q.codes.shape
    wide = q.scales.to(torch.float64).repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)
    return wide[:rows, :columns]


@settings(max_examples=80, deadline=None)
@given(matrices(), st.sampled_from(FORMATS))
def test_error_stays_within_the_published_bound(x: Tensor, fmt: Format) -> None:
    largest, smallest_normal, smallest, half_step = LIMITS[fmt.element]
    q = quantize_as(x, fmt)
    value, scale = x.to(torch.float64), spread(q)
    error = (dequantize(q).to(torch.float64) - value).abs()
    slack = 4 * 2.0**-24 * value.abs()
    normal = value.abs() >= smallest_normal * scale * (1 + 2.0**-20)
    assert bool((error <= half_step * value.abs() + slack)[normal].all())
    assert bool((error <= smallest / 2 * scale * (1 + 2.0**-20))[~normal].all())
    assert bool((value.abs() <= largest * scale * (1 + 2.0**-22)).all()), "nothing saturates under its own amax"
    assert bool((error <= error_bound(x, q)).all())
    tight = torch.maximum(half_step * value.abs(), smallest / 2 * scale)
    assert bool((error_bound(x, q) <= tight + 2.0**-19 * torch.maximum(value.abs(), smallest * scale)).all())


@settings(max_examples=40, deadline=None)
@given(matrices(), st.sampled_from([f for f in FORMATS if f.power_of_two]))
def test_power_of_two_formats_are_idempotent_and_use_the_upper_binade(x: Tensor, fmt: Format) -> None:
    q = quantize_as(x, fmt)
    once = dequantize(q)
    assert torch.equal(fake_quantize_as(once, fmt), once)
    assert bool((torch.frexp(q.scales.to(torch.float32)).mantissa == 0.5).all())
    largest = LIMITS[fmt.element][0]
    if bool((x != 0).any()):
        assert largest / 2 <= float((once.double().abs() / spread(q)).amax()) <= largest


def test_a_given_scale_saturates_what_it_does_not_reach() -> None:
    x = torch.tensor([[1.0, -2.0, 3.9, 4.0, 9.0, -100.0]])
    for element, largest in (("e4m3", 448.0), ("e5m2", 57344.0)):
        fmt = Format(PER_TENSOR, element)  # type: ignore[arg-type]
        encode = torch.tensor([[largest / 4]])
        q = quantize_as(x, fmt, encode)
        got = dequantize(q)
        assert got[0, 3:].tolist() == [4.0, 4.0, -4.0] and got[0, :2].tolist() == [1.0, -2.0]
        assert bits_equal(fake_quantize_as(x, fmt, encode), got)
        error = (got.double() - x.double()).abs()
        assert error[0, 4:].tolist() == [5.0, 96.0]
        assert bool((error <= error_bound(x, q)).all()) and float(error_bound(x, q)[0, 5]) < 96.001


def test_the_plain_functions_are_the_e4m3_formats() -> None:
    x = wide_range(5, 40, 70)
    kinds: tuple[tuple[bool, ScaleKind], ...] = ((False, "fp32"), (True, "power_of_two"))
    for power_of_two, scale in kinds:
        fmt = Format((16, 32), "e4m3", scale)
        plain, general = quantize(x, (16, 32), power_of_two), quantize_as(x, fmt)
        assert np.array_equal(bytes_of(plain.codes), bytes_of(general.codes))
        assert torch.equal(plain.scales, general.scales) and plain.block == general.block
        assert bits_equal(fake_quantize(x, (16, 32), power_of_two), fake_quantize_as(x, fmt))


def test_mxfp8_values_equal_power_of_two_values() -> None:
    x = wide_range(6, 40, 70)
    elements: tuple[Element, ...] = ("e4m3", "e5m2")
    for element in elements:
        byte, full = Format((1, 32), element, "e8m0"), Format((1, 32), element, "power_of_two")
        assert bits_equal(fake_quantize_as(x, byte), fake_quantize_as(x, full))
        assert byte.nbytes((40, 70)) == full.nbytes((40, 70)) - 3 * 40 * 3


def test_e8m0_holds_every_power_of_two_exactly() -> None:
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64)).to(torch.float32)
    bytes_ = to_e8m0(powers)
    assert bytes_.view(torch.uint8).tolist() == list(range(1, 255))
    assert torch.equal(bytes_.to(torch.float32), powers)
    ends = to_e8m0(torch.tensor([math.inf, math.nan]))
    assert ends.view(torch.uint8).tolist() == [255, 255] and bool(torch.isnan(ends.to(torch.float32)).all())


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-34, 3.0e38])
def test_extreme_amax_stays_finite(amax: float, element: Element) -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = amax
    scales: tuple[ScaleKind, ...] = ("fp32", "power_of_two", "e8m0")
    for scale in scales:
        got = dequantize(quantize_as(x, Format((1, 32), element, scale)))
        assert bool(torch.isfinite(got).all()) and not got[0, 1:].any()
        if amax > 1e-35:
            assert got[0, 0].item() == pytest.approx(float(x[0, 0]), rel=LIMITS[element][3])


@pytest.mark.parametrize("block", [(0, 128), (None, 0), (-1, None)])
def test_a_block_has_a_positive_size(block: Block) -> None:
    with pytest.raises(ValueError, match="is not positive"):
        Format(block)


@pytest.mark.parametrize("fmt", FORMATS, ids=named)
def test_no_rows(fmt: Format) -> None:
    assert dequantize(quantize_as(torch.zeros(0, 64), fmt)).shape == (0, 64)
    assert fake_quantize_as(torch.zeros(0, 64), fmt).shape == (0, 64)
