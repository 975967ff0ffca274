"""FP8 E4M3 quantisation in blocks, with real rounding through `torch.float8_e4m3fn`.

One definition serves both engines, every operand and every layout. A block is `(rows, columns)`:

- weights `[out, in]` in 128x128 blocks,
- activations and output gradients `[tokens, features]` in 1x128 groups,
- the operands of a weight gradient in 128x1 groups, that is along tokens.

The arithmetic is that of Transformer Engine's blockwise recipe: encode = 448 / amax in fp32, codes =
round(x * encode) in E4M3 (round to nearest even, saturating), decode scale = 1 / encode. With
`power_of_two` the mantissa of `encode` is cleared, so that the decode scale is an exact power of two
at or above amax / 448. (Transformer Engine, `Float8BlockScaling`; DeepSeek-V3 report, section 3.3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""Largest finite value of E4M3 (the `fn` variant: no infinities)."""

WEIGHT_BLOCK = (128, 128)
ACTIVATION_GROUP = (1, 128)
TOKEN_GROUP = (128, 1)


class NonFiniteError(ValueError):
    """A tensor that must be finite holds inf or NaN."""


@dataclass(frozen=True)
class Quantized:
    """E4M3 codes with one fp32 decode scale a block.

    `codes` has the shape of the source, `[rows, columns]`; `scales` is `[ceil(rows / block_rows),
    ceil(columns / block_columns)]`; value = code * scale of its block. Edge blocks are smaller.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]


def encode_scales(amax: Tensor, power_of_two: bool = False) -> Tensor:
    """Factor that maps `amax` to 448, fp32, same shape.

    A zero amax gives 1 (an all-zero block then decodes to zeros with scale 1). A non-finite amax gives
    a non-finite or zero factor, so that the whole block decodes to NaN instead of to wrong numbers.
    """
    amax = amax.to(torch.float32)
    # A tensor divides: torch turns `scalar / tensor` into reciprocal times scalar, which rounds twice.
    encode = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, E4M3_MAX) / amax)
    # 448 / amax overflows below an amax of 1.3e-36; Transformer Engine falls back to the largest float.
    encode = torch.where((amax > 0) & torch.isinf(encode), torch.finfo(torch.float32).max, encode)
    if power_of_two:
        # 2^126 keeps the decode scale a normal number: 2^-127 is subnormal and may be flushed to zero.
        mantissa, exponent = torch.frexp(encode.clamp(max=2.0**126))
        encode = torch.where(
            torch.isfinite(encode) & (encode > 0), torch.ldexp(torch.sign(mantissa), exponent - 1), encode
        )
    return encode


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 codes, saturating at +-448; NaN stays NaN. Same shape, dtype float8_e4m3fn."""
    # Releases of torch differ: the bare cast saturates in some and turns everything beyond 464 into NaN in others.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_table(dtype: torch.dtype = torch.float32) -> Tensor:
    """The value of each of the 256 codes, indexed by the code's byte. Shape `[256]`."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values of E4M3 codes; both fp32 and bf16 hold all of them. Same shape."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # A table look-up is four times faster than the CPU's cast, with equal results (tested for all codes).
    index = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return torch.index_select(decode_table(dtype), 0, index).view(codes.shape)


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


def _check_matrix(x: Tensor, block: tuple[int, int]) -> None:
    if x.ndim != 2:
        raise ValueError(f"block quantisation takes a matrix, got shape {tuple(x.shape)}")
    if min(block) < 1:
        raise ValueError(f"block {block} is not positive")


def quantize(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> Quantized:
    """Quantise a matrix block by block (see the module's text for the arithmetic).

    Relative error of a value that is not tiny beside its block's amax: at most 2^-4 (half a step of a
    3-bit mantissa); absolute error otherwise at most 2^-10 decode scales (half the smallest subnormal).
    """
    _check_matrix(x, block)
    encode = encode_scales(block_amax(x, block), power_of_two)
    scaled = _blocked(x.to(torch.float32), block) * encode[:, None, :, None]
    rows, columns = x.shape
    codes = to_e4m3(scaled).reshape(encode.shape[0] * block[0], encode.shape[1] * block[1])
    return Quantized(codes[:rows, :columns].contiguous(), 1.0 / encode, block)


def dequantize(q: Quantized) -> Tensor:
    """fp32 values `codes * scales`, shape of `codes`."""
    rows, columns = q.codes.shape
    values = _blocked(decode(q.codes), q.block) * q.scales[:, None, :, None]
    padded = values.reshape(q.scales.shape[0] * q.block[0], q.scales.shape[1] * q.block[1])
    return padded[:rows, :columns]


def quantize_weight(name: str, weight: Tensor, block: tuple[int, int], power_of_two: bool) -> Quantized:
    """Quantise a weight `[out, in]`, read in the precision it is computed in (BF16).

    Raises `NonFiniteError`, naming the tensor, where the weight holds inf or NaN.
    """
    q = quantize(weight, block, power_of_two)
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(f"weight {name} holds inf or NaN: it cannot be quantised")
    return q


def fake_quantize(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> Tensor:
    """`dequantize(quantize(x))` in one pass, fp32, same shape and bitwise the same result."""
    _check_matrix(x, block)
    rows, columns = x.shape
    encode = encode_scales(block_amax(x, block), power_of_two)[:, None, :, None]
    scaled = _blocked(x.to(torch.float32), block) * encode
    values = decode(scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)).mul_(1.0 / encode)
    return values.reshape(values.shape[0] * block[0], values.shape[2] * block[1])[:rows, :columns]


def quantize_static(x: Tensor, scale: float) -> Tensor:
    """E4M3 codes of x / scale under a given decode scale (KV cache, attention queries); saturating."""
    if not scale > 0:
        raise ValueError(f"an FP8 scale must be positive, got {scale}")
    return to_e4m3(x.to(torch.float32) / scale)
