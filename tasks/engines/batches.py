"""Putting rollout batches together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tasks.engines.protocols import RolloutBatch


def gather_groups(batches: Sequence[RolloutBatch], groups: Sequence[Tensor], size: int) -> RolloutBatch:
    """The samples of `groups[i]` (numbers of groups of `size` neighbouring samples) of each batch, as one batch.

    Rows keep their order; all are padded to the widest batch that gives any.
    """
    pairs = [(b, g) for b, g in zip(batches, groups, strict=True) if g.numel()]
    width = max(b.tokens.shape[1] for b, _ in pairs)
    parts = [_rows(b, (g.unsqueeze(1) * size + torch.arange(size)).flatten(), width) for b, g in pairs]
    return RolloutBatch(
        tokens=torch.cat([p.tokens for p in parts]),
        prompt_lengths=torch.cat([p.prompt_lengths for p in parts]),
        response_lengths=torch.cat([p.response_lengths for p in parts]),
        logprobs=torch.cat([p.logprobs for p in parts]),
        truncated=torch.cat([p.truncated for p in parts]),
        weight_version=torch.cat([p.weight_version for p in parts]),
    )


def _rows(batch: RolloutBatch, rows: Tensor, width: int) -> RolloutBatch:
    padding = (0, width - batch.tokens.shape[1])
    return RolloutBatch(
        tokens=torch.nn.functional.pad(batch.tokens[rows], padding),
        prompt_lengths=batch.prompt_lengths[rows],
        response_lengths=batch.response_lengths[rows],
        logprobs=torch.nn.functional.pad(batch.logprobs[rows], padding, value=float("nan")),
        truncated=batch.truncated[rows],
        weight_version=batch.weight_version[rows],
    )
