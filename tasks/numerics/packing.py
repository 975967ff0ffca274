"""Packing of right-padded rows into micro-batches of one long sequence each, its inverse, and the split over ranks.

A micro-batch is the concatenation of whole rows. Each row has a slot: its tokens, then padding up to a multiple that
context parallelism needs; the last slot is padded on, so that the total is a multiple that FP8 products need on every
rank. Padding stands behind a row's tokens, where causal attention never lets them see it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackingRule:
    """`budget`: most tokens of a micro-batch, padding included (a row that is longer has one alone).

    `multiple`: what the total is padded to (blockwise FP8 products over T tensor and C context ranks: 128 * T * C).
    `sequence_multiple`: what each slot is padded to (C context ranks: 2 * C; else 1), a divisor of `multiple`.
    Raises `ValueError` for numbers that do not fit together.
    """

    budget: int
    multiple: int = 1
    sequence_multiple: int = 1

    def __post_init__(self) -> None:
        if self.sequence_multiple < 1 or self.multiple < 1 or self.multiple % self.sequence_multiple:
            raise ValueError(
                f"sequence_multiple = {self.sequence_multiple}: allowed: a divisor of multiple {self.multiple}"
            )
        if self.budget < self.multiple:
            raise ValueError(f"budget = {self.budget}: allowed: {self.multiple} (multiple) and more")

    def slot(self, length: int) -> int:
        """Tokens that a row of `length` takes up."""
        return _ceil(length, self.sequence_multiple)

    @property
    def capacity(self) -> int:
        """Tokens of slots that fit a micro-batch, so that its padded total keeps the budget."""
        return self.budget // self.multiple * self.multiple


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch. `rows` int64 `[n]`, the numbers of its rows; `lengths` int64 `[n]`, their tokens.

    `tokens`, `positions` int64 `[total]`: positions restart at 0 in each row and are 0 in padding. `cu_seqlens` int32
    `[n + 1]`: bounds of the rows if they stood without padding; `cu_seqlens_padded` int32 `[n + 1]`: bounds of their
    slots in `tokens`, from 0 to the total. An empty micro-batch has no rows and one slot full of padding that both
    bounds show, so that a model can run on it while other ranks compute.
    """

    rows: Tensor
    lengths: Tensor
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor

    @property
    def empty(self) -> bool:
        return self.rows.numel() == 0

    def to(self, device: torch.device) -> PackedRows:
        """The same micro-batch with all tensors on `device`."""
        return PackedRows(*(getattr(self, field.name).to(device) for field in fields(self)))

    def real(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token of a row, in order: place in `tokens`, place in `rows`, column; int64 `[sum of lengths]`."""
        return _places(self.lengths, self.cu_seqlens_padded[:-1].to(torch.int64))


def micro_batches(lengths: Tensor, rule: PackingRule) -> tuple[Tensor, ...]:
    """Row numbers (int64, rising) of each micro-batch, by first fit in the order of falling length.

    `lengths` int64 `[rows]`, each >= 1. Deterministic: among equal lengths the lower number goes first. First fit
    decreasing needs at most 11/9 of the fewest micro-batches that are possible, and 2/3 of one.
    """
    return _first_fit(range(len(lengths)), _checked(lengths), rule)


def rank_micro_batches(lengths: Tensor, ranks: int, rule: PackingRule) -> tuple[tuple[Tensor, ...], ...]:
    """Row numbers of each micro-batch of each data-parallel rank: `[rank][micro-batch]`, as many on every rank.

    Longest row first to the rank with the fewest tokens (lowest number on a tie), so that two ranks differ by no more
    than the longest slot. Ranks with fewer micro-batches get empty ones at the end.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: allowed: 1 and more")
    known = _checked(lengths)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for row in sorted(range(len(known)), key=lambda r: (-known[r], r)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (load + rule.slot(known[row]), rank))
    packed = [_first_fit(share, known, rule) for share in shares]
    most = max(len(parts) for parts in packed)
    nothing = torch.empty(0, dtype=torch.int64)
    return tuple((*parts, *[nothing] * (most - len(parts))) for parts in packed)


def pack(tokens: Tensor, lengths: Tensor, rows: Tensor, rule: PackingRule, pad_token: int = 0) -> PackedRows:
    """The micro-batch of `rows` (int64 `[n]`, perhaps none), in that order.

    `tokens` int64 `[all rows, width]`, right-padded; `lengths` int64 `[all rows]`, from 1 to width; all on one device,
    for which the CPU will do: see `PackedRows.to`. Raises `ValueError` for rows that exceed the budget together, and
    for lengths that do not fit.
    """
    known = _checked(lengths, tokens.shape[1])
    slots = [rule.slot(known[row]) for row in rows.tolist()]
    if len(slots) > 1 and sum(slots) > rule.capacity:
        raise ValueError(f"rows {rows.tolist()}: {sum(slots)} tokens; allowed: {rule.capacity} in a micro-batch")
    total = _ceil(max(1, sum(slots)), rule.multiple)
    device = tokens.device
    taken = lengths[rows].to(torch.int64)
    bounds = torch.tensor([0, *slots], dtype=torch.int64).cumsum(0)
    bounds[-1] = total
    if not slots:
        bounds = torch.tensor([0, total])
    place, row, column = _places(taken, bounds[: len(slots)].to(device))
    packed = torch.full((total,), pad_token, dtype=torch.int64, device=device)
    packed[place] = tokens[rows[row], column]
    positions = torch.zeros(total, dtype=torch.int64, device=device)
    positions[place] = column
    padded = bounds.to(device, torch.int32)
    tight = torch.cat([taken.new_zeros(1), taken.cumsum(0)]).to(torch.int32) if slots else padded.clone()
    return PackedRows(rows, taken, packed, positions, tight, padded)


def unpack(values: Tensor, packed: PackedRows, width: int, fill: float = float("nan"), shift: int = 0) -> Tensor:
    """Values `[total]` of a micro-batch as `[n, width]` in the order of `packed.rows`; `fill` off the rows' tokens.

    `shift` 1: the value at a token is that of its successor in the row, as log-probabilities come out of a model; the
    row's first column is `fill` and the value at its last token is dropped. Differentiable in `values`.
    """
    place, row, column = packed.real()
    inside = column + shift < packed.lengths[row]
    spread = torch.full((packed.rows.numel(), width), fill, dtype=values.dtype, device=values.device)
    return spread.index_put((row[inside], column[inside] + shift), values[place[inside]])


def unpack_all(
    parts: Sequence[tuple[PackedRows, Tensor]], rows: int, width: int, fill: float = float("nan"), shift: int = 0
) -> Tensor:
    """The values of several micro-batches as `[rows, width]`, rows in their own places; see `unpack`.

    Rows that no part holds are `fill` throughout.
    """
    first = parts[0][1]
    together = torch.full((rows, width), fill, dtype=first.dtype, device=first.device)
    for packed, values in parts:
        together = together.index_copy(0, packed.rows, unpack(values, packed, width, fill, shift))
    return together


def next_tokens(packed: PackedRows) -> tuple[Tensor, Tensor]:
    """The successor of each token in its row, int64 `[total]`, and where there is one, bool `[total]`; 0 elsewhere."""
    place, row, column = packed.real()
    place = place[column + 1 < packed.lengths[row]]
    has = torch.zeros(packed.tokens.shape, dtype=torch.bool, device=packed.tokens.device)
    has[place] = True
    return torch.where(has, packed.tokens.roll(-1), 0), has


def context_places(cu_seqlens_padded: Tensor, rank: int, ranks: int) -> Tensor:
    """Which places of the packed tokens context-parallel rank `rank` holds, int64 `[total / ranks]`, in its order.

    Each slot is cut into 2 * ranks equal parts, of which a rank has the one of its number and the one as far from the
    end: under a causal mask all ranks then have equal work. Slots must be multiples of 2 * ranks.
    """
    bounds = cu_seqlens_padded.tolist()
    places = []
    for start, end in pairwise(bounds):
        if (end - start) % (2 * ranks):
            raise ValueError(f"a slot of {end - start} tokens: allowed: multiples of {2 * ranks} (2 * context ranks)")
        part = (end - start) // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            places.append(torch.arange(start + number * part, start + (number + 1) * part))
    return torch.cat(places).to(cu_seqlens_padded.device)


def _places(lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `PackedRows.real`; `starts` of the slots, int64 `[n]`."""
    count = lengths.numel()
    row = torch.arange(count, device=lengths.device).repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    column = torch.arange(row.numel(), device=lengths.device) - before[row]
    return starts[row] + column, row, column


def _first_fit(rows: Sequence[int], lengths: Sequence[int], rule: PackingRule) -> tuple[Tensor, ...]:
    found: list[list[int]] = []
    free: list[int] = []
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        slot = rule.slot(lengths[row])
        place = next((i for i, room in enumerate(free) if slot <= room), None)
        if place is None:
            found.append([row])
            free.append(rule.capacity - slot)
        else:
            found[place].append(row)
            free[place] -= slot
    return tuple(torch.tensor(sorted(part), dtype=torch.int64) for part in found)


def _checked(lengths: Tensor, width: int | None = None) -> list[int]:
    known: list[int] = lengths.tolist()
    for row, length in enumerate(known):
        if length < 1 or (width is not None and length > width):
            raise ValueError(f"lengths[{row}] = {length}: allowed: from 1 to {'the width' if width is None else width}")
    return known


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
