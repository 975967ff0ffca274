"""FP8 quantisation in blocks, with real rounding through torch's FP8 dtypes.

One definition serves both engines, every operand, every layout and every format
(`tasks.numerics.formats`, which also says what zero and non-finite blocks do). A block is `(rows, columns)`;
the default recipe has

- weights `[out, in]` in 128x128 blocks,
- activations and output gradients `[tokens, features]` in 1x128 groups,
- the operands of a weight gradient in 128x1 groups, that is along tokens.

The arithmetic is that of Transformer Engine's blockwise recipe: encode = largest / amax in fp32, codes =
round(x * encode) (round to nearest even, saturating), decode scale = 1 / encode. With `power_of_two` the
mantissa of `encode` is cleared, so that the decode scale is an exact power of two at or above
amax / largest. (Transformer Engine, `Float8BlockScaling`; DeepSeek-V3 report, arXiv 2412.19437, section 3.3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.numerics.formats import Block, Element, Format, element_of, element_type

E4M3_MAX = 448.0
E4M3_HALF_SMALLEST = 2.0**-10
"""Half of the smallest magnitude above zero: what is at most this rounds to zero."""
"""Largest finite value of E4M3 (the `fn` variant: no infinities)."""

WEIGHT_BLOCK = (128, 128)
ACTIVATION_GROUP = (1, 128)
TOKEN_GROUP = (128, 1)

_FLUSH_EXPONENT = 126
"""2^126 is the largest power-of-two encode factor: 2^-127 is subnormal and may be flushed to zero."""


class NonFiniteError(ValueError):
    """A tensor that must be finite holds inf or NaN."""


@dataclass(frozen=True)
class Quantized:
    """FP8 codes with one decode scale a block.

    `codes` has the shape of the source, `[rows, columns]`, dtype float8_e4m3fn or float8_e5m2; `scales` is
    `[ceil(rows / block_rows), ceil(columns / block_columns)]`, fp32, or float8_e8m0fnu in MXFP8;
    value = code * scale of its block. Edge blocks are smaller.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]


def encode_scales(amax: Tensor, power_of_two: bool = False, largest: float = E4M3_MAX) -> Tensor:
    """Factor that maps `amax` to `largest`, fp32, same shape.

    A zero amax gives 1 (an all-zero block then decodes to zeros with scale 1). A non-finite amax gives
    a non-finite or zero factor, so that the whole block decodes to NaN instead of to wrong numbers.
    """
    amax = amax.to(torch.float32)
    # A tensor divides: torch turns `scalar / tensor` into reciprocal times scalar, which rounds twice.
    encode = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, largest) / amax)
    # largest / amax overflows below an amax of 1.3e-36 (e4m3); Transformer Engine takes the largest float then.
    encode = torch.where((amax > 0) & torch.isinf(encode), torch.finfo(torch.float32).max, encode)
    if power_of_two:
        mantissa, exponent = torch.frexp(encode.clamp(max=2.0**_FLUSH_EXPONENT))
        encode = torch.where(
            torch.isfinite(encode) & (encode > 0), torch.ldexp(torch.sign(mantissa), exponent - 1), encode
        )
    return encode


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 codes, saturating at +-448; NaN stays NaN. Same shape, dtype float8_e4m3fn."""
    return to_element(x, "e4m3")


def to_element(x: Tensor, element: Element) -> Tensor:
    """Round to the codes of an element type, saturating at its largest value; NaN stays NaN. Same shape."""
    kind = element_type(element)
    # Releases of torch differ: the bare cast saturates in some and turns everything beyond 464 into NaN in others.
    return x.clamp(-kind.largest, kind.largest).to(kind.dtype)


def to_e8m0(scales: Tensor) -> Tensor:
    """Powers of two from 2^-126 to 2^127 (fp32) as E8M0 bytes; inf and NaN become NaN. Same shape."""
    # The exponent field of an fp32 power of two is its E8M0 code, and that of inf and NaN is E8M0's NaN.
    exponent = (scales.view(torch.int32) >> 23) & 0xFF
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_table(dtype: torch.dtype = torch.float32, codes: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """The value of each of the 256 codes, indexed by the code's byte. Shape `[256]`."""
    return torch.arange(256, dtype=torch.uint8).view(codes).to(dtype)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values of FP8 codes; both fp32 and bf16 hold all of them. Same shape."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # A table look-up is four times faster than the CPU's cast, with equal results (tested for all codes).
    index = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return torch.index_select(decode_table(dtype, codes.dtype), 0, index).view(codes.shape)


