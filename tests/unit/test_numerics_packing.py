"""Packing: every token once and in order, the budget, the exact inverse, and the balance over ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.packing import (
    PackedRows,
    PackingRule,
    context_places,
    micro_batches,
    next_tokens,
    pack,
    rank_micro_batches,
    unpack,
    unpack_all,
)


@st.composite
def rules(draw: st.DrawFn) -> PackingRule:
    part = draw(st.sampled_from([1, 2, 4, 8]))
    multiple = part * draw(st.integers(1, 6))
    return PackingRule(multiple + draw(st.integers(0, 100)), multiple, part)


UNTIMED = settings(deadline=None)
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=25)


def _rows(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens that are all different, 1 and more, padded with 0."""
    width, numbers = max(lengths), iter(range(1, sum(lengths) + 1))
    tokens = [[next(numbers) for _ in range(n)] + [0] * (width - n) for n in lengths]
    return torch.tensor(tokens), torch.tensor(lengths)


def _packed(lengths: list[int], rule: PackingRule) -> list[PackedRows]:
    tokens, known = _rows(lengths)
    return [pack(tokens, known, rows, rule) for rows in micro_batches(known, rule)]


def test_by_hand() -> None:
    tokens = torch.tensor([[11, 12, 13, 0], [21, 0, 0, 0], [31, 32, 0, 0]])
    lengths = torch.tensor([3, 1, 2])
    rule = PackingRule(budget=9, multiple=8, sequence_multiple=2)
    assert rule.capacity == 8
    (rows,) = micro_batches(lengths, rule)
    assert rows.tolist() == [0, 1, 2]
    packed = pack(tokens, lengths, rows, rule, pad_token=9)
    assert packed.tokens.tolist() == [11, 12, 13, 9, 21, 9, 31, 32]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.cu_seqlens_padded.tolist() == [0, 4, 6, 8]
    assert packed.cu_seqlens.dtype is packed.cu_seqlens_padded.dtype is torch.int32
    following, has = next_tokens(packed)
    assert following.tolist() == [12, 13, 0, 0, 0, 0, 32, 0]
    assert has.tolist() == [True, True, False, False, False, False, True, False]
    values = torch.arange(8.0)
    assert unpack(values, packed, 4, fill=-1.0).tolist() == [[0, 1, 2, -1], [4, -1, -1, -1], [6, 7, -1, -1]]
    assert unpack(values, packed, 4, fill=-1.0, shift=1).tolist() == [[-1, 0, 1, -1], [-1, -1, -1, -1], [-1, 6, -1, -1]]


def test_moving_takes_every_tensor_along() -> None:
    tokens, lengths = _rows([3, 2])
    packed = pack(tokens, lengths, torch.tensor([1, 0]), PackingRule(8, 8)).to(torch.device("meta"))
    assert {getattr(packed, name).device.type for name in vars(packed)} == {"meta"}
    assert packed.cu_seqlens.shape == (3,)


def test_the_last_slot_takes_the_padding_of_the_total() -> None:
    packed = pack(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 2]), torch.tensor([1, 0]), PackingRule(16, 16))
    assert packed.cu_seqlens_padded.tolist() == [0, 2, 16]
    assert packed.cu_seqlens.tolist() == [0, 2, 5]


def test_first_fit_decreasing_by_hand() -> None:
    """Capacity 10: 7 and 3, 6 and 4, 5; equal lengths by number."""
    found = micro_batches(torch.tensor([4, 7, 5, 6, 3]), PackingRule(10))
    assert [rows.tolist() for rows in found] == [[1, 4], [0, 3], [2]]
    assert [rows.tolist() for rows in micro_batches(torch.tensor([5, 5, 5]), PackingRule(10))] == [[0, 1], [2]]


def test_a_row_longer_than_the_budget_has_a_micro_batch_alone() -> None:
    found = micro_batches(torch.tensor([2, 50, 3]), PackingRule(8, 8))
    assert [rows.tolist() for rows in found] == [[1], [0, 2]]
    (packed, _) = _packed([2, 50, 3], PackingRule(8, 8))
    assert packed.tokens.numel() == 56


@UNTIMED
@given(LENGTHS, rules())
def test_every_token_once_and_in_order(lengths: list[int], rule: PackingRule) -> None:
    tokens, _ = _rows(lengths)
    seen: list[int] = []
    for packed in _packed(lengths, rule):
        bounds, tight = packed.cu_seqlens_padded.tolist(), packed.cu_seqlens.tolist()
        for row, start, length in zip(packed.rows.tolist(), bounds, packed.lengths.tolist(), strict=False):
            assert length == lengths[row]
            assert packed.tokens[start : start + length].tolist() == tokens[row, :length].tolist()
            assert packed.positions[start : start + length].tolist() == list(range(length))
            seen.append(row)
        assert [b - a for a, b in pairwise(tight)] == packed.lengths.tolist()
        assert int((packed.tokens != 0).sum()) == tight[-1]
        assert bool((packed.positions[packed.tokens == 0] == 0).all())
    assert sorted(seen) == list(range(len(lengths)))


@UNTIMED
@given(LENGTHS, rules())
def test_budget_and_multiples_hold(lengths: list[int], rule: PackingRule) -> None:
    found = _packed(lengths, rule)
    for packed in found:
        total = packed.tokens.numel()
        assert total % rule.multiple == 0
        assert packed.cu_seqlens_padded[-1] == total
        assert all((b - a) % rule.sequence_multiple == 0 for a, b in pairwise(packed.cu_seqlens_padded.tolist()))
        assert total <= rule.budget or packed.rows.numel() == 1
        # No more padding than the multiples ask for.
        slots = sum(rule.slot(n) for n in packed.lengths.tolist())
        assert total - slots < rule.multiple
    # First fit: two micro-batches of less than half the capacity would have been one.
    sizes = sorted(sum(rule.slot(n) for n in p.lengths.tolist()) for p in found)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > rule.capacity


