"""Owners of parameters, buckets of messages, which micro-batches an update runs; with real ranks: tests/engines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tasks.engines.rank_exchange import RankExchange, Sharing, apply_in_buckets, balanced_owners, in_buckets
from tasks.engines.train_step import update_of


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_owners_have_about_the_same(sizes: list[int], ranks: int) -> None:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    owners = balanced_owners(named, ranks)
    assert owners.keys() == named.keys()
    loads = [sum(named[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes)


def test_owners_are_decided_by_sizes_and_order_alone() -> None:
    assert balanced_owners({"a": 1, "b": 5, "c": 3, "d": 5}, 2) == {"b": 0, "d": 1, "c": 0, "a": 1}
    assert balanced_owners({"a": 1, "b": 9, "c": 1}, 2, first=["c"]) == {"c": 0, "b": 1, "a": 0}


def test_buckets_keep_order_and_bound() -> None:
    sizes = [3, 4, 4, 20, 1, 9, 1]
    buckets = list(in_buckets([torch.zeros(size) for size in sizes], limit=10))
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[3, 4], [4], [20], [1, 9], [1]]
    assert list(in_buckets([])) == []


def test_a_collective_reaches_every_tensor_in_place() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4), torch.arange(12.0).view(3, 4).T, torch.tensor(5.0)]
    before, sent = [tensor.clone() for tensor in tensors], []

    def double(message: Tensor) -> None:
        sent.append(message.numel())
        message.mul_(2)

    apply_in_buckets(tensors, double, limit=11)
    assert sent == [10, 12, 1]
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, 2 * old)


def test_all_ranks_leave_out_the_same_micro_batches() -> None:
    """Those in which no rank has anything to learn; a rank with nothing keeps what another needs."""
    nothing = torch.empty(0, dtype=torch.int64)
    ranks = [[torch.tensor([0]), torch.tensor([1]), torch.tensor([2])], [torch.tensor([3]), torch.tensor([4]), nothing]]
    kept = torch.zeros(5, 4, dtype=torch.bool)
    kept[[2, 3], 1] = True
    first, second = (update_of(ranks, kept, rank) for rank in range(2))
    assert [rows.tolist() for rows in first.learned] == [[0], [2]]
    assert [rows.tolist() for rows in second.learned] == [[3], []]
    assert [rows.tolist() for rows in first.passes] == [[0], [1], [2]]
    assert update_of(ranks, torch.zeros(5, 4, dtype=torch.bool)).learned == ()


class _Group:
    """Ranks, as threads, that add up in an order of their own, as communicators on a GPU may."""

    def __init__(self, ranks: list[int], order: list[int], current: threading.local) -> None:
        self._ranks, self._order, self._current = ranks, order, current
        self._given: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(len(ranks))

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._ranks.index(self._current.rank)

    def add(self, tensor: Tensor, target: int | None) -> None:
        self._given[self.rank()] = tensor.clone()
        self._barrier.wait(10)
        total = torch.zeros_like(tensor)
        for rank in self._order:
            total += self._given[rank]
        self._barrier.wait(10)
        if target is None or target == self.rank():
            tensor.copy_(total)


@pytest.mark.parametrize("split", [True, False])
def test_copies_on_tensor_ranks_get_the_same_bits(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensor and three data ranks; the data ranks of one tensor rank add up from the front, of the other from the
    back, which in fp32 gives another sum."""
    current = threading.local()
    data = [_Group([tensor, 2 + tensor, 4 + tensor], [[0, 1, 2], [2, 1, 0]][tensor], current) for tensor in range(2)]
    tensor = [_Group([2 * copy, 2 * copy + 1], [0, 1], current) for copy in range(3)]
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "reduce", lambda t, target, group: group.add(t, target))
    monkeypatch.setattr(dist, "all_reduce", lambda t, group: group.add(t, None))

    def sums(rank: int) -> dict[str, Tensor]:
        current.rank = rank
        groups: Any = {"copies": data[rank % 2], "partial": tensor[rank // 2]}
        parameters = {name: Parameter(torch.zeros(2)) for name in ("norm", "router")}
        exchange = RankExchange(parameters, dict.fromkeys(parameters, Sharing(**groups)), split)
        own = [1.0, 2.0**-24, 2.0**-24][rank // 2]
        return exchange.sums({name: torch.full((2,), own) for name in parameters})

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(sums, range(6)))
    for copy in range(3):
        one, other = found[2 * copy], found[2 * copy + 1]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    # 1 from the front and 1 + 2^-23 from the back, together 2 to the nearest.
    assert all(gradient.tolist() == [2.0, 2.0] for part in found for gradient in part.values())
    assert sorted(name for part in found[::2] for name in part) == sorted(["norm", "router"] * (1 if split else 3))
