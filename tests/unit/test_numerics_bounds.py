"""Error bounds of block quantisation by property, and the one-pass form against the two-step form."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.fp8 import E4M3_MAX, Quantized, dequantize, encode_scales, fake_quantize, quantize
from tests.unit.numerics_support import bits_equal, generator, one_torch_thread

HALF_SMALLEST = 2.0**-10
"""Half of the smallest subnormal step of E4M3."""
SMALLEST_NORMAL = 2.0**-6
HALF_STEP = 2.0**-4
"""Half of the step of a 3-bit mantissa, relative to the value."""

BLOCKS = st.sampled_from([(128, 128), (1, 128), (128, 1), (1, 32), (5, 3)])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Random matrices whose rows differ in magnitude by up to 2^36, some elements zero, some huge."""
    rows, columns = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    g = generator(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, columns, generator=g)
    x = x * torch.exp2(torch.randint(-18, 19, (rows, 1), generator=g).to(torch.float32))
    x = x * torch.exp2(draw(st.sampled_from([0.0, 8.0])) * torch.randn(rows, columns, generator=g))
    x = torch.where(torch.rand(rows, columns, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.99])), 0.0, x)
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def scale_of_each_element(q: Quantized) -> Tensor:
    rows, columns = q.codes.shape
    wide = q.scales.repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)
    return wide[:rows, :columns].to(torch.float64)


@settings(max_examples=60, deadline=None)
@given(matrices(), BLOCKS, st.booleans())
def test_error_bounds(x: Tensor, block: tuple[int, int], power_of_two: bool) -> None:
    q = quantize(x, block, power_of_two)
    value, scale = x.to(torch.float64), scale_of_each_element(q)
    error = (dequantize(q).to(torch.float64) - value).abs()
    # Beside the rounding of the code there are four fp32 roundings: encode, x * encode, 1 / encode, code * scale.
    slack = 4 * 2.0**-24 * value.abs()
    normal = value.abs() >= SMALLEST_NORMAL * scale * (1 + 2.0**-20)
    assert bool((error <= HALF_STEP * value.abs() + slack)[normal].all())
    assert bool((error <= HALF_SMALLEST * scale * (1 + 2.0**-20))[~normal].all())


@settings(max_examples=40, deadline=None)
@given(matrices(), BLOCKS, st.booleans())
def test_largest_element_of_each_block_uses_the_range(x: Tensor, block: tuple[int, int], power_of_two: bool) -> None:
    q = quantize(x, block, power_of_two)
    largest = (dequantize(q).abs() / scale_of_each_element(q)).amax()
    if not bool((x != 0).any()):
        assert float(largest) == 0.0
    elif power_of_two:
        assert 224.0 <= float(largest) <= E4M3_MAX
    else:
        assert math.isclose(float(largest), E4M3_MAX, rel_tol=2.0**-22)


@settings(max_examples=60, deadline=None)
@given(matrices(), BLOCKS, st.booleans(), st.sampled_from([None, math.nan, math.inf, -math.inf]))
def test_fake_quantize_is_bitwise_dequantize_of_quantize(
    x: Tensor, block: tuple[int, int], power_of_two: bool, poison: float | None
) -> None:
    if poison is not None:
        x[x.shape[0] // 2, x.shape[1] // 2] = poison
    before = x.clone()
    got = fake_quantize(x, block, power_of_two)
    assert got.dtype == torch.float32
    assert bits_equal(got, dequantize(quantize(x, block, power_of_two)))
    assert bits_equal(x, before)


@settings(max_examples=25, deadline=None)
@given(matrices(), BLOCKS)
def test_quantising_twice_changes_nothing_with_power_of_two_scales(x: Tensor, block: tuple[int, int]) -> None:
    once = fake_quantize(x, block, power_of_two=True)
    assert torch.equal(fake_quantize(once, block, power_of_two=True), once)


@settings(max_examples=25, deadline=None)
@given(matrices(), st.integers(-20, 20))
def test_power_of_two_scaling_of_the_source_scales_the_result(x: Tensor, exponent: int) -> None:
    factor = 2.0**exponent
    for power_of_two in (False, True):
        got = fake_quantize(x * factor, (1, 128), power_of_two)
        assert torch.equal(got, fake_quantize(x, (1, 128), power_of_two) * factor)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-149, 2.0**127, width=32))
def test_encode_scale_of_any_positive_amax(amax: float) -> None:
    a = torch.tensor([amax], dtype=torch.float32)
    exact = E4M3_MAX / amax
    plain = float(encode_scales(a))
    assert plain == min(float(torch.tensor(exact, dtype=torch.float64).float()), torch.finfo(torch.float32).max)
    power = float(encode_scales(a, power_of_two=True))
    assert math.frexp(power)[0] == 0.5
    # The largest power of two that does not saturate, unless capped at 2^126.
    assert amax * power <= E4M3_MAX and (power == 2.0**126 or 2 * power * amax > E4M3_MAX)
