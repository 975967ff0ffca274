"""Who writes which parameter of a checkpoint, and from whom its shards come: the same plan on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.engines.megatron_checkpoint import Shipment, owned_by, plan_shipment
from tasks.engines.megatron_config import Layout, part_at, plan_model
from tasks.engines.megatron_names import Form, ModelShape, entry_shape, stage_entries
from tasks.engines.megatron_shards import holdings, local_names
from tasks.engines.megatron_world import World
from tasks.engines.protocols import EngineError
from tests.engines.megatron_state import CONFIGS

LAYOUT = Layout(tensor=2, data=2)


@dataclass(frozen=True)
class Told(World):
    """What the other ranks have told is known."""

    masks: tuple[tuple[int, ...], ...] = ()

    def gather(self, values: Tensor) -> Tensor:
        rows = [torch.tensor(mask) for mask in self.masks] or [values] * self.size
        return torch.stack([values if rank == self.rank else row for rank, row in enumerate(rows)])


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder: Path = tmp_path_factory.mktemp("config")
    CONFIGS["tied"]().save_pretrained(folder)
    return plan_model(folder, LAYOUT).shape


def _world(shape: ModelShape, rank: int, masks: tuple[tuple[int, ...], ...] = ()) -> Told:
    # Megatron's order: tensor ranks first, then data ranks.
    parts = [part_at(shape, LAYOUT, 0, 0, other % 2) for other in range(4)]
    entries = stage_entries(shape, Form(False, False), parts[rank])
    names = local_names(shape, entries)
    return Told(rank, 4, holdings(shape, parts), names, torch.device("cpu"), None, masks)


def _owned(shape: ModelShape, world: World, every: int, first: int) -> dict[str, dict[str, Tensor]]:
    chosen = [h for number, h in enumerate(world.holdings) if number % every == first % every]
    weights = {world.names[h.entry.sources]: torch.zeros(entry_shape(shape, h.entry, h.size)) for h in chosen}
    return owned_by(weights, {f"{name}.step": torch.tensor(1.0) for name in weights})


def _masks(shape: ModelShape, owners: Mapping[int, tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """By rank, for ownership of every n-th parameter from a first one on: bits of an fp32 weight and of a step."""
    count = len(_world(shape, 0).holdings)
    return tuple(
        tuple(0b101 if number % owners[rank][0] == owners[rank][1] else 0 for number in range(count))
        for rank in range(4)
    )


def _plans(shape: ModelShape, owners: Mapping[int, tuple[int, int]]) -> list[Shipment]:
    masks = _masks(shape, owners)
    worlds = [_world(shape, rank, masks) for rank in range(4)]
    return [plan_shipment(shape, world, _owned(shape, world, *owners[world.rank])) for world in worlds]


@pytest.mark.parametrize("split", [False, True])
def test_all_ranks_have_one_plan_and_equal_shares(shape: ModelShape, split: bool) -> None:
    owners = {rank: (2, rank // 2) if split else (1, 0) for rank in range(4)}
    plans = _plans(shape, owners)
    assert all(plan == plans[0] for plan in plans)
    world, loads = _world(shape, 0), [0] * 4
    assert sorted(parcel.number for parcel in plans[0].parcels) == list(range(len(world.holdings)))
    for parcel in plans[0].parcels:
        holding = world.holdings[parcel.number]
        loads[parcel.target] += parcel.size * holding.size
        assert parcel.target in parcel.sources
        assert [source in shard for source, shard in zip(parcel.sources, holding.shards, strict=True)] == [
            True
        ] * holding.size
        if split:
            assert {source // 2 for source in parcel.sources} == {parcel.number % 2}
    assert max(loads) < 1.5 * min(loads)


def test_what_travels_the_same_way_stands_together(shape: ModelShape) -> None:
    ways = [(parcel.target, parcel.sources) for parcel in _plans(shape, dict.fromkeys(range(4), (1, 0)))[0].parcels]
    changes = sum(one != other for one, other in pairwise(ways))
    assert changes == len(set(ways)) - 1


def test_a_parameter_without_an_owner_is_named(shape: ModelShape) -> None:
    owners = {rank: (2, 0) for rank in range(4)}
    with pytest.raises(EngineError, match=r"input_layernorm\.weight: owners of its shards are \[\[\]\], of 0 kinds"):
        _plans(shape, owners)


def test_shards_of_different_kinds_are_named(shape: ModelShape) -> None:
    masks = [list(mask) for mask in _masks(shape, dict.fromkeys(range(4), (1, 0)))]
    masks[3][0] = 0b1
    world = _world(shape, 0, tuple(map(tuple, masks)))
    with pytest.raises(EngineError, match=r"embed_tokens\.weight: owners of its shards are .*, of 2 kinds"):
        plan_shipment(shape, world, _owned(shape, world, 1, 0))


def test_state_that_no_file_knows_is_refused(shape: ModelShape) -> None:
    world = _world(shape, 0)
    owned = _owned(shape, world, 1, 0)
    name = world.names[world.holdings[0].entry.sources]
    owned[name]["velocity"] = torch.zeros(1)
    with pytest.raises(EngineError, match=r"embed_tokens\.weight: \('velocity', torch\.float32\) is no state"):
        plan_shipment(shape, world, owned)


def test_state_of_what_a_rank_does_not_own_is_refused() -> None:
    with pytest.raises(EngineError, match=r"b\.step: state of a parameter that this rank does not own"):
        owned_by({"a": torch.zeros(1)}, {"b.step": torch.tensor(1.0)})
