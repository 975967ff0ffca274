"""The ranks of a Megatron trainer: who shares which parameter, and scores and metrics that all of them have."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_model import MegatronModel
from tasks.engines.megatron_names import Entry
from tasks.engines.optimizer_exchange import Alone, Exchange
from tasks.engines.rank_exchange import RankExchange, Sharing


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; after `megatron_model.start_groups`.

    `data_rank` of `data` ranks that see different rows. `speaks`: of the ranks that compute the same log-probabilities
    in parts, the one whose results count: on the last stage of a pipeline, first of its tensor and context ranks.
    """

    data: int
    data_rank: int
    speaks: bool
    alone: bool
    device: torch.device

    def add(self, values: Tensor) -> Tensor:
        """Sum over the ranks that speak, on every rank; on the CPU."""
        if self.alone:
            return values
        held = (values if self.speaks else torch.zeros_like(values)).to(self.device, copy=True)
        dist.all_reduce(held)
        return held.cpu()

    def highest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, on every rank; on the CPU."""
        if self.alone:
            return values
        held = values.to(self.device, copy=True)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return held.cpu()

    def whole(self, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Values `[samples, width]` of every rank's `rows` (bool `[samples]`) under the mask, NaN off it."""
        if self.alone:
            return values
        own = torch.where(mask & rows.unsqueeze(1), values, 0.0)
        return torch.where(mask, self.add(own), float("nan"))

    def totals(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """See `tasks.engines.train_step.StepParts`."""
        return self.add(sums), self.highest(maxima)


def this_rank(layout: Layout, device: torch.device) -> Ranks:
    """Of a process whose groups have started."""
    return Ranks(
        data=layout.data,
        data_rank=parallel_state.get_data_parallel_rank(),
        speaks=(
            parallel_state.get_pipeline_model_parallel_rank() == layout.pipeline - 1
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        ),
        alone=layout.world == 1,
        device=device,
    )


def exchange_of(model: MegatronModel, layout: Layout, split: bool) -> Exchange:
    """How the model's gradients are summed; `split`: masters and moments are spread over copies of a parameter."""
    if layout.world == 1:
        return Alone()
    return RankExchange(dict(model.module.named_parameters()), sharings(model), split)


def sharings(model: MegatronModel) -> dict[str, Sharing]:
    """Of each parameter of this rank, by Megatron's name."""
    return {entry.name: _sharing(model, entry) for entry in model.entries}


def _sharing(model: MegatronModel, entry: Entry) -> Sharing:
    if _of_an_expert(entry):
        # Each tensor, context and data rank sends its own tokens to experts: all copies of one are like data ranks.
        return Sharing(copies=parallel_state.get_expert_data_parallel_group())
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    part, whole = model.part, entry.layout == "whole"
    tied = _is_tied(model, entry)
    return Sharing(
        copies=copies,
        partial=parallel_state.get_tensor_model_parallel_group() if whole and _sees_a_part(model, entry) else None,
        tied=parallel_state.get_embedding_group() if tied else None,
        counted=not (whole and part.tensor_rank > 0) and not (tied and not part.first),
    )


def _of_an_expert(entry: Entry) -> bool:
    return ".mlp.experts." in entry.name


def _is_tied(model: MegatronModel, entry: Entry) -> bool:
    """Whether the embedding is on two ranks, as such and as the output layer."""
    shape, part = model.plan.shape, model.part
    return shape.tied and entry.layout == "vocabulary" and not (part.first and part.last)


def _sees_a_part(model: MegatronModel, entry: Entry) -> bool:
    """Whether each tensor rank's gradient of a parameter that all have is of its own heads or tokens alone.

    Without sequence parallelism all see every token, and norms of the residual stream have the whole gradient.
    """
    by_head = entry.name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
    return model.part.tensor_size > 1 and (by_head or bool(model.module.config.sequence_parallel))


def rounding_streams(model: MegatronModel) -> dict[str, int]:
    """A number for each parameter, from its Hugging Face tensors and the rank's part of them.

    Where a parameter lies, and which others lie beside it, then does not change its random rounding; copies are rounded
    alike.
    """
    return {entry.name: _stream(model, entry) for entry in model.entries}


def _stream(model: MegatronModel, entry: Entry) -> int:
    part = 0 if entry.layout == "whole" else model.part.tensor_rank
    text = f"{part} {' '.join(entry.sources)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
