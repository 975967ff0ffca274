"""FP8 number formats: an element type, the block that shares a scale, and the kind of scale.

| | e4m3 | e5m2 |
|---|---|---|
| bits | 4 exponent (bias 7), 3 mantissa | 5 exponent (bias 15), 2 mantissa |
| largest | 448 | 57344 |
| smallest normal, smallest subnormal | 2^-6, 2^-9 | 2^-14, 2^-16 |
| half a step, relative | 2^-4 | 2^-3 |
| codes that are no number | NaN (2) | NaN (6), infinity (2, never written) |

(OCP 8-bit Floating Point Specification, 2023; Micikevicius et al., arXiv 2209.05433.)

Rounding is to nearest even and saturates at the largest value, in every format. With s the decode scale of a
block (value = code * s) the error of an element x with abs(x) <= largest * s is at most
max(half step * abs(x), smallest subnormal / 2 * s), but for the fp32 roundings of the scale (2^-22 relative).

Scales of a block, from its amax:

- `fp32`: encode = largest / amax rounded to fp32, s = 1 / encode.
- `power_of_two`: the mantissa of encode is cleared, so that s is the smallest power of two at or above
  amax / largest, and no less than 2^-126. Nothing saturates; up to one binade of the range stays unused.
- `e8m0`: the same s, kept as its biased exponent in one byte (OCP Microscaling v1.0; Rouhani et al., arXiv
  2310.10537). Transformer Engine rounds up likewise. The other choice, the example rule of the OCP text,
  s = 2^(floor(log2 amax) - floor(log2 largest)), saturates elements between 448 s and 512 s (E4M3: error up to
  1/8 of the amax) and is not offered.

In every format an all-zero block has s = 1 and decodes to zeros, and a block that holds inf or NaN decodes to
NaN as a whole, instead of to plausible numbers; in `e8m0` its scale is the NaN byte 0xFF. Other blocks
are not touched. (Transformer Engine leaves such blocks at scale 1, where inf becomes the largest value.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Element = Literal["e4m3", "e5m2"]
ScaleKind = Literal["fp32", "power_of_two", "e8m0"]
Block = tuple[int | None, int | None]
"""Rows and columns of a block; None stands for the whole dimension."""

PER_TENSOR: Block = (None, None)
PER_ROW: Block = (1, None)
PER_COLUMN: Block = (None, 1)
MX_GROUP = 32
"""Elements along the contraction that share one E8M0 scale in MXFP8."""


@dataclass(frozen=True)
class ElementType:
    """Limits of an element type; `half_step` relative to the value, the others absolute."""

    dtype: torch.dtype
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    half_step: float


_E4M3 = ElementType(torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 2.0**-4)
_E5M2 = ElementType(torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-3)


def element_type(element: Element) -> ElementType:
    """Limits of `e4m3` or `e5m2`."""
    return _E4M3 if element == "e4m3" else _E5M2


def element_of(dtype: torch.dtype) -> ElementType:
    """Limits of the element type stored in `dtype`; `ValueError` for any other dtype."""
    for kind in (_E4M3, _E5M2):
        if kind.dtype == dtype:
            return kind
    raise ValueError(f"{dtype} holds no FP8 codes; allowed: {_E4M3.dtype}, {_E5M2.dtype}")


@dataclass(frozen=True)
class Format:
    """How a matrix `[rows, columns]` is quantised. `ValueError` for a block side below 1."""

    block: Block
    element: Element = "e4m3"
    scale: ScaleKind = "fp32"

    def __post_init__(self) -> None:
        if any(side is not None and side < 1 for side in self.block):
            raise ValueError(f"block {self.block} is not positive")

    @property
    def limits(self) -> ElementType:
        return element_type(self.element)

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two, however they are stored."""
        return self.scale != "fp32"

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e8m0fnu if self.scale == "e8m0" else torch.float32

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The block in elements for a matrix of this shape."""
        rows, columns = self.block
        return (max(1, shape[0]) if rows is None else rows, max(1, shape[1]) if columns is None else columns)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """`[row blocks, column blocks]`; edge blocks count."""
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes and scales of a matrix of this shape."""
        row_blocks, column_blocks = self.scale_shape(shape)
        return shape[0] * shape[1] + row_blocks * column_blocks * self.scale_dtype.itemsize
