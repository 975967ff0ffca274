"""What a Megatron model holds, as Hugging Face tensors, on the ranks that hold it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tasks.engines.megatron_model import MegatronModel
from tasks.engines.megatron_names import split


@torch.no_grad()
def hf_tensors(model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of this rank's layers and experts, in the order of the model; dtype of the weights.

    Gathered over tensor-parallel ranks, which must all iterate; each gives the same. A tensor that is not fused or
    gathered is the live weight, not a copy. Tied embeddings come once, from the first stage.
    """
    parameters = dict(model.module.named_parameters())
    shape, part = model.plan.shape, model.part
    for entry in model.entries:
        if shape.tied and entry.name == "output_layer.weight":
            continue
        weight = parameters[entry.name].detach()
        shards = [weight] if entry.layout == "whole" or part.tensor_size == 1 else _gathered(weight)
        yield from split(shape, entry, shards).items()


def _gathered(weight: Tensor) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(shards, weight.contiguous(), group=group)
    return shards
