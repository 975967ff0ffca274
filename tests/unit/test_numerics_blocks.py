"""Block quantisation against a slow fp64 reference: block edges, zero blocks, outliers, scales, non-finite input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.numerics.fp8 import (
    ACTIVATION_GROUP,
    TOKEN_GROUP,
    WEIGHT_BLOCK,
    NonFiniteError,
    Quantized,
    block_amax,
    dequantize,
    encode_scales,
    fake_quantize,
    quantize,
    quantize_weight,
)
from tests.unit.numerics_support import bits_equal, bytes_of, generator, one_torch_thread, randn, reference_quantize

BLOCKS = [WEIGHT_BLOCK, ACTIVATION_GROUP, TOKEN_GROUP]
SHAPES = [(1, 1), (127, 129), (130, 257), (128, 128), (3, 128), (129, 1)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def wide_range(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values over many binades, zeros among them, so that normals, subnormals and underflow all occur."""
    x = randn(seed, rows, columns) * torch.exp2(torch.randint(-14, 6, (rows, columns), generator=generator(seed + 1)))
    return torch.where(torch.rand(rows, columns, generator=generator(seed + 2)) < 0.05, 0.0, x).to(dtype)


def assert_equals_reference(x: Tensor, block: tuple[int, int], power_of_two: bool) -> Quantized:
    q = quantize(x, block, power_of_two)
    want = reference_quantize(x.to(torch.float64).numpy(), block, power_of_two)
    assert q.block == block and q.codes.shape == x.shape and q.codes.dtype == torch.float8_e4m3fn
    assert q.codes.is_contiguous() and q.scales.dtype == torch.float32
    np.testing.assert_array_equal(q.scales.numpy(), want.scales)
    np.testing.assert_array_equal(bytes_of(q.codes), want.bytes)
    # A code has 4 significant bits and a scale 24: fp32 rounds their product once.
    np.testing.assert_array_equal(dequantize(q).numpy(), want.values.astype(np.float32))
    return q


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: tuple[int, int], block: tuple[int, int], power_of_two: bool) -> None:
    q = assert_equals_reference(wide_range(1, *shape), block, power_of_two)
    assert q.scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (7, 5), (1, 64), (200, 200)])
def test_other_block_shapes_equal_the_reference(block: tuple[int, int]) -> None:
    assert_equals_reference(wide_range(2, 9, 70), block, False)
    assert_equals_reference(wide_range(2, 9, 70), block, True)


@pytest.mark.parametrize("block", BLOCKS)
def test_bf16_source_and_transposed_source_equal_the_reference(block: tuple[int, int]) -> None:
    assert_equals_reference(wide_range(3, 70, 131, torch.bfloat16), block, False)
    assert_equals_reference(wide_range(4, 131, 70).t(), block, False)


def test_edge_blocks_take_their_scale_from_their_own_elements() -> None:
    x = torch.full((130, 257), 0.25)
    x[:128, :128], x[128:, 256:] = 3.5, 7.0
    q = quantize(x, WEIGHT_BLOCK)
    want = torch.tensor([[3.5, 0.25, 0.25], [0.25, 0.25, 7.0]]) / 448.0
    assert torch.equal(q.scales, want)
    assert torch.equal(dequantize(q), x)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_all_zero_block_is_zeros_with_scale_one(block: tuple[int, int], power_of_two: bool) -> None:
    q = quantize(torch.zeros(130, 257), block, power_of_two)
    assert torch.equal(q.scales, torch.ones_like(q.scales))
    assert not bytes_of(q.codes).any()
    assert bits_equal(dequantize(q), torch.zeros(130, 257))


def test_a_zero_group_beside_others_has_scale_one() -> None:
    x = randn(5, 4, 256)
    x[2, :128] = 0.0
    q = quantize(x, ACTIVATION_GROUP)
    assert float(q.scales[2, 0]) == 1.0 and int((q.scales == 1.0).sum()) == 1
    assert not dequantize(q)[2, :128].any()


def test_one_outlier_costs_only_its_own_block() -> None:
    x = randn(6, 256, 256) * 1e-3
    calm = dequantize(quantize(x, WEIGHT_BLOCK))
    spiked = x.clone()
    spiked[3, 200] = 1000.0
    q = assert_equals_reference(spiked, WEIGHT_BLOCK, False)
    got = dequantize(q)
    assert float(got[3, 200]) == pytest.approx(1000.0, rel=1e-6)
    # Half of the smallest step there is 2^-10 * 1000 / 448 = 2.2e-3: most of the block vanishes.
    block = got[:128, 128:]
    assert int((block != 0).sum()) < 0.05 * block.numel()
    for rows, columns in (
        (slice(128), slice(128)),
        (slice(128, None), slice(128)),
        (slice(128, None), slice(128, None)),
    ):
        assert bits_equal(got[rows, columns], calm[rows, columns])


