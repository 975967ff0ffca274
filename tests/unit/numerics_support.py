"""Independent references for the numerics tests: E4M3 from the format's definition, block quantisation in numpy.

Nothing here uses torch's FP8 dtype or the code under test.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_CODE = 0x7E
NAN_CODE = 0x7F


def value_of(byte: int) -> float:
    """E4M3 (fn): sign, 4 exponent bits with bias 7, 3 mantissa bits; S.1111.111 is NaN; no infinities."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa / 8, 1 - 7)
    return sign * math.ldexp(1 + mantissa / 8, exponent - 7)


MAGNITUDES = tuple(value_of(code) for code in range(MAX_CODE + 1))
"""Non-negative finite values in the order of their codes, which is ascending."""


def nearest_byte(x: float) -> int:
    """Round to nearest, ties to the even code, saturating; NaN to NaN. Searches the table; `x` exact in fp64."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    if math.isnan(x):
        return sign | NAN_CODE
    magnitude = abs(x)
    above = bisect.bisect_left(MAGNITUDES, magnitude)
    if above > MAX_CODE:
        return sign | MAX_CODE
    if MAGNITUDES[above] == magnitude:
        return sign | above
    below = above - 1
    up, down = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]
    if up == down:
        return sign | (below if below % 2 == 0 else above)
    return sign | (above if up < down else below)


def nearest_value(x: float) -> float:
    return value_of(nearest_byte(x))


@dataclass(frozen=True)
class Reference:
    """What block quantisation must give: bytes uint8 and values fp64 `[rows, columns]`, scales fp32."""

    bytes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    values: NDArray[np.float64]


def reference_quantize(x: NDArray[np.float64], block: tuple[int, int], power_of_two: bool = False) -> Reference:
    """Element by element in fp64; rounded to fp32 exactly where the definition computes in fp32.

    Each fp32 result is one fp64 operation on fp32 operands, rounded once more: for a product, and for a
    quotient of two fp32 numbers, that equals the correctly rounded fp32 operation. Finite input only.
    """
    rows, columns = x.shape
    codes = np.zeros((rows, columns), np.uint8)
    values = np.zeros((rows, columns), np.float64)
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            span_r = range(i * block[0], min(rows, (i + 1) * block[0]))
            span_c = range(j * block[1], min(columns, (j + 1) * block[1]))
            amax = max(abs(float(x[r, c])) for r in span_r for c in span_c)
            encode = 1.0
            if amax > 0 and power_of_two:
                # Largest exponent with amax * 2^e <= 448, found by comparison, without a logarithm.
                exponent = next(e for e in range(126, -150, -1) if math.ldexp(amax, e) <= 448.0)
                encode = math.ldexp(1.0, exponent)
            elif amax > 0:
                encode = float(np.float32(min(448.0 / amax, float(np.finfo(np.float32).max))))
            scales[i, j] = np.float32(1.0 / encode)
            for r in span_r:
                for c in span_c:
                    codes[r, c] = nearest_byte(float(np.float32(float(x[r, c]) * encode)))
                    values[r, c] = value_of(int(codes[r, c])) * float(scales[i, j])
    return Reference(codes, scales, values)


def independent_values(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> NDArray[np.float64]:
    """Decoded fp32 values of `x` after block quantisation, held in fp64."""
    values = reference_quantize(x.detach().to(torch.float64).numpy(), block, power_of_two).values
    return values.astype(np.float32).astype(np.float64)


def bytes_of(codes: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = codes.contiguous().view(torch.uint8).numpy()
    return array


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bit patterns, except that any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    return bool((same | (torch.isnan(a) & torch.isnan(b))).all())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """On small tensors two threads wait for each other longer than they work, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
