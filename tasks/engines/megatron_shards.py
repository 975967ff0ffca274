"""Where the tensors of a model lie on its ranks, and what a tensor-parallel rank holds of each. Pure.

A tensor-parallel shard is made of equal parts of its Hugging Face tensors, one for each rank in order, with one
exception: where there are more ranks than key and value heads, a shard of Q, K and V ends within a head's group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from tasks.engines.megatron_names import (
    Entry,
    Form,
    ModelShape,
    Part,
    Shape,
    entry_shape,
    fuse,
    source_shape,
    split,
    stage_entries,
)
from tasks.numerics.moments import FP8_BLOCK

TIED_COPY = "output_layer.weight"
"""Megatron's name of what a pipeline's last stage has of a tied embedding."""


def whole_model(shape: ModelShape) -> tuple[Entry, ...]:
    """All parameters in the order of the model, named as on a single rank without Transformer Engine."""
    return stage_entries(shape, Form(False, False), Part(range(shape.layers), range(shape.experts), True, True))


@dataclass(frozen=True)
class Holding:
    """A parameter and who has it. `shards[t]`: the ranks that hold tensor-parallel shard t, each a copy, lowest first.

    Never cut, it has one shard. The copy of a tied embedding that a pipeline's last stage has does not count.
    """

    entry: Entry
    shards: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.shards)


def holdings(shape: ModelShape, parts: Sequence[Part]) -> tuple[Holding, ...]:
    """Of all parameters, in the order of the model; `parts` of each rank."""
    holders: dict[tuple[str, ...], list[list[int]]] = {}
    form, size = Form(False, False), parts[0].tensor_size
    for rank, part in enumerate(parts):
        for entry in stage_entries(shape, form, part):
            if shape.tied and entry.name == TIED_COPY:
                continue
            shards = holders.setdefault(entry.sources, [[] for _ in range(1 if entry.layout == "whole" else size)])
            shards[0 if entry.layout == "whole" else part.tensor_rank].append(rank)
    return tuple(Holding(entry, tuple(map(tuple, holders[entry.sources]))) for entry in whole_model(shape))


def local_names(shape: ModelShape, entries: Sequence[Entry]) -> dict[tuple[str, ...], str]:
    """The name that a rank has for each of its parameters, by `sources`; see `Holding` for the one left out."""
    return {entry.sources: entry.name for entry in entries if not (shape.tied and entry.name == TIED_COPY)}


def cut_dimension(entry: Entry) -> int:
    """The dimension along which tensor-parallel ranks share an entry's tensors."""
    return 1 if entry.layout == "columns" else 0


def separable(shape: ModelShape, entry: Entry, size: int) -> bool:
    """Whether each of `size` shards is made of equal parts of its Hugging Face tensors."""
    return entry.layout != "qkv" or shape.groups % size == 0


def _share(shape: ModelShape, entry: Entry, size: int) -> ModelShape:
    """A model as small as what one of `size` ranks has of the entry."""
    if size == 1 or entry.layout == "whole":
        return shape
    rows = shape.padded_vocabulary // size
    return replace(
        shape,
        heads=shape.heads // size,
        groups=shape.groups // size,
        mlp=shape.mlp // size,
        vocabulary=rows,
        padded_vocabulary=rows,
    )


def part_shape(shape: ModelShape, entry: Entry, name: str, size: int) -> Shape:
    """Shape of the part of the Hugging Face tensor `name` that one of `size` ranks has; the vocabulary with padding."""
    return source_shape(_share(shape, entry, size), name)


def part_tensors(shape: ModelShape, entry: Entry, shard: Tensor, size: int) -> dict[str, Tensor]:
    """Those parts, from a rank's `shard`; the entry must be `separable`."""
    return split(_share(shape, entry, size), entry, [shard])


def join_parts(shape: ModelShape, entry: Entry, parts: Sequence[Tensor]) -> Tensor:
    """A Hugging Face tensor from the parts of all ranks in order."""
    if len(parts) == 1:
        whole = parts[0]
    else:
        # Bytes, since not every device concatenates FP8.
        dtype, dim = parts[0].dtype, cut_dimension(entry)
        whole = torch.cat([p.view(torch.uint8) if dtype.itemsize == 1 else p for p in parts], dim).view(dtype)
    return whole[: shape.vocabulary] if entry.layout == "vocabulary" else whole


def part_bounds(shape: ModelShape, entry: Entry, name: str, rank: int, size: int) -> tuple[int, int, int]:
    """Dimension, start and end of a rank's part in the Hugging Face tensor `name`; padding of the vocabulary is cut."""
    dim = cut_dimension(entry)
    length, end = part_shape(shape, entry, name, size)[dim], source_shape(shape, name)[dim]
    return dim, min(rank * length, end), min((rank + 1) * length, end)


def fuse_parts(shape: ModelShape, entry: Entry, parts: Mapping[str, Tensor], size: int) -> Tensor:
    """A rank's shard from its parts of the Hugging Face tensors; rows that are not in the vocabulary are zeros."""
    if entry.layout == "vocabulary":
        (part,) = parts.values()
        rows, *rest = entry_shape(shape, entry, size)
        return torch.cat([part, part.new_zeros(rows - part.shape[0], *rest)]) if rows > part.shape[0] else part
    return fuse(_share(shape, entry, size), entry, [parts[name] for name in entry.sources], 0, 1)


def scale_block(shape: ModelShape, entry: Entry, size: int) -> int:
    """Most neighbours in a Hugging Face tensor that share a scale if 256 neighbours of each of `size` shards do.

    256 where blocks are whole in both, else a smaller power of two: the largest that divides the runs of elements that
    are neighbours in both.
    """
    columns = source_shape(shape, entry.sources[0])[1:]
    width = columns[0] if columns else 1
    if entry.layout == "columns":
        run = FP8_BLOCK if size == 1 else width // size
    elif entry.layout == "qkv":
        run = shape.head_dim * width
    elif entry.layout == "vocabulary":
        run = shape.padded_vocabulary // size * width
    elif len(entry.sources) == 1:
        run = FP8_BLOCK
    else:
        run = part_shape(shape, entry, entry.sources[0], 1 if entry.layout == "whole" else size)[0] * width
    if entry.layout == "qkv" and not separable(shape, entry, size):
        run = gcd(run, entry_shape(shape, entry, size)[0] * width)
    return gcd(FP8_BLOCK, run)
