"""How rows become forward passes of a Megatron model, and which hidden states of a pass are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from conf.schema import MegatronTrainer, Recipe
from conf.schema.megatron import micro_batch_multiple, row_multiple
from tasks.engines.megatron_config import execution_arguments
from tasks.engines.protocols import TokenRows
from tasks.numerics.packing import (
    PackedRows,
    PackingRule,
    context_places,
    micro_batches,
    pack,
    rank_micro_batches,
)
from tasks.numerics.token_sample import TokenSample


@dataclass(frozen=True)
class Passes:
    """How rows become forward passes. `packed`: a pass is one sequence of whole rows; else rows padded to its longest.

    The CPU's attention knows no packed sequences, and would need a mask of their total squared. Which rows share a pass
    is the same either way.
    """

    rule: PackingRule
    packed: bool
    chunk: int
    temperature: float
    device: torch.device
    execution: Mapping[str, Any] = field(default_factory=dict)

    def parts(self, lengths: Tensor, updates: int = 1) -> tuple[tuple[Tensor, ...], ...]:
        """Row numbers of each pass of each of `updates` equal shares of the rows, in their order."""
        shares = torch.arange(lengths.shape[0]).chunk(updates)
        return tuple(tuple(share[part] for part in micro_batches(lengths[share], self.rule)) for share in shares)

    def rank_parts(self, lengths: Tensor, updates: int, ranks: int) -> tuple[tuple[tuple[Tensor, ...], ...], ...]:
        """The same for each of `ranks` data-parallel ranks: `[update][rank][pass]`, as many passes on each rank.

        A rank without rows for a pass has an empty one.
        """
        shares = torch.arange(lengths.shape[0]).chunk(updates)
        return tuple(
            tuple(
                tuple(share[part] for part in parts) for parts in rank_micro_batches(lengths[share], ranks, self.rule)
            )
            for share in shares
        )

    def inputs(self, rows: TokenRows, index: Tensor) -> PaddedPass | PackedPass:
        """The pass of the rows `index`."""
        return PackedPass(self, rows, index) if self.packed else PaddedPass(self, rows, index)


def passes(trainer: MegatronTrainer, recipe: Recipe, temperature: float) -> Passes:
    """As the trainer's settings and the recipe's training side say."""
    on_gpu, linears = trainer.device == "gpu", recipe.training_linears
    rule = PackingRule(trainer.tokens_per_micro_batch, micro_batch_multiple(trainer, linears), row_multiple(trainer))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Passes(rule, on_gpu, trainer.logprob_chunk, temperature, device, execution_arguments(trainer))


class PaddedPass:
    """Rows padded to the longest of them; without rows one of padding alone.

    `tokens` int64 `[rows, tokens]`; `mask`, `packed`: see `MegatronModel.hidden_states`.
    """

    mask: Tensor | None = None
    packed: PackedSeqParams | None = None

    def __init__(self, how: Passes, rows: TokenRows, index: Tensor) -> None:
        lengths, multiple = rows.lengths[index], how.rule.multiple
        width = -(-max(lengths.tolist(), default=1) // multiple) * multiple
        tokens = torch.zeros(max(1, index.numel()), width, dtype=torch.int64)
        whole = torch.where(torch.arange(rows.tokens.shape[1]) < lengths.unsqueeze(1), rows.tokens[index], 0)[:, :width]
        tokens[: index.numel(), : whole.shape[1]] = whole
        self.tokens = tokens.to(how.device)
        self._rows = index.numel()

    def select(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, None]:
        """Hidden states `[selected, channels]` of a model's `[tokens, rows, channels]`, row by row.

        `before` bool `[rows, width - 1]`: at tokens whose hidden states are wanted.
        """
        by_row = hidden.transpose(0, 1)[: self._rows]
        wanted = before[:, : by_row.shape[1]].to(hidden.device)
        return by_row[:, : wanted.shape[1]][wanted], None


class PackedPass:
    """Rows that stand one behind the other in one sequence; without rows padding alone.

    Of several context ranks each has a share of the sequence's places (`tasks.numerics.packing.context_places`).
    """

    mask: Tensor | None = None
    packed: PackedSeqParams | None = None

    def __init__(self, how: Passes, rows: TokenRows, index: Tensor) -> None:
        self._rows = pack(rows.tokens, rows.lengths, index, how.rule)
        self._places = _places(self._rows)
        tokens = self._rows.tokens if self._places is None else self._rows.tokens[self._places]
        self.tokens = tokens.unsqueeze(0).to(how.device)
        if how.device.type == "cuda":
            self.packed = _sequences(self._rows, how.device)
        else:
            self.mask = _hidden_from(self._rows)

    def select(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `PaddedPass.select`; and which of the wanted tokens are on this context rank (int64), None for all."""
        place, row, column = self._rows.real()
        inside = column < before.shape[1]
        place, row, column = place[inside], row[inside], column[inside]
        wanted = place[before[row, column]]
        if self._places is None:
            return hidden[wanted.to(hidden.device), 0], None
        found = self._local(self._places)[wanted]
        here = (found >= 0).nonzero().squeeze(1)
        return hidden[found[here].to(hidden.device), 0], here

    def measured(self, sample: TokenSample) -> tuple[Tensor, Tensor]:
        """Places of the sampled tokens of the rows among this rank's, and their weights, int64 `[measured]` each."""
        starts = self._rows.cu_seqlens_padded[:-1].to(torch.int64)
        places, weights = sample.places(starts[: self._rows.rows.numel()])
        if self._places is None:
            return places, weights
        found = self._local(self._places)[places]
        return found[found >= 0], weights[found >= 0]

    def _local(self, places: Tensor) -> Tensor:
        """Of each place of the whole sequence that on this context rank, -1 for none."""
        local = torch.full(self._rows.tokens.shape, -1)
        local[places] = torch.arange(places.numel())
        return local


def _places(rows: PackedRows) -> Tensor | None:
    """Of the sequence's tokens on this context rank; None for all."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return None
    return context_places(rows.cu_seqlens_padded, parallel_state.get_context_parallel_rank(), ranks)


def _sequences(packed: PackedRows, device: torch.device) -> PackedSeqParams:
    """As Transformer Engine's attention wants them, of all context ranks together.

    Padding counts as the end of the row before it, which never looks at it. Tokens in no sequence would be what their
    memory held wherever attention's kernel writes no zeros, and go into the next product and its weight's gradient. One
    tensor for all bounds says besides that nothing lies between sequences, which every kernel takes. `packed` is on the
    CPU, where its longest sequence is known without waiting for the device.
    """
    bounds, longest = packed.cu_seqlens_padded.to(device), int(packed.cu_seqlens_padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _hidden_from(packed: PackedRows) -> Tensor:
    """Mask `[1, 1, total, total]`, True where a token is not seen: in another slot, or later.

    Positions then run on through all slots; the rotary embedding depends on distances alone.
    """
    place = torch.arange(packed.tokens.numel(), device=packed.tokens.device)
    slot = torch.bucketize(place, packed.cu_seqlens_padded[1:].to(place.dtype), right=True)
    seen = (slot.unsqueeze(1) == slot) & (place.unsqueeze(1) >= place)
    return ~seen[None, None]
