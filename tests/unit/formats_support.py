"""Independent reference for every FP8 format: tables from the definition, blocks in fp64, no torch FP8 dtype."""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.unit import numerics_support
from tests.unit.numerics_support import Reference

Block = tuple[int | None, int | None]
E5M2_MAX_CODE = 0x7B


def e5m2_value(byte: int) -> float:
    """E5M2: sign, 5 exponent bits with bias 15, 2 mantissa bits; exponent 31 is infinity or NaN, as in IEEE 754."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 2) & 0x1F, byte & 0x3
    if exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa / 4, 1 - 15)
    return sign * math.ldexp(1 + mantissa / 4, exponent - 15)


E5M2_MAGNITUDES = tuple(e5m2_value(code) for code in range(E5M2_MAX_CODE + 1))


def nearest_e5m2(x: float) -> int:
    """Round to nearest, ties to the even code, saturating at 57344. `x` exact in fp64, no NaN."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    magnitude = abs(x)
    above = bisect.bisect_left(E5M2_MAGNITUDES, magnitude)
    if above > E5M2_MAX_CODE:
        return sign | E5M2_MAX_CODE
    if above == 0 or E5M2_MAGNITUDES[above] == magnitude:
        return sign | above
    up, down = E5M2_MAGNITUDES[above] - magnitude, magnitude - E5M2_MAGNITUDES[above - 1]
    if up == down:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if up < down else above - 1)


def reference(x: NDArray[np.float64], block: Block, element: str, power_of_two: bool) -> Reference:
    """Codes, decode scales (fp32) and values (fp64) of finite `x`; None in `block` is the whole dimension."""
    rows, columns = x.shape
    height, width = rows if block[0] is None else block[0], columns if block[1] is None else block[1]
    largest = 448.0 if element == "e4m3" else 57344.0
    nearest = numerics_support.nearest_byte if element == "e4m3" else nearest_e5m2
    value_of = numerics_support.value_of if element == "e4m3" else e5m2_value
    codes, values = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns), np.float64)
    scales = np.zeros((math.ceil(rows / height), math.ceil(columns / width)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        encode = encode_factor(float(np.abs(x[part]).max()), largest, power_of_two)
        scales[i, j] = np.float32(1.0 / encode)
        scaled = (x[part] * encode).astype(np.float32)
        codes[part] = np.vectorize(lambda v: nearest(float(v)), otypes=[np.uint8])(scaled)
        values[part] = np.vectorize(lambda c: value_of(int(c)))(codes[part]) * float(scales[i, j])
    return Reference(codes, scales, values)


def encode_factor(amax: float, largest: float, power_of_two: bool) -> float:
    """Largest power of two (at most 2^126) that keeps amax within `largest`, or largest / amax rounded to fp32."""
    if amax == 0:
        return 1.0
    if power_of_two:
        return math.ldexp(1.0, next(e for e in range(126, -150, -1) if math.ldexp(amax, e) <= largest))
    return float(np.float32(min(largest / amax, float(np.finfo(np.float32).max))))


def values_of(x: Tensor, block: Block, element: str, power_of_two: bool) -> NDArray[np.float64]:
    """Decoded fp32 values of `x`, held in fp64."""
    array = x.detach().double().numpy()
    return reference(array, block, element, power_of_two).values.astype(np.float32).astype(np.float64)