@pytest.mark.parametrize("block", BLOCKS)
def test_power_of_two_scales_are_exact_and_never_saturate(block: tuple[int, int]) -> None:
    rows, columns = 200, 140
    # Amax values just below, at and just above 448 * 2^k are where a wrong rounding of the scale shows.
    x = torch.zeros(rows, columns)
    for i in range(rows):
        edge = np.float32(math.ldexp(448.0, i % 40 - 30))
        x[i] = float(np.nextafter(edge, np.float32((0, 1e30, edge)[i % 3])))
    q = quantize(x, block, power_of_two=True)
    mantissa, _ = torch.frexp(q.scales)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))
    amax = block_amax(x, block)
    assert bool((amax <= 448.0 * q.scales).all())
    assert bool((amax > 448.0 * q.scales / 2).all())


def test_power_of_two_scale_by_hand() -> None:
    amax = torch.tensor([448.0, 448.00003, 447.99997, 224.0, 1.0, 896.0, 0.0])
    encode = encode_scales(amax, power_of_two=True)
    assert encode.tolist() == [1.0, 0.5, 1.0, 2.0, 256.0, 0.5, 1.0]


def test_fp32_scale_by_hand() -> None:
    assert encode_scales(torch.tensor([448.0, 224.0, 1.0, 3.0, 0.0])).tolist() == [
        1.0,
        2.0,
        448.0,
        float(np.float32(448.0 / 3.0)),
        1.0,
    ]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("tiny", [1e-36, 1.2e-38, 1e-40, 1e-45])
def test_tiny_amax_gives_a_finite_scale(tiny: float, power_of_two: bool) -> None:
    x = torch.full((1, 128), tiny)
    x[0, 1:] = 0.0
    q = assert_equals_reference(x, ACTIVATION_GROUP, power_of_two)
    # Below the smallest normal number there is not enough range left for a useful code, only for a harmless one.
    scale = float(q.scales)
    assert 0 < scale <= 2.0**-126
    got = float(dequantize(q)[0, 0])
    assert abs(got - tiny) <= max(tiny * 2.0**-4, scale * 2.0**-10 + 1e-45)


def test_huge_amax_stays_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    for power_of_two in (False, True):
        got = dequantize(quantize(torch.tensor([[largest / 2, -largest / 2, 0.0]]), ACTIVATION_GROUP, power_of_two))
        assert got[0, 0].item() == pytest.approx(largest / 2, rel=2.0**-4) and got[0, 2].item() == 0.0
        assert got[0, 1] == -got[0, 0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_weight_is_an_error_that_names_the_tensor(bad: float) -> None:
    weight = randn(7, 130, 129, dtype=torch.bfloat16)
    weight[129, 128] = bad
    with pytest.raises(NonFiniteError, match=r"weight model\.layers\.3\.mlp\.up_proj\.weight holds inf or NaN"):
        quantize_weight("model.layers.3.mlp.up_proj.weight", weight, WEIGHT_BLOCK, False)


def test_finite_weight_quantises_as_any_matrix() -> None:
    weight = randn(8, 130, 129, dtype=torch.bfloat16)
    named, plain = quantize_weight("w", weight, WEIGHT_BLOCK, True), quantize(weight, WEIGHT_BLOCK, True)
    assert np.array_equal(bytes_of(named.codes), bytes_of(plain.codes)) and torch.equal(named.scales, plain.scales)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("block", BLOCKS)
def test_non_finite_value_poisons_its_group_and_no_other(
    block: tuple[int, int], bad: float, power_of_two: bool
) -> None:
    x = randn(9, 130, 257)
    poisoned = x.clone()
    poisoned[5, 130] = bad
    clean = dequantize(quantize(x, block, power_of_two))
    group = torch.zeros(130, 257, dtype=torch.bool)
    rows = slice(5, 6) if block[0] == 1 else slice(0, 128)
    columns = slice(130, 131) if block[1] == 1 else slice(128, 256)
    group[rows, columns] = True
    for got in (dequantize(quantize(poisoned, block, power_of_two)), fake_quantize(poisoned, block, power_of_two)):
        assert bool(torch.isnan(got[group]).all())
        assert bits_equal(got[~group], clean[~group])


def test_block_amax_by_hand() -> None:
    x = torch.tensor([[1.0, -5.0, 2.0], [3.0, 0.0, -0.5], [-7.0, 1.0, 0.25]])
    assert block_amax(x, (2, 2)).tolist() == [[5.0, 2.0], [7.0, 0.25]]
    assert block_amax(x, (1, 2)).tolist() == [[5.0, 2.0], [3.0, 0.5], [7.0, 0.25]]
    assert block_amax(x, (3, 1)).tolist() == [[7.0, 5.0, 2.0]]


def test_no_rows_and_no_wrong_ranks() -> None:
    for block in BLOCKS:
        assert dequantize(quantize(torch.zeros(0, 256), block)).shape == (0, 256)
        assert fake_quantize(torch.zeros(0, 256), block).shape == (0, 256)
    with pytest.raises(ValueError, match=r"takes a matrix, got shape \(2, 3, 4\)"):
        quantize(torch.zeros(2, 3, 4), WEIGHT_BLOCK)
    with pytest.raises(ValueError, match=r"takes a matrix, got shape \(4,\)"):
        fake_quantize(torch.zeros(4), ACTIVATION_GROUP)
    with pytest.raises(ValueError, match=r"block \(0, 128\) is not positive"):
        quantize(torch.zeros(2, 3), (0, 128))
