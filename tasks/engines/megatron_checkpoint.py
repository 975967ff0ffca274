"""Weights and optimiser state of a Megatron model over all its ranks, in files by Hugging Face names.

A tensor is whole in exactly one of the files; each rank writes one, `weights-RRRRR-of-NNNNN.safetensors` beside
`optimizer-...`. Any other layout, and the PyTorch trainer, reads them: nothing in them knows how the model was spread.
Nothing is unpickled.

What a continued run needs to be bitwise the same is in these files and in trainer.json. No random state is: models
have no dropout, the sample of a calibration is drawn by the version of the weights, and stochastic rounding by the
number of the update.

fp32 and BF16 state is by element, and exact in every layout. FP8 moments are exact where the blocks of 256 elements
that share a scale are blocks in the other layout too, as with matrices whose rows (on a tensor-parallel rank) are a
multiple of 256 long. Elsewhere `load` quantises anew, with a warning; in the layout that was saved it is always exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from tasks.engines.megatron_names import ModelShape, entry_shape, source_shape, split
from tasks.engines.megatron_shards import Holding, scale_block
from tasks.engines.megatron_world import Parcel, World, exchange, lightest
from tasks.engines.protocols import EngineError, TensorForm
from tasks.engines.tensor_files import TensorFileWriter, form_bytes, rank_file
from tasks.engines.trainer_state import OPTIMIZER, WEIGHTS
from tasks.numerics.moment_layout import narrow_scales, spread_scales
from tasks.numerics.moments import FP8_BLOCK

STEP, SCALES, CODES = "step", "_scales", "_codes"
_WEIGHT = "weight"
_FP32, _BF16, _E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
_ITEMS: Final = (
    (_WEIGHT, _FP32),
    (_WEIGHT, _BF16),
    (STEP, _FP32),
    ("exp_avg", _FP32),
    ("exp_avg", _BF16),
    ("exp_avg_sq", _FP32),
    ("exp_avg_sq", _BF16),
    ("compensation", _BF16),
    ("exp_avg_codes", _E4M3),
    ("exp_avg_scales", _FP32),
    ("exp_avg_sq_root_codes", _E4M3),
    ("exp_avg_sq_root_scales", _FP32),
)
"""All that a parameter can have; a rank tells the others in one bit each."""


class StateHolder(Protocol):
    """A rank's optimiser.

    `weights()` and `live_state()` give what this rank owns, by Megatron's names of its parameters (state as
    `<parameter>.<kind>`, all of a parameter or nothing); every parameter has one owner at least among the ranks that
    hold a copy of the same shard, and all owners have equal bits. `load` takes what `weights()` has, and brings the
    compute copies of all parameters up to date on all ranks. `updates` is the same on all ranks.
    """

    updates: int

    def weights(self) -> dict[str, Tensor]: ...

    def live_state(self) -> dict[str, Tensor]: ...

    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor], updates: int) -> None: ...


Owned = Mapping[str, Mapping[str, Tensor]]
"""What a rank owns by parameter, then by kind, `weight` among them."""


def owned_by(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`weights` and `<parameter>.<kind>` by parameter; `EngineError` for state of a parameter that is not there."""
    found = {name: {_WEIGHT: weight.detach()} for name, weight in weights.items()}
    for full, tensor in state.items():
        name, _, kind = full.rpartition(".")
        if name not in found:
            raise EngineError(f"{full}: state of a parameter that this rank does not own")
        found[name][kind] = tensor
    return found


@dataclass(frozen=True)
class Shipment:
    """How parameters get to the ranks that are to have them whole: parcels, and the `kinds` of tensors in each."""

    parcels: tuple[Parcel, ...]
    kinds: tuple[tuple[tuple[str, torch.dtype], ...], ...]


def plan_shipment(shape: ModelShape, world: World, owned: Owned) -> Shipment:
    """Each parameter to one of its owners, so that all have about equally many bytes; the same on all ranks.

    `EngineError` for a parameter that nobody owns, and one of which shards differ in kind.
    """
    masks = world.gather(torch.tensor(_masks(world, owned)))
    loads, parcels, kinds = [0] * world.size, {}, {}
    forms = {}
    for number, holding in enumerate(world.holdings):
        owners = [[rank for rank in shard if masks[rank, number]] for shard in holding.shards]
        told = {int(masks[rank, number]) for shard in owners for rank in shard}
        if not all(owners) or len(told) != 1:
            raise EngineError(
                f"{', '.join(holding.entry.sources)}: owners of its shards are {owners}, of {len(told)} kinds: "
                "allowed are one at least for each, and all of one kind"
            )
        kinds[number] = tuple(item for bit, item in enumerate(_ITEMS) if next(iter(told)) >> bit & 1)
        forms[number] = tuple(_form(shape, holding, *item) for item in kinds[number])
    sizes = {number: sum(map(form_bytes, forms[number])) * world.holdings[number].size for number in forms}
    for number in sorted(forms, key=lambda n: (-sizes[n], n)):
        owners = [[rank for rank in shard if masks[rank, number]] for shard in world.holdings[number].shards]
        target = lightest(sorted(rank for shard in owners for rank in shard), loads, sizes[number])
        sources = tuple(target if target in shard else shard[0] for shard in owners)
        parcels[number] = Parcel(number, sources, target, forms[number])
    # What travels the same way stands together.
    order = sorted(parcels.values(), key=lambda parcel: (parcel.target, parcel.sources, parcel.number))
    return Shipment(tuple(order), tuple(kinds[number] for number in range(len(kinds))))


