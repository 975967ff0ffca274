"""The ranks of a Megatron model: what each holds, agreement among them, and tensors from some of them to one.

Everything here is called alike on all ranks. It needs PyTorch's process groups, not Megatron itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.engines.megatron_config import Layout, ModelPlan, part_at
from tasks.engines.megatron_names import Entry
from tasks.engines.megatron_shards import Holding, holdings, local_names
from tasks.engines.protocols import EngineError, TensorForm
from tasks.engines.tensor_files import form_bytes

BUCKET_BYTES = 64 * 2**20
"""Most bytes that one rank sends to another at a time; a larger tensor goes alone."""

_ALIGNED = 8
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks, seen from one of them.

    `holdings`: every parameter of the model and who has it; `names`: this rank's own, by their Hugging Face tensors.
    `device` is where messages are. `tensor_group` None: the rank shares no matrix.
    """

    rank: int
    size: int
    holdings: tuple[Holding, ...]
    names: dict[tuple[str, ...], str]
    device: torch.device
    tensor_group: dist.ProcessGroup | None = None

    def gather(self, values: Tensor) -> Tensor:
        """Integers `[n]` of every rank, int64 `[ranks, n]` on the CPU."""
        own = values.to(self.device, torch.int64)
        if self.size == 1:
            return own.cpu().unsqueeze(0)
        found = torch.empty(self.size, own.numel(), dtype=torch.int64, device=self.device)
        dist.all_gather(list(found.unbind(0)), own)
        return found.cpu()

    def total(self, values: Tensor) -> Tensor:
        """The sum of int64 `[n]` over the ranks (modulo 2^64), on the CPU."""
        held = values.to(self.device, copy=True)
        if self.size > 1:
            dist.all_reduce(held)
        return held.cpu()

    def agree(self, error: Exception | None, what: str) -> None:
        """Go on only if no rank has an error: raises this rank's own, or an `EngineError` that names one that has."""
        failed = self.gather(torch.tensor([error is not None])).flatten().nonzero().flatten().tolist()
        if error is not None:
            raise error
        if failed:
            raise EngineError(f"{what}: rank {failed[0]} of {self.size} failed, and nothing is done on the others")

    def together(self, what: str, work: Callable[[], T]) -> T:
        """What `work` gives, once it has succeeded on all ranks; see `agree`. Nothing in it may talk to other ranks."""
        failure: Exception | None = None
        found: list[T] = []
        try:
            found.append(work())
        except (EngineError, OSError) as error:
            failure = error
        self.agree(failure, what)
        return found[0]


def join_world(
    plan: ModelPlan,
    layout: Layout,
    entries: Sequence[Entry],
    place: tuple[int, int, int],
    device: torch.device,
    tensor_group: dist.ProcessGroup | None,
) -> World:
    """Tell all ranks where each stands; `place`: pipeline stage, expert and tensor rank of this one."""
    alone = World(layout.rank, layout.world, (), {}, device, tensor_group if layout.tensor > 1 else None)
    places = alone.gather(torch.tensor(place)).tolist()
    held = holdings(plan.shape, [part_at(plan.shape, layout, *where) for where in places])
    return World(layout.rank, layout.world, held, local_names(plan.shape, entries), device, alone.tensor_group)


@dataclass(frozen=True)
class Parcel:
    """Tensors of the forms `forms` that each rank of `sources` has and `target` wants; `number` says which parameter's.

    The target may be a source, too.
    """

    number: int
    sources: tuple[int, ...]
    target: int
    forms: tuple[TensorForm, ...]

    @property
    def size(self) -> int:
        """Bytes from each source, padding between tensors included."""
        return sum(_padded(form) for form in self.forms)


Give = Callable[[Parcel], Sequence[Tensor]]
"""This rank's tensors for a parcel."""


def exchange(
    world: World, parcels: Sequence[Parcel], give: Give, limit: int = BUCKET_BYTES
) -> Iterator[tuple[Parcel, tuple[tuple[Tensor, ...], ...]]]:
    """Send all parcels; yields those that are for this rank, with the tensors of each of their sources.

    Every rank passes the same parcels and goes through all of it. Neighbours between the same ranks travel together, up
    to `limit` bytes from each source, so that no rank holds more than that of what others have. What comes from others
    lies in memory that goes when the next parcel comes; tensors of this rank's own are those that `give` gave.
    """
    for bucket in _buckets(parcels, limit):
        target, sources = bucket[0].target, bucket[0].sources
        if world.rank == target:
            size = sum(parcel.size for parcel in bucket)
            buffers = {s: torch.empty(size, dtype=torch.uint8, device=world.device) for s in sources if s != target}
            _run([dist.P2POp(dist.irecv, buffer, source) for source, buffer in buffers.items()])
            start = 0
            for parcel in bucket:
                yield (
                    parcel,
                    tuple(
                        tuple(give(parcel))
                        if s == target
                        else _unpacked(buffers[s][start : start + parcel.size], parcel)
                        for s in sources
                    ),
                )
                start += parcel.size
        elif world.rank in sources:
            messages = [_packed(give(parcel), parcel, world.device) for parcel in bucket]
            message = messages[0] if len(messages) == 1 else torch.cat(messages)
            messages.clear()
            _run([dist.P2POp(dist.isend, message, target)])


def _buckets(parcels: Sequence[Parcel], limit: int) -> Iterator[list[Parcel]]:
    bucket: list[Parcel] = []
    for parcel in parcels:
        same = bucket and (bucket[0].target, bucket[0].sources) == (parcel.target, parcel.sources)
        if bucket and not (same and sum(p.size for p in bucket) + parcel.size <= limit):
            yield bucket
            bucket = []
        bucket.append(parcel)
    if bucket:
        yield bucket


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _padded(form: TensorForm) -> int:
    return -(-form_bytes(form) // _ALIGNED) * _ALIGNED


def _packed(tensors: Sequence[Tensor], parcel: Parcel, device: torch.device) -> Tensor:
    forms = tuple(TensorForm(tuple(t.shape), t.dtype) for t in tensors)
    if forms != parcel.forms:
        raise EngineError(f"parameter {parcel.number}: {forms} where {parcel.forms} are expected")
    message, start = torch.empty(parcel.size, dtype=torch.uint8, device=device), 0
    for tensor, form in zip(tensors, forms, strict=True):
        size = form_bytes(form)
        message[start : start + size] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
        start += _padded(form)
    return message


def _unpacked(message: Tensor, parcel: Parcel) -> tuple[Tensor, ...]:
    found, start = [], 0
    for form in parcel.forms:
        found.append(message[start : start + form_bytes(form)].view(form.dtype).view(form.shape))
        start += _padded(form)
    return tuple(found)


def lightest(candidates: Sequence[int], loads: list[int], weight: int) -> int:
    """The candidate with the least load so far, the lowest on a tie; its load grows by `weight`."""
    chosen = min(candidates, key=lambda rank: (loads[rank], rank))
    loads[chosen] += weight
    return chosen