@UNTIMED
@given(LENGTHS, rules(), st.sampled_from([0, 1]))
def test_unpacking_is_the_exact_inverse(lengths: list[int], rule: PackingRule, shift: int) -> None:
    tokens, known = _rows(lengths)
    parts = [(p, p.tokens.to(torch.float64)) for p in _packed(lengths, rule)]
    width = tokens.shape[1]
    back = unpack_all(parts, len(lengths), width, shift=shift)
    wanted = torch.where(tokens > 0, tokens.to(torch.float64), torch.nan)
    if shift:
        last = torch.arange(width) == (known - 1).unsqueeze(1)
        wanted = torch.cat([torch.full((len(lengths), 1), torch.nan), wanted.masked_fill(last, torch.nan)], 1)
        wanted = wanted[:, :width]
    torch.testing.assert_close(back, wanted, rtol=0, atol=0, equal_nan=True)


@UNTIMED
@given(LENGTHS, rules(), st.integers(1, 5))
def test_ranks_have_as_many_micro_batches_and_balanced_tokens(
    lengths: list[int], rule: PackingRule, ranks: int
) -> None:
    found = rank_micro_batches(torch.tensor(lengths), ranks, rule)
    assert len(found) == ranks
    assert len({len(parts) for parts in found}) == 1
    assert any(parts[-1].numel() for parts in found)
    rows = [row for parts in found for part in parts for row in part.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    slots = [rule.slot(n) for n in lengths]
    loads = [sum(slots[row] for part in parts for row in part.tolist()) for parts in found]
    assert max(loads) - min(loads) <= max(slots)
    for part in (part for parts in found for part in parts):
        assert part.numel() <= 1 or sum(slots[row] for row in part.tolist()) <= rule.capacity


def test_one_rank_is_the_plain_packing() -> None:
    lengths, rule = torch.tensor([5, 9, 2, 7, 1, 1]), PackingRule(10)
    (alone,) = rank_micro_batches(lengths, 1, rule)
    assert [p.tolist() for p in alone] == [p.tolist() for p in micro_batches(lengths, rule)]


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    tokens, lengths = _rows([4, 4])
    rule = PackingRule(8, 8, 4)
    found = rank_micro_batches(lengths, 3, rule)
    assert [[p.tolist() for p in parts] for parts in found] == [[[0]], [[1]], [[]]]
    nothing = pack(tokens, lengths, found[2][0], rule, pad_token=5)
    assert nothing.empty
    assert not pack(tokens, lengths, found[0][0], rule).empty
    assert nothing.tokens.tolist() == [5] * 8
    assert nothing.positions.tolist() == [0] * 8
    assert nothing.cu_seqlens.tolist() == nothing.cu_seqlens_padded.tolist() == [0, 8]
    assert unpack(torch.arange(8.0), nothing, 4).shape == (0, 4)
    assert not next_tokens(nothing)[1].any()
    whole = unpack_all([(nothing, torch.arange(8.0))], 2, 4)
    assert bool(whole.isnan().all())


def test_gradients_come_back_through_the_inverse() -> None:
    tokens, lengths = _rows([3, 2])
    packed = pack(tokens, lengths, torch.tensor([1, 0]), PackingRule(8, 8))
    values = torch.arange(8.0, requires_grad=True)
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (unpack(values, packed, 3, fill=0.0, shift=1) * weights).sum().backward()
    # Row 1 (two tokens) comes first; its successor's column is 1. Row 0 has two successors.
    assert values.grad is not None
    assert values.grad.tolist() == [2, 0, 5, 6, 0, 0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]))
def test_context_ranks_share_each_slot_evenly(lengths: list[int], ranks: int) -> None:
    rule = PackingRule(1000, 2 * ranks, 2 * ranks)
    tokens, known = _rows(lengths)
    packed = pack(tokens, known, torch.arange(len(lengths)), rule)
    places = [context_places(packed.cu_seqlens_padded, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(packed.tokens.numel()))
    for start, end in pairwise(packed.cu_seqlens_padded.tolist()):
        # A causal token attends to its place in the slot and all before: equal sums are equal work.
        work = [int((p[(p >= start) & (p < end)] - start).sum()) for p in places]
        assert len(set(work)) == 1


def test_context_places_by_hand() -> None:
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert context_places(bounds, 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_places(bounds, 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"a slot of 6 tokens: allowed: multiples of 4"):
        context_places(torch.tensor([0, 6], dtype=torch.int32), 0, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PackingRule(8, 6, 4), "sequence_multiple = 4: allowed: a divisor of multiple 6"),
        (lambda: PackingRule(7, 8), "budget = 7: allowed: 8"),
        (lambda: micro_batches(torch.tensor([3, 0]), PackingRule(8)), r"lengths\[1\] = 0"),
        (
            lambda: pack(torch.ones(1, 2), torch.tensor([3]), torch.tensor([0]), PackingRule(8)),
            r"lengths\[0\] = 3: allowed: from 1 to 2",
        ),
        (lambda: rank_micro_batches(torch.tensor([3]), 0, PackingRule(8)), "ranks = 0"),
        (
            lambda: pack(torch.ones(2, 5), torch.tensor([5, 5]), torch.tensor([0, 1]), PackingRule(8)),
            "10 tokens; allowed: 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
