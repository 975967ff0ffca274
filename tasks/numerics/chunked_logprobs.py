"""Log-probabilities and entropies straight from hidden states, a chunk of tokens at a time.

The logits of a chunk are made, reduced and dropped; the backward pass makes them again. What is held for all tokens is
hidden states and three numbers a token, never `[tokens, vocabulary]`. The output weight may be split over the ranks of
a process group by rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

EntropyKind = Literal["none", "value", "gradient"]


@dataclass(frozen=True)
class HeadShard:
    """This rank's part of the output weight: its rows are `start` to `start + real` of the vocabulary of `size`.

    `real` excludes rows that only pad the vocabulary; `group` None: the whole vocabulary is here.
    """

    start: int
    real: int
    size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class _Settings:
    shard: HeadShard
    temperature: float
    chunk: int
    entropy: EntropyKind


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: EntropyKind = "none",
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at `targets`, and the distributions' entropies; `[n]` each, nats.

    `hidden` `[n, channels]`, `weight` `[rows, channels]` of one float dtype, in which the product is computed;
    `targets` int64 `[n]`. Softmax and results are fp32 (fp64 for fp64). At most `chunk` tokens have logits at a time.
    Gradients reach hidden and weight; the weight's is summed in fp32 over chunks. `entropy`: none returns None, value
    one without gradient, gradient one with.

    `vocabulary`: tokens that there are; rows from there on are padding and have no probability (None: all rows).
    `group`: each rank holds the same number of rows, in the order of ranks, and the same hidden states and targets;
    hidden's gradient is then the sum over the group, alike on each rank. All ranks must call alike.

    Raises `ValueError` for shapes, types and targets that do not fit.
    """
    if hidden.dtype != weight.dtype or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}, weight {weight.dtype} {tuple(weight.shape)}: allowed: "
            "one type, and as many channels"
        )
    if targets.shape != hidden.shape[:1] or chunk < 1 or not temperature > 0:
        raise ValueError(
            f"targets {tuple(targets.shape)}, chunk {chunk}, temperature {temperature}: allowed: "
            f"({hidden.shape[0]},), 1 and more, above 0"
        )
    shard = _shard(weight.shape[0], vocabulary, group)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < shard.size:
        raise ValueError(f"targets from {int(targets.min())} to {int(targets.max())}: allowed: 0 to {shard.size - 1}")
    settings = _Settings(shard, temperature, chunk, entropy)
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, targets, settings)
    return logprobs, None if entropy == "none" else entropies


def _shard(rows: int, vocabulary: int | None, group: dist.ProcessGroup | None) -> HeadShard:
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    size = rows * ranks if vocabulary is None else vocabulary
    if not 1 <= size <= rows * ranks:
        raise ValueError(f"vocabulary = {size}: allowed: from 1 to {rows * ranks}, the rows of the output weight")
    return HeadShard(rank * rows, max(0, min(rows, size - rank * rows)), size, group)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        results = hidden.new_empty((3, hidden.shape[0]), dtype=exact)
        for part in _parts(hidden.shape[0], settings.chunk):
            logits = _logits(hidden[part], weight, settings)
            results[:, part] = _reduce(logits, targets[part], settings)
        logprobs, entropies, normalizer = results.unbind()
        ctx.save_for_backward(hidden, weight, targets, entropies, normalizer)
        ctx.settings = settings
        entropies = entropies.clone()
        if settings.entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return logprobs.clone(), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, entropies, normalizer = ctx.saved_tensors
        settings: _Settings = ctx.settings
        to_logprobs, to_entropies = gradients
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact, real = normalizer.dtype, settings.shard.real
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        for part in _parts(hidden.shape[0], settings.chunk):
            logp = _logits(hidden[part], weight, settings) - normalizer[part].unsqueeze(1)
            slope = _slope(logp, targets[part], to_logprobs[part], settings)
            if settings.entropy == "gradient":
                spread = logp + entropies[part].unsqueeze(1)
                slope -= logp.exp() * spread * (to_entropies[part] / settings.temperature).unsqueeze(1)
            # The type of the product, as autograd of the plain formula has it.
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[part] = _summed((slope @ weight[:real]).to(exact), settings.shard.group).to(hidden.dtype)
            if to_weight is not None:
                to_weight[:real] += slope.T @ hidden[part]
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _logits(hidden: Tensor, weight: Tensor, settings: _Settings) -> Tensor:
    """This rank's logits / temperature of a chunk, `[tokens, real]` in the type of the softmax."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    return linear(hidden, weight[: settings.shard.real]).to(exact) / settings.temperature


def _reduce(logits: Tensor, targets: Tensor, settings: _Settings) -> Tensor:
    """Log-probability, entropy and log of the normaliser of each token, `[3, tokens]`."""
    shard = settings.shard
    peak = logits.amax(1) if shard.real else logits.new_full(targets.shape, -torch.inf)
    if shard.group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=shard.group)
    shifted = logits - peak.unsqueeze(1)
    local, owned = _local(targets, shard)
    chosen = shifted.gather(1, local.unsqueeze(1)).squeeze(1) if shard.real else torch.zeros_like(peak)
    sums = [torch.where(owned, chosen, 0), shifted.exp().sum(1)]
    if settings.entropy != "none":
        sums.append((shifted.exp() * shifted).sum(1))
    chosen, total, *weighted = _summed(torch.stack(sums), shard.group)
    log_total = total.log()
    entropy = log_total - weighted[0] / total if weighted else torch.zeros_like(total)
    return torch.stack([chosen - log_total, entropy, peak + log_total])


def _slope(logp: Tensor, targets: Tensor, gradient: Tensor, settings: _Settings) -> Tensor:
    """Gradient of the log-probabilities in this rank's logits: gradient (one-hot - probabilities) / temperature."""
    scaled = gradient / settings.temperature
    slope = -logp.exp() * scaled.unsqueeze(1)
    if settings.shard.real:
        local, owned = _local(targets, settings.shard)
        slope.scatter_add_(1, local.unsqueeze(1), torch.where(owned, scaled, 0).unsqueeze(1))
    return slope


def _local(targets: Tensor, shard: HeadShard) -> tuple[Tensor, Tensor]:
    """Row of each target in this rank's weight, and whether it is there (row 0 where not)."""
    local = targets - shard.start
    owned = (local >= 0) & (local < shard.real)
    return torch.where(owned, local, 0), owned


def _summed(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values
