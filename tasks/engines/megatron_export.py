"""The policy's weights as a recipe's rollout side holds them, whole on rank 0, from all ranks.

Parameters come one after another. Of a quantised matrix each tensor-parallel rank quantises its own part where blocks
end at the cut, so that a byte an element travels, not two; the result is that of the whole matrix, bit for bit. What a
block needs of other ranks is its amax, and that is found for all matrices at once before anything is sent. A part that
ends within a block travels in BF16, and rank 0 quantises the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Recipe
from tasks.engines.megatron_names import ModelShape, entry_shape, hf_shapes, split
from tasks.engines.megatron_shards import Holding, cut_dimension, join_parts, part_shape, part_tensors, separable
from tasks.engines.megatron_world import Parcel, World, exchange
from tasks.engines.precision_plan import block_spec, scale_name
from tasks.engines.protocols import SyncPayload, TensorForm
from tasks.numerics.fingerprint import fingerprints
from tasks.numerics.formats import Format
from tasks.numerics.fp8 import NonFiniteError, block_amax, encode_scales, quantize_as
from tasks.numerics.kv_scales import Scales


@dataclass(frozen=True)
class Exporter:
    """What an export is made of: the rank's live `weights` by Megatron's names, all of one `dtype`.

    `codes`: Hugging Face tensors that `fmt` quantises.
    """

    shape: ModelShape
    world: World
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    fmt: Format
    codes: frozenset[str]

    def ahead(self, holding: Holding, name: str) -> bool:
        """Whether each rank quantises its own part of the tensor."""
        entry, size = holding.entry, holding.size
        if name not in self.codes or not separable(self.shape, entry, size):
            return False
        dim = cut_dimension(entry)
        side = self.fmt.block[dim]
        return size == 1 or side is None or part_shape(self.shape, entry, name, size)[dim] % side == 0

    def forms(self, holding: Holding) -> tuple[TensorForm, ...]:
        """What each rank sends of a parameter."""
        shape, entry, size = self.shape, holding.entry, holding.size
        if not separable(shape, entry, size):
            return (TensorForm(entry_shape(shape, entry, size), self.dtype),)
        found = []
        for name in entry.sources:
            part = part_shape(shape, entry, name, size)
            if self.ahead(holding, name):
                found.append(TensorForm(part, self.fmt.limits.dtype))
                found.append(TensorForm(self.fmt.scale_shape(part), self.fmt.scale_dtype))
            else:
                found.append(TensorForm(part, self.dtype))
        return tuple(found)

    def give(self, holding: Holding, encode: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's tensors of those forms."""
        shape, entry, size = self.shape, holding.entry, holding.size
        weight = self.weights[self.world.names[entry.sources]]
        if not separable(shape, entry, size):
            return [weight]
        found = []
        for name, part in part_tensors(shape, entry, weight, size).items():
            if self.ahead(holding, name):
                q = quantize_as(part, self.fmt, encode.get(name))
                found += [q.codes, q.scales]
            else:
                found.append(part)
        return found

    def join(self, holding: Holding, shards: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Hugging Face tensors of what all ranks sent; their memory is their own."""
        shape, entry = self.shape, holding.entry
        found: dict[str, Tensor] = {}
        if not separable(shape, entry, holding.size):
            for name, tensor in split(shape, entry, [parts[0] for parts in shards]).items():
                found |= self._whole(name, tensor)
            return found
        columns = [list(column) for column in zip(*shards, strict=True)]
        for name in entry.sources:
            whole = join_parts(shape, entry, columns.pop(0))
            if not self.ahead(holding, name):
                found |= self._whole(name, whole)
                continue
            scales = columns.pop(0)
            # A block that all ranks share has one scale, which each of them has computed.
            shared = self.fmt.block[cut_dimension(entry)] is None
            found[name] = _own(whole)
            found[scale_name(name)] = _own(join_parts(shape, entry, scales[:1] if shared else scales))
        return found

    def _whole(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name not in self.codes:
            return {name: _own(tensor)}
        q = quantize_as(tensor, self.fmt)
        return {name: _own(q.codes), scale_name(name): _own(q.scales)}


def _own(tensor: Tensor) -> Tensor:
    """A copy with memory of exactly its size: no view of a weight, a message or a padded block."""
    return tensor.contiguous().clone()


def gather_payload(
    exporter: Exporter, recipe: Recipe, version: int, scales: Scales, limit: int | None = None
) -> SyncPayload:
    """Complete on rank 0; without tensors on the others. Called alike on all ranks.

    `NonFiniteError` on every rank, naming the tensor, where a weight to quantise holds inf or NaN. `limit`: see
    `exchange`.
    """
    world, encode = exporter.world, _survey(exporter)
    parcels = [
        Parcel(number, tuple(shard[0] for shard in holding.shards), 0, exporter.forms(holding))
        for number, holding in enumerate(world.holdings)
    ]
    held = world.holdings
    found: dict[str, Tensor] = {}
    options = {} if limit is None else {"limit": limit}
    for parcel, shards in exchange(world, parcels, lambda p: exporter.give(held[p.number], encode), **options):
        found |= exporter.join(held[parcel.number], shards)
    kept = dict(scales) if recipe.kv.quantized else {}
    return SyncPayload(version, found, kept, fingerprints(found))


def exporter_of(
    shape: ModelShape, world: World, weights: Mapping[str, Tensor], recipe: Recipe, quantized: Collection[str]
) -> Exporter:
    """For a recipe's rollout side; `quantized` names linear layers."""
    codes = frozenset(f"{name}.weight" for name in quantized)
    dtype = next(iter(weights.values())).dtype
    return Exporter(shape, world, weights, dtype, block_spec(recipe.rollout_linears).weight_format, codes)


def _survey(exporter: Exporter) -> dict[str, Tensor]:
    """Encode factors of the tensors whose blocks reach over tensor-parallel ranks, by name; all are looked at first."""
    if not exporter.codes:
        return {}
    world, shape, fmt = exporter.world, exporter.shape, exporter.fmt
    order = {name: number for number, name in enumerate(hf_shapes(shape))}
    finite: dict[str, Tensor] = {}
    peaks: dict[str, Tensor] = {}
    for holding in world.holdings:
        entry, size = holding.entry, holding.size
        local = world.names.get(entry.sources)
        chosen = [name for name in entry.sources if name in exporter.codes]
        if local is None or not chosen:
            continue
        weight = exporter.weights[local]
        if not separable(shape, entry, size):
            finite[chosen[0]] = torch.isfinite(weight).all()
            continue
        parts = part_tensors(shape, entry, weight, size)
        for name in chosen:
            finite[name] = torch.isfinite(parts[name]).all()
            if size > 1 and fmt.block[cut_dimension(entry)] is None:
                peaks[name] = block_amax(parts[name], fmt.block_of(tuple(parts[name].shape)))
    _check_finite(world, finite, order)
    if not peaks:
        return {}
    together = torch.cat([peak.reshape(-1) for peak in peaks.values()])
    dist.all_reduce(together, dist.ReduceOp.MAX, group=world.tensor_group)
    largest = together.split([peak.numel() for peak in peaks.values()])
    return {
        name: encode_scales(amax.view(peak.shape), fmt.power_of_two, fmt.limits.largest)
        for (name, peak), amax in zip(peaks.items(), largest, strict=True)
    }


def _check_finite(world: World, finite: Mapping[str, Tensor], order: Mapping[str, int]) -> None:
    known = torch.stack(list(finite.values())).tolist() if finite else []
    bad = [order[name] for name, good in zip(finite, known, strict=True) if not good]
    first = int(world.gather(torch.tensor([min(bad, default=len(order))])).min())
    if first < len(order):
        raise NonFiniteError(f"weight {list(order)[first]} holds inf or NaN: it cannot be quantised")