def _blocked(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View `[rows, columns]` as `[row blocks, block rows, column blocks, block columns]`, zero-padded."""
    rows, columns = x.shape
    pad_rows, pad_columns = -rows % block[0], -columns % block[1]
    if pad_rows or pad_columns:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows))
    return x.reshape((rows + pad_rows) // block[0], block[0], (columns + pad_columns) // block[1], block[1])


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, fp32 `[row blocks, column blocks]`; NaN where a block holds NaN."""
    view = _blocked(x, block)
    dims = tuple(d for d in (1, 3) if view.shape[d] > 1) or (3,)
    return (
        torch.maximum(view.amax(dims, keepdim=True), -view.amin(dims, keepdim=True))
        .reshape(view.shape[0], view.shape[2])
        .to(torch.float32)
    )


def _check_matrix(x: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"block quantisation takes a matrix, got shape {tuple(x.shape)}")


def _plain(block: Block, power_of_two: bool) -> Format:
    return Format(block, "e4m3", "power_of_two" if power_of_two else "fp32")


def _encoding(x: Tensor, fmt: Format, block: tuple[int, int], encode: Tensor | None) -> Tensor:
    if encode is not None:
        return encode
    return encode_scales(block_amax(x, block), fmt.power_of_two, fmt.limits.largest)


def quantize(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> Quantized:
    """Quantise a matrix to E4M3 block by block (see the module's text for the arithmetic).

    Relative error of a value that is not tiny beside its block's amax: at most 2^-4 (half a step of a
    3-bit mantissa); absolute error otherwise at most 2^-10 decode scales (half the smallest subnormal).
    """
    return quantize_as(x, _plain(block, power_of_two))


def quantize_as(x: Tensor, fmt: Format, encode: Tensor | None = None) -> Quantized:
    """Quantise a matrix in any format; `encode` `[row blocks, column blocks]` stands before the matrix's own amax.

    Raises `ValueError` for another rank. Under a given `encode` values beyond largest / encode saturate.
    """
    _check_matrix(x)
    block = fmt.block_of(x.shape)
    encode = _encoding(x, fmt, block, encode)
    scaled = _blocked(x.to(torch.float32), block) * encode[:, None, :, None]
    rows, columns = x.shape
    codes = to_element(scaled, fmt.element).reshape(encode.shape[0] * block[0], encode.shape[1] * block[1])
    scales = 1.0 / encode
    return Quantized(codes[:rows, :columns].contiguous(), to_e8m0(scales) if fmt.scale == "e8m0" else scales, block)


def dequantize(q: Quantized) -> Tensor:
    """fp32 values `codes * scales`, shape of `codes`."""
    rows, columns = q.codes.shape
    values = _blocked(decode(q.codes), q.block) * q.scales.to(torch.float32)[:, None, :, None]
    padded = values.reshape(q.scales.shape[0] * q.block[0], q.scales.shape[1] * q.block[1])
    return padded[:rows, :columns]


def error_bound(x: Tensor, q: Quantized) -> Tensor:
    """Largest possible abs(dequantize(q) - x) of each element of finite `x`, fp64, shape of `x`.

    Half a step where the code is normal, half the smallest subnormal below, and the distance to the largest
    value where the scale is too small for x (a scale from history); four fp32 roundings are added.
    """
    rows, columns = x.shape
    kind, value = element_of(q.codes.dtype), x.to(torch.float64).abs()
    wide = q.scales.to(torch.float64).repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)
    scale = wide[:rows, :columns]
    rounding = torch.maximum(kind.half_step * value, kind.smallest_subnormal / 2 * scale)
    return torch.maximum(rounding, value - kind.largest * scale) + 2.0**-20 * torch.maximum(
        value, kind.smallest_subnormal * scale
    )


def quantize_weight(name: str, weight: Tensor, block: Block, power_of_two: bool) -> Quantized:
    """`quantize_weight_as` in E4M3 with fp32 or power-of-two scales."""
    return quantize_weight_as(name, weight, _plain(block, power_of_two))


def quantize_weight_as(name: str, weight: Tensor, fmt: Format) -> Quantized:
    """Quantise a weight `[out, in]`, read in the precision it is computed in (BF16).

    Raises `NonFiniteError`, naming the tensor, where the weight holds inf or NaN.
    """
    q = quantize_as(weight, fmt)
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(f"weight {name} holds inf or NaN: it cannot be quantised")
    return q


def fake_quantize(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> Tensor:
    """`dequantize(quantize(x))` in one pass, fp32, same shape and bitwise the same result."""
    return fake_quantize_as(x, _plain(block, power_of_two))


def fake_quantize_as(x: Tensor, fmt: Format, encode: Tensor | None = None) -> Tensor:
    """`dequantize(quantize_as(x, fmt, encode))` in one pass, fp32, same shape and bitwise the same result."""
    _check_matrix(x)
    rows, columns = x.shape
    block = fmt.block_of(x.shape)
    encode = _encoding(x, fmt, block, encode)[:, None, :, None]
    scaled, largest = _blocked(x.to(torch.float32), block) * encode, fmt.limits.largest
    values = decode(scaled.clamp_(-largest, largest).to(fmt.limits.dtype)).mul_(1.0 / encode)
    return values.reshape(values.shape[0] * block[0], values.shape[2] * block[1])[:rows, :columns]


def quantize_static(x: Tensor, scale: float) -> Tensor:
    """E4M3 codes of x / scale under a given decode scale (KV cache, attention queries); saturating."""
    if not scale > 0:
        raise ValueError(f"an FP8 scale must be positive, got {scale}")
    return to_e4m3(x.to(torch.float32) / scale)
