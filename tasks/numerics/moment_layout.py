"""FP8 moments when the tensor they belong to is cut or joined another way.

Codes are elements and go with them. A scale belongs to 256 neighbours in row-major order, who may be no neighbours in
another layout: there scales are kept for smaller blocks, which loses nothing, and where a new block of 256 has got
more than one scale its moments are quantised anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.numerics.moments import FP8_BLOCK


def spread_scales(scales: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The scale of each element: `[ceil(elements / block)]` to `shape`, same dtype.

    The block is the largest power of two up to 256 that the number of scales allows; `ValueError` where none does.
    """
    size = int(torch.Size(shape).numel())
    return scales.repeat_interleave(block_of(scales.numel(), size))[:size].view(tuple(shape))


def block_of(scales: int, size: int) -> int:
    """Elements for each of `scales` scales of `size` elements; `ValueError` unless it is a power of two up to 256."""
    block = FP8_BLOCK
    while block:
        if -(-size // block) == scales:
            return block
        block //= 2
    raise ValueError(f"{scales} scales for {size} elements; allowed: one for each 256 of them, 128, 64, ..., or each")


def narrow_scales(spread: Tensor, block: int) -> Tensor:
    """The inverse of `spread_scales`, `[ceil(elements / block)]`: the first of each block stands for it."""
    return spread.reshape(-1)[::block].clone()


def shared_in_blocks(spread: Tensor) -> bool:
    """Whether each 256 neighbours have one scale."""
    first = narrow_scales(spread, FP8_BLOCK).repeat_interleave(FP8_BLOCK)[: spread.numel()]
    return torch.equal(first, spread.reshape(-1))
