"""What the trainer's attention sees, for Q/K/V scales, over all ranks of a Megatron model.

Micro-batches are those of a single rank, and are dealt to the data-parallel ranks whole: what a token's values are does
not depend on how many there are. Tensor ranks see their heads, pipeline stages their layers, context ranks their part
of each row; one reduction at the end gives everything to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from tasks.engines.context_rows import context_share
from tasks.engines.megatron_model import MegatronModel
from tasks.engines.megatron_policy import MegatronPolicy
from tasks.engines.megatron_world import World
from tasks.engines.protocols import TokenRows
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.kv_scales import PARTS
from tasks.numerics.token_sample import TokenSample


def same_tokens(model: MegatronModel, heads: int | None) -> int:
    """World that show the observer the same tokens under one scale; `heads` scales for each layer, None for one."""
    return 1 if heads is not None else min(model.part.tensor_size, model.plan.shape.groups)


def observe_rows(policy: MegatronPolicy, observer: CalibrationObserver, rows: TokenRows, sample: TokenSample) -> None:
    """Show the observer Q, K (after norm and rotary embedding) and V of the sampled tokens of this rank's share.

    Called alike on all ranks with all rows. No logits are computed.
    """
    parts = policy.passes.parts(rows.lengths)[0]
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    context_rank = parallel_state.get_context_parallel_rank()
    contexts = parallel_state.get_context_parallel_world_size()
    # As many passes on every rank: experts on several of them need tokens of all at once.
    for number in range(first, -(-len(parts) // step) * step, step):
        if number < len(parts):
            chosen = TokenRows(rows.tokens[parts[number]], rows.lengths[parts[number]])
            seen = sample.rows(parts[number])
        else:
            nothing = torch.zeros(1, 1, dtype=torch.int64)
            chosen, seen = TokenRows(nothing, nothing[0] + 1), TokenSample(None, nothing)
        share, seen = context_share(chosen, seen, context_rank, contexts, policy.passes.rule.multiple)
        with _watched(policy.model, observer, seen):
            _stage_pass(policy, share)


def reduce_over(world: World, observer: CalibrationObserver) -> None:
    """Give every rank what all have seen."""
    if world.size > 1:
        dist.all_reduce(observer.maxima, dist.ReduceOp.MAX)
        dist.all_reduce(observer.sums)


def _stage_pass(policy: MegatronPolicy, rows: TokenRows) -> None:
    """One forward pass of padded rows through this pipeline stage, between the one before and the one behind."""
    module, multiple = policy.model.module, policy.passes.rule.multiple
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(group)
    place, config = stages.index(dist.get_rank()), module.config
    if place > 0:
        width = -(-int(rows.lengths.max()) // multiple) * multiple
        tokens = width // config.tensor_model_parallel_size if config.sequence_parallel else width
        form = tokens, rows.lengths.numel(), config.hidden_size
        received = torch.empty(form, dtype=config.params_dtype, device=policy.passes.device)
        _message(dist.irecv, received, stages[place - 1], group)
        module.set_input_tensor(received)
    hidden = policy.hidden_rows(rows, torch.arange(rows.lengths.numel()))
    if place + 1 < len(stages):
        _message(dist.isend, hidden.contiguous(), stages[place + 1], group)


def _message(way: Callable[..., Any], tensor: Tensor, other: int, group: dist.ProcessGroup) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, other, group)]):
        work.wait()


@contextmanager
def _watched(model: MegatronModel, observer: CalibrationObserver, sample: TokenSample) -> Iterator[None]:
    """Forward passes of padded rows inside show the sampled tokens of their attention to the observer."""
    layers: Any = model.module.decoder.layers
    handles = [
        layer.self_attention.core_attention.register_forward_pre_hook(_hook(model, observer, sample, number))
        for number, layer in zip(model.part.layers, layers, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    model: MegatronModel, observer: CalibrationObserver, sample: TokenSample, layer: int
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    shape, part = model.plan.shape, model.part
    share = max(1, shape.groups // part.tensor_size)
    first = part.tensor_rank * shape.groups // part.tensor_size
    heads = range(first, first + share)
    # With more ranks than key and value heads several have the same ones: one of them shows those.
    repeats = part.tensor_rank % max(1, part.tensor_size // shape.groups) != 0
    shown = PARTS[:1] if repeats else PARTS

    def show(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for name, x in zip(shown, inputs, strict=False):
            # `[tokens, rows, heads, dim]` as the observer has it.
            values = x.permute(1, 2, 0, 3)
            observer.observe(layer, name, sample.of(values), _weights(sample, values), heads)

    return show


def _weights(sample: TokenSample, values: Tensor) -> Tensor:
    """The sample's weights for the tokens of `values` `[rows, heads, tokens, dim]`, which may be fewer or more."""
    weights, width = sample.weights, values.shape[2]
    if sample.positions is None:
        weights = nn.functional.pad(weights, (0, max(0, width - weights.shape[1])))[:, :width]
    return weights.to(values.device)
