"""One optimiser update over several ranks: whose gradients add up, who owns what, one norm for the whole model.

A parameter may be held, whole or in part, by many ranks. `Sharing` says by which; `RankExchange` sums gradients in
buckets of bounded size and, where the state is split, leaves masters and moments of each parameter to one owner (ZeRO
stage 1, Rajbhandari et al. 2020, arXiv:1910.02054, by whole parameters). Any backend of torch.distributed will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

BUCKET: int = 1 << 24
"""Most elements that are put together for one message; a larger tensor goes alone, without a copy."""


@dataclass(frozen=True)
class Sharing:
    """Which other ranks share a parameter of this one. None: none.

    `copies`: ranks with the same values that see other tokens, of which one may own the parameter; their gradients add
    up. `partial`: ranks with the same values whose gradients are of different heads or tokens of one micro-batch; they
    add up afterwards, and get the same bits in whatever order each added up before. `tied`: ranks that use a copy at
    another place of the model, owned by the first of its `copies` on each; gradients add up last. `counted`: whether
    this rank's part belongs to the norm, or is counted elsewhere.
    """

    copies: dist.ProcessGroup | None = None
    partial: dist.ProcessGroup | None = None
    tied: dist.ProcessGroup | None = None
    counted: bool = True

    @property
    def copy_ranks(self) -> int:
        return 1 if self.copies is None else self.copies.size()

    @property
    def copy_rank(self) -> int:
        return 0 if self.copies is None else self.copies.rank()


def balanced_owners(sizes: Mapping[str, int], ranks: int, first: Iterable[str] = ()) -> dict[str, int]:
    """An owner from 0 to `ranks` - 1 for each name, so that sums of sizes are near one another.

    Largest first to the rank with the least so far; the earlier name, then the lower rank, on a tie. The names of
    `first` go to rank 0 whatever their size.
    """
    loads, found = [0] * ranks, {}
    fixed = set(first)
    for name, size in sorted(sizes.items(), key=lambda item: (item[0] not in fixed, -item[1])):
        owner = 0 if name in fixed else loads.index(min(loads))
        found[name] = owner
        loads[owner] += size
    return found


def in_buckets(tensors: Iterable[Tensor], limit: int = BUCKET) -> Iterator[list[Tensor]]:
    """The tensors in their order, neighbours together as long as they have no more than `limit` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def apply_in_buckets(tensors: Sequence[Tensor], send: Callable[[Tensor], object], limit: int) -> None:
    """Apply a collective that works in place to tensors of one type, many at a time."""
    for bucket in in_buckets(tensors, limit):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            send(bucket[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        send(flat)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class RankExchange:
    """`tasks.engines.optimizer_exchange.Exchange` over the default process group.

    `parameters`: all that this rank computes with; `sharings` of each. `split`: one of `Sharing.copies` owns a
    parameter; else each does, and they update alike. A parameter without gradient counts as one with zeros.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        sharings: Mapping[str, Sharing],
        split: bool,
        bucket: int = BUCKET,
    ) -> None:
        self._parameters = parameters
        self._sharings = {name: sharings[name] for name in parameters}
        self._split = split
        self._bucket = bucket
        self._owners: dict[str, int] = {}
        for group, names in self._groups(lambda sharing: sharing.copies):
            sizes = {name: parameters[name].numel() * parameters[name].element_size() for name in names}
            tied = [name for name in names if sharings[name].tied is not None]
            self._owners |= balanced_owners(sizes, group.size(), tied)

    def _groups(
        self, of: Callable[[Sharing], dist.ProcessGroup | None]
    ) -> list[tuple[dist.ProcessGroup, tuple[str, ...]]]:
        """Groups of more than one rank, in the order in which the model's parameters name them, with these."""
        found: dict[dist.ProcessGroup, list[str]] = {}
        for name, sharing in self._sharings.items():
            group = of(sharing)
            if group is not None and group.size() > 1:
                found.setdefault(group, []).append(name)
        return [(group, tuple(names)) for group, names in found.items()]

    def _owned_by(self, names: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._owners[name], []).append(name)
        return dict(sorted(found.items()))

    def owned(self, name: str) -> bool:
        sharing = self._sharings[name]
        return not self._split or sharing.copy_ranks == 1 or self._owners[name] == sharing.copy_rank

    def _counts(self, name: str) -> bool:
        sharing = self._sharings[name]
        return sharing.counted and (self._split or sharing.copy_rank == 0)

    @torch.no_grad()
    def sums(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, parameter in self._parameters.items():
            if name not in gradients:
                gradients[name] = torch.zeros_like(parameter, dtype=torch.float32)
        for group, names in self._groups(lambda sharing: sharing.copies):
            if not self._split:
                self._add_up(gradients, names, group)
                continue
            for owner, share in self._owned_by(names).items():
                self._add_up(gradients, share, group, owner)
                if owner != group.rank():
                    for name in share:
                        del gradients[name]
        for of in (lambda sharing: sharing.partial, lambda sharing: sharing.tied):
            for group, names in self._groups(of):
                self._add_up(gradients, [name for name in names if name in gradients], group)
        return {name: gradients[name] for name in self._parameters if name in gradients}

    def _add_up(
        self, gradients: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup, owner: int | None = None
    ) -> None:
        """In place, on all of the group or on its rank `owner` alone."""
        if owner is None:
            apply_in_buckets(
                [gradients[name] for name in names], lambda t: dist.all_reduce(t, group=group), self._bucket
            )
            return
        place = dist.get_global_rank(group, owner)
        apply_in_buckets(
            [gradients[name] for name in names], lambda t: dist.reduce(t, place, group=group), self._bucket
        )

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        counted = [gradient for name, gradient in gradients.items() if self._counts(name)]
        others = [gradient for name, gradient in gradients.items() if not self._counts(name)]
        device = next(iter(self._parameters.values())).device
        # What is counted elsewhere adds nothing, but NaN where it is not finite.
        squares = _squares(counted, device) + 0.0 * _squares(others, device)
        dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def total(self, counts: Mapping[str, Tensor]) -> int:
        device = next(iter(self._parameters.values())).device
        own = torch.zeros((), dtype=torch.int64, device=device)
        for name, count in counts.items():
            if self._counts(name):
                own += count
        dist.all_reduce(own)
        return int(own)

    @torch.no_grad()
    def publish(self, parameters: Mapping[str, Parameter]) -> None:
        if not self._split:
            return
        for group, names in self._groups(lambda sharing: sharing.copies):
            for owner, share in self._owned_by(names).items():
                self._send([parameters[name].detach() for name in share], group, dist.get_global_rank(group, owner))

    def _send(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
        apply_in_buckets(tensors, lambda t: dist.broadcast(t, source, group=group), self._bucket)


def _squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, fp64 without dimensions."""
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return norm.to(device, torch.float64).square()
