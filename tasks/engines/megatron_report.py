"""What all ranks of a Megatron model hold together, and whether they agree on what they share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.engines.megatron_checkpoint import owned_by, plan_shipment, shipped
from tasks.engines.megatron_names import ModelShape
from tasks.engines.megatron_shards import TIED_COPY
from tasks.engines.megatron_world import World
from tasks.numerics.fingerprint import fingerprint, fingerprints

_HALF, _WHOLE = 2**63, 2**64


def gathered_fingerprints(shape: ModelShape, world: World, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Fingerprint of each Hugging Face tensor, on every rank, from what each rank owns of the weights.

    `weights` by Megatron's names; see `tasks.engines.megatron_checkpoint.StateHolder`. Called alike on all ranks.
    """
    owned = owned_by(weights, {})
    shipment = plan_shipment(shape, world, owned)
    names = [name for holding in world.holdings for name in holding.entry.sources]
    place = {name: number for number, name in enumerate(names)}
    found = torch.zeros(len(names), dtype=torch.int64)
    for name, _, tensor in shipped(shape, world, owned, shipment):
        found[place[name]] = _signed(fingerprint(tensor))
    together = world.total(found).tolist()
    return {name: value % _WHOLE for name, value in zip(names, together, strict=True)}


def differing_copies(shape: ModelShape, world: World, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Parameters of which two ranks that should have equal copies do not, in words; the same on all ranks.

    `weights`: this rank's live parameters, all of them. Both ends of a pipeline have a tied embedding.
    """
    if world.size == 1:
        return ()
    prints = fingerprints(dict(weights))
    held = torch.zeros(len(world.holdings) + 1, 2, dtype=torch.int64)
    for number, holding in enumerate(world.holdings):
        if holding.entry.sources in world.names:
            held[number] = torch.tensor([1, _signed(prints[world.names[holding.entry.sources]])])
    if shape.tied and TIED_COPY in prints:
        held[-1] = torch.tensor([1, _signed(prints[TIED_COPY])])
    seen = world.gather(held.flatten()).view(world.size, -1, 2)
    problems = []
    for number, holding in enumerate(world.holdings):
        for shard in holding.shards:
            problems += _differing(holding.entry.sources, {rank: int(seen[rank, number, 1]) for rank in shard})
    if shape.tied:
        # A stage's ranks stand in one order at both ends.
        copies = [rank for rank in range(world.size) if seen[rank, -1, 0]]
        first = [rank for rank in range(world.size) if seen[rank, 0, 0]]
        for one, other in zip(first, copies, strict=False):
            both = {one: int(seen[one, 0, 1]), other: int(seen[other, -1, 1])}
            problems += _differing(world.holdings[0].entry.sources, both)
    return tuple(problems)


def _differing(names: tuple[str, ...], prints: Mapping[int, int]) -> list[str]:
    first = min(prints)
    others = [rank for rank, value in prints.items() if value != prints[first]]
    return [f"{', '.join(names)}: ranks {first} and {others[0]} hold different copies"] if others else []


def _signed(value: int) -> int:
    return value - _WHOLE if value >= _HALF else value
