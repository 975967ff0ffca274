"""The policy of the Megatron trainer: micro-batches, log-probabilities, and what its attention sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from conf.schema import MegatronTrainer, Recipe
from conf.schema.megatron import micro_batch_multiple, row_multiple
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_model import MegatronModel, build_model
from tasks.engines.megatron_weights import load_weights
from tasks.engines.protocols import RolloutBatch, TokenRows
from tasks.engines.train_step import score_rows
from tasks.numerics.chunked_logprobs import chunked_logprobs
from tasks.numerics.packing import PackedRows, PackingRule, micro_batches, pack


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

    def parts(self, lengths: Tensor, updates: int = 1) -> tuple[tuple[Tensor, ...], ...]:
        """Row numbers of each pass of each of `updates` equal shares of the rows, in their order."""
        shares = torch.arange(lengths.shape[0]).chunk(updates)
        return tuple(tuple(share[part] for part in micro_batches(lengths[share], self.rule)) for share in shares)


def passes(trainer: MegatronTrainer, recipe: Recipe, temperature: float) -> Passes:
    """As the trainer's settings and the recipe's training side say."""
    on_gpu, linears = trainer.device == "gpu", recipe.training_linears
    rule = PackingRule(trainer.tokens_per_micro_batch, micro_batch_multiple(trainer, linears), row_multiple(trainer))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Passes(rule, on_gpu, trainer.logprob_chunk, temperature, device)


class MegatronPolicy:
    """A BF16 model in Megatron whose linear layers compute as the recipe's training side says.

    Serves the policy that trains and the frozen reference of the KL term alike.
    """

    def __init__(self, model_dir: Path, recipe: Recipe, layout: Layout, passes: Passes) -> None:
        on_gpu = passes.device.type == "cuda"
        self.model: MegatronModel = build_model(model_dir, recipe, layout, on_gpu, torch.bfloat16)
        load_weights(self.model, model_dir)
        # One mode for scores and updates, so that both compute alike; there is no dropout.
        self.model.module.train()
        self.passes = passes

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return self.model.plan.shape.layers

    def live_weights(self) -> dict[str, Tensor]:
        """This rank's parameters by Megatron's names, not copies."""
        return {name: parameter.detach() for name, parameter in self.model.module.named_parameters()}

    def freeze(self) -> MegatronPolicy:
        """Take part in no gradient from now on."""
        self.model.module.requires_grad_(False)
        return self

    def evaluate(self, batch: RolloutBatch, rows: Tensor, mask: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """See `tasks.engines.train_step.Evaluate`; one forward pass of these rows."""
        run = self._packed if self.passes.packed else self._padded
        # A token's distribution is made of the hidden state before it.
        hidden = run(batch.rows(), rows, mask[:, 1:])
        wants = ("gradient" if torch.is_grad_enabled() else "value") if entropy else "none"
        logprobs, entropies = chunked_logprobs(
            hidden,
            self._head(),
            batch.tokens[rows][mask].to(hidden.device),
            self.passes.temperature,
            self.passes.chunk,
            wants,  # type: ignore[arg-type]
            self.model.plan.shape.vocabulary,
            parallel_state.get_tensor_model_parallel_group() if self.model.part.tensor_size > 1 else None,
        )
        return logprobs.cpu(), None if entropies is None else entropies.cpu()

    def score(self, batch: RolloutBatch, parts: Iterable[Tensor]) -> tuple[Tensor, float]:
        """See `tasks.engines.train_step.score_rows`."""
        return score_rows(batch, parts, lambda rows, mask, entropy: self.evaluate(batch, rows, mask, entropy))

    def _head(self) -> Tensor:
        """The output layer's weight, with gradient."""
        module = self.model.module
        weight: Tensor = (
            module.shared_embedding_or_output_weight()
            if module.share_embeddings_and_output_weights
            else module.output_layer.weight
        )
        return weight

    def _padded(self, rows: TokenRows, index: Tensor, before: Tensor) -> Tensor:
        """Hidden states `[selected, hidden]` of rows padded to the longest of them.

        `before` bool `[rows, width - 1]`: at tokens whose hidden states are wanted.
        """
        hidden = self.hidden_rows(rows, index).transpose(0, 1)
        wanted = before[:, : hidden.shape[1]].to(hidden.device)
        return hidden[:, : wanted.shape[1]][wanted]

    def hidden_rows(self, rows: TokenRows, index: Tensor) -> Tensor:
        """Hidden states `[tokens, rows, hidden]`, one forward pass of padded rows."""
        lengths, multiple = rows.lengths[index], self.passes.rule.multiple
        width = -(-int(lengths.max()) // multiple) * multiple
        tokens = torch.zeros(index.numel(), width, dtype=torch.int64)
        real = torch.arange(width) < lengths.unsqueeze(1)
        whole = rows.tokens[index][:, :width]
        tokens[:, : whole.shape[1]] = torch.where(real[:, : whole.shape[1]], whole, 0)
        return self.model.hidden_states(tokens.to(self.passes.device))

    def _packed(self, rows: TokenRows, index: Tensor, before: Tensor) -> Tensor:
        """The same of rows that stand one behind the other in one sequence."""
        packed = pack(rows.tokens, rows.lengths, index, self.passes.rule)
        place, row, column = packed.real()
        inside = column < before.shape[1]
        place, row, column = place[inside], row[inside], column[inside]
        chosen = place[before[row, column]].to(self.passes.device)
        held = packed.to(self.passes.device)
        tokens = held.tokens.unsqueeze(0)
        if self.passes.device.type == "cuda":
            return self.model.hidden_states(tokens, packed=_sequences(held))[chosen, 0]
        return self.model.hidden_states(tokens, _hidden_from(held))[chosen, 0]


def _sequences(packed: PackedRows) -> PackedSeqParams:
    """As Transformer Engine's attention wants them."""
    longest = int(packed.cu_seqlens_padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        cu_seqlens_q_padded=packed.cu_seqlens_padded,
        cu_seqlens_kv_padded=packed.cu_seqlens_padded,
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
