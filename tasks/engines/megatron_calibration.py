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

from tasks.engines.megatron_model import MegatronModel
from tasks.engines.megatron_passes import PackedPass, PaddedPass
from tasks.engines.megatron_policy import MegatronPolicy
from tasks.engines.megatron_world import World
from tasks.engines.protocols import TokenRows
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.kv_scales import PARTS
from tasks.numerics.token_sample import TokenSample

_STACKED = 2**27
"""Values of some layers that are held until they are shown together."""

Select = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What core attention is given, to the sampled tokens of it `[batch, heads, tokens, dim]` and their weights
`[batch, tokens]`."""


def same_tokens(model: MegatronModel, heads: int | None) -> int:
    """Ranks that show the observer the same tokens under one scale; `heads` scales for each layer, None for one."""
    return 1 if heads is not None else min(model.part.tensor_size, model.plan.shape.groups)


def observe_rows(policy: MegatronPolicy, observer: CalibrationObserver, rows: TokenRows, sample: TokenSample) -> None:
    """Show the observer Q, K (after norm and rotary embedding) and V of the sampled tokens of this rank's share.

    Called alike on all ranks with all rows. No logits are computed.
    """
    parts = policy.passes.parts(rows.lengths)[0]
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    # As many passes on every rank: experts on several of them need tokens of all at once.
    for number in range(first, -(-len(parts) // step) * step, step):
        index = parts[number] if number < len(parts) else torch.empty(0, dtype=torch.int64)
        made = policy.passes.inputs(rows, index)
        with _watched(policy.model, observer, _selection(made, sample.rows(index), policy.passes.device)):
            _stage_pass(policy, made)


def reduce_over(world: World, observer: CalibrationObserver) -> None:
    """Give every rank what all have seen."""
    if world.size > 1:
        dist.all_reduce(observer.maxima, dist.ReduceOp.MAX)
        dist.all_reduce(observer.sums)


def _stage_pass(policy: MegatronPolicy, made: PaddedPass | PackedPass) -> None:
    """One forward pass through this pipeline stage, between the one before and the one behind."""
    module, device = policy.model.module, policy.passes.device
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(group)
    place, config = stages.index(dist.get_rank()), module.config
    if place > 0:
        rows, width = made.tokens.shape
        tokens = width // config.tensor_model_parallel_size if config.sequence_parallel else width
        received = torch.empty(tokens, rows, config.hidden_size, dtype=config.params_dtype, device=device)
        _message(dist.irecv, received, stages[place - 1], group)
        module.set_input_tensor(received)
    hidden = policy.hidden(made)
    if place + 1 < len(stages):
        _message(dist.isend, hidden.contiguous(), stages[place + 1], group)


def _message(way: Callable[..., Any], tensor: Tensor, other: int, group: dist.ProcessGroup) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, other, group)]):
        work.wait()


def _selection(made: PaddedPass | PackedPass, sample: TokenSample, device: torch.device) -> Select:
    """Of attention's `[tokens, rows, heads, dim]`, or `[tokens, heads, dim]` of packed sequences on a GPU."""
    if isinstance(made, PaddedPass):
        return lambda x: _of_rows(x.permute(1, 2, 0, 3), sample)
    places, weights = (each.to(device) for each in made.measured(sample))

    def select(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x if x.ndim == 3 else x.squeeze(1)
        return values[places].transpose(0, 1).unsqueeze(0), weights.unsqueeze(0)

    return select


def _of_rows(values: Tensor, sample: TokenSample) -> tuple[Tensor, Tensor]:
    """The sample of `values` `[rows, heads, tokens, dim]`, whose tokens may be fewer or more than the sample's.

    A pass without rows is one row of padding.
    """
    weights, width = sample.weights, values.shape[2]
    if sample.positions is None:
        weights = nn.functional.pad(weights, (0, max(0, width - weights.shape[1])))[:, :width]
    return sample.of(values[: weights.shape[0]]), weights.to(values.device)


class _Stack:
    """Sampled values of neighbouring layers, shown to the observer together: those of one layer keep no GPU busy."""

    def __init__(self, observer: CalibrationObserver, heads: range) -> None:
        self._observer, self._heads = observer, heads
        self._held: dict[str, list[Tensor]] = {}
        self._weights: Tensor | None = None
        self._first = 0

    def add(self, layer: int, values: dict[str, Tensor], weights: Tensor) -> None:
        """The parts of one layer, which follows the layer before."""
        if self._held and sum(x.numel() for parts in self._held.values() for x in parts) > _STACKED:
            self.show()
        if not self._held:
            self._first, self._weights = layer, weights
        for part, x in values.items():
            self._held.setdefault(part, []).append(x)

    def show(self) -> None:
        """Show what is held, and hold nothing."""
        for part, layers in self._held.items():
            chosen = range(self._first, self._first + len(layers))
            assert self._weights is not None
            together = torch.stack(layers) if len(layers) > 1 else layers[0].unsqueeze(0)
            self._observer.observe_layers(chosen, part, together, self._weights, self._heads)
        self._held = {}


@contextmanager
def _watched(model: MegatronModel, observer: CalibrationObserver, select: Select) -> Iterator[None]:
    """A forward pass inside shows the selected tokens of its attention to the observer."""
    shape, part = model.plan.shape, model.part
    share = max(1, shape.groups // part.tensor_size)
    first = part.tensor_rank * shape.groups // part.tensor_size
    stack = _Stack(observer, range(first, first + share))
    # With more ranks than key and value heads several have the same ones: one of them shows those.
    repeats = part.tensor_rank % max(1, part.tensor_size // shape.groups) != 0
    shown = PARTS[:1] if repeats else PARTS
    layers: Any = model.module.decoder.layers
    handles = [
        layer.self_attention.core_attention.register_forward_pre_hook(_hook(stack, select, number, shown))
        for number, layer in zip(part.layers, layers, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    stack.show()


def _hook(
    stack: _Stack, select: Select, layer: int, shown: tuple[str, ...]
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def show(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        chosen = [select(x) for x in inputs[: len(shown)]]
        stack.add(layer, {part: values for part, (values, _) in zip(shown, chosen, strict=True)}, chosen[0][1])

    return show