def _masks(world: World, owned: Owned) -> list[int]:
    found = []
    for holding in world.holdings:
        tensors = owned.get(world.names.get(holding.entry.sources, ""), {})
        items = [(kind, tensor.dtype) for kind, tensor in tensors.items()]
        unknown = sorted(str(item) for item in items if item not in _ITEMS)
        if unknown:
            raise EngineError(f"{', '.join(holding.entry.sources)}: {unknown[0]} is no state that can be saved")
        found.append(sum(1 << _ITEMS.index(item) for item in items))
    return found


def _form(shape: ModelShape, holding: Holding, kind: str, dtype: torch.dtype) -> TensorForm:
    """Of one rank's tensor of a kind."""
    whole = entry_shape(shape, holding.entry, holding.size)
    if kind == STEP:
        return TensorForm((), dtype)
    if kind.endswith(SCALES):
        return TensorForm((-(-torch.Size(whole).numel() // FP8_BLOCK),), dtype)
    return TensorForm(whole, dtype)


Tensors = Iterator[tuple[str, str, Tensor]]
"""Hugging Face name, kind and tensor."""


def shipped(shape: ModelShape, world: World, owned: Owned, shipment: Shipment) -> Tensors:
    """All that is for this rank; every rank goes through it to the end."""
    held, kinds = world.holdings, shipment.kinds

    def give(parcel: Parcel) -> list[Tensor]:
        tensors = owned[world.names[held[parcel.number].entry.sources]]
        return [tensors[kind] for kind, _ in kinds[parcel.number]]

    for parcel, shards in exchange(world, shipment.parcels, give):
        holding = held[parcel.number]
        for (kind, _), column in zip(kinds[parcel.number], zip(*shards, strict=True), strict=True):
            for name, tensor in _whole(shape, holding, kind, column).items():
                yield name, kind, tensor


def _whole(shape: ModelShape, holding: Holding, kind: str, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """A kind of a parameter's Hugging Face tensors, from all its shards."""
    entry, size = holding.entry, holding.size
    if kind == STEP:
        return dict.fromkeys(entry.sources, shards[0])
    if kind.endswith(SCALES):
        spread = split(shape, entry, [spread_scales(s, entry_shape(shape, entry, size)) for s in shards])
        block = scale_block(shape, entry, size)
        return {name: narrow_scales(scales, block) for name, scales in spread.items()}
    if kind.endswith(CODES):
        # Bytes: not every device joins and cuts FP8.
        parts = split(shape, entry, [shard.view(torch.uint8) for shard in shards])
        return {name: part.view(_E4M3) for name, part in parts.items()}
    return split(shape, entry, shards)


def _file_forms(shape: ModelShape, world: World, shipment: Shipment) -> tuple[dict[str, TensorForm], ...]:
    """What this rank writes: weights, and state."""
    weights: dict[str, TensorForm] = {}
    state: dict[str, TensorForm] = {}
    for parcel in shipment.parcels:
        if parcel.target != world.rank:
            continue
        holding = world.holdings[parcel.number]
        for kind, dtype in shipment.kinds[parcel.number]:
            for name in holding.entry.sources:
                form = TensorForm(source_shape(shape, name), dtype)
                if kind == STEP:
                    form = TensorForm((), dtype)
                elif kind.endswith(SCALES):
                    block = scale_block(shape, holding.entry, holding.size)
                    form = TensorForm((-(-torch.Size(form.shape).numel() // block),), dtype)
                if kind == _WEIGHT:
                    weights[name] = form
                else:
                    state[f"{name}.{kind}"] = form
    return weights, state


def save_tensors(shape: ModelShape, world: World, holder: StateHolder, directory: Path) -> None:
    """Write this rank's share of weights and optimiser state to its folder, which need not be that of the others.

    On return all ranks have written theirs. What fails on one fails on all; the folder is then to be thrown away.
    """
    missing = EngineError(
        f"{directory}: no such folder on rank {world.rank}; allowed: a folder on each rank, or one for all"
    )
    world.agree(None if directory.is_dir() else missing, f"saving to {directory}")
    owned = owned_by(holder.weights(), holder.live_state())
    shipment = plan_shipment(shape, world, owned)
    tensors = shipped(shape, world, owned, shipment)
    failure: OSError | None = None
    try:
        files = [directory / rank_file(stem, world.rank, world.size) for stem in (WEIGHTS, OPTIMIZER)]
        _write(files, _file_forms(shape, world, shipment), tensors)
    except OSError as error:
        failure = error
        # The others still wait for what this rank has to send.
        deque(tensors, maxlen=0)
    world.agree(failure, f"saving to {directory}")


def _write(files: Sequence[Path], forms: Sequence[Mapping[str, TensorForm]], tensors: Tensors) -> None:
    with TensorFileWriter(files[0], forms[0]) as weights, TensorFileWriter(files[1], forms[1]) as state:
        for name, kind, tensor in tensors:
            if kind == _WEIGHT:
                weights.put(name, tensor)
            else:
                state.put(f"{name}.{kind}", tensor)
