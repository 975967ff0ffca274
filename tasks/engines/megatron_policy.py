"""The policy of the Megatron trainer: micro-batches, log-probabilities, and what its attention sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from conf.schema import Recipe
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_model import MegatronModel, build_model
from tasks.engines.megatron_passes import PackedPass, PaddedPass, Passes
from tasks.engines.megatron_weights import load_weights
from tasks.engines.protocols import RolloutBatch, TokenRows
from tasks.engines.train_step import LossOf, ScoreSheet, mean_entropy
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.chunked_logprobs import chunked_logprobs
from tasks.numerics.kv_scales import PARTS
from tasks.numerics.token_sample import TokenSample

Use = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""Row numbers, and what `Evaluate` gave for them: a loss, or None where there is nothing to learn."""


class MegatronPolicy:
    """A BF16 model in Megatron (fp32 to compare with) whose linear layers compute as the recipe's training side says.

    This rank's part of it. Serves the policy that trains and the frozen reference of the KL term alike.
    """

    def __init__(
        self, model_dir: Path, recipe: Recipe, layout: Layout, passes: Passes, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        on_gpu = passes.device.type == "cuda"
        self.model: MegatronModel = build_model(model_dir, recipe, layout, on_gpu, dtype)
        load_weights(self.model, model_dir)
        # One mode for scores and updates, so that both compute alike; there is no dropout.
        self.model.module.train()
        self.passes = passes

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return self.model.plan.shape.layers

    def freeze(self) -> MegatronPolicy:
        """Take part in no gradient from now on."""
        self.model.module.requires_grad_(False)
        return self

    def evaluate(self, batch: RolloutBatch, rows: Tensor, mask: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """See `tasks.engines.train_step.Evaluate`; one forward pass of these rows, without a pipeline."""
        made = self.passes.inputs(batch.rows(), rows)
        return self._values(self._hidden(made), made, batch.tokens[rows], mask, entropy)

    def _hidden(self, made: PaddedPass | PackedPass) -> Tensor:
        return self.model.hidden_states(made.tokens, made.mask, made.packed)

    def _values(
        self, hidden: Tensor, made: PaddedPass | PackedPass, tokens: Tensor, mask: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What `Evaluate` gives, from hidden states `[tokens, rows, channels]` of the model's last stage.

        `tokens` int64, `mask` bool `[rows, width]`.
        """
        # A token's distribution is made of the hidden state before it.
        chosen, here = made.select(hidden, mask[:, 1:])
        targets = tokens[mask]
        wants = ("gradient" if torch.is_grad_enabled() else "value") if entropy else "none"
        logprobs, entropies = chunked_logprobs(
            chosen,
            self._head(),
            (targets if here is None else targets[here]).to(hidden.device),
            self.passes.temperature,
            self.passes.chunk,
            wants,  # type: ignore[arg-type]
            self.model.plan.shape.vocabulary,
            parallel_state.get_tensor_model_parallel_group() if self.model.part.tensor_size > 1 else None,
        )
        if here is not None:
            logprobs = _over_context(logprobs, here, targets.numel())
            entropies = None if entropies is None else _over_context(entropies, here, targets.numel())
        return logprobs.cpu(), None if entropies is None else entropies.cpu()

    def _run(
        self, batch: RolloutBatch, parts: Sequence[Tensor], mask: Tensor, entropy: bool, use: Use, forward_only: bool
    ) -> None:
        """Passes of these rows through Megatron's schedule, `use` on the last stage of each.

        All ranks bring as many passes, and those of a pipeline and of tensor and context ranks the same.
        """
        rows_of = batch.rows()

        def step(numbers: Iterator[Tensor], _: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
            rows = next(numbers)
            made = self.passes.inputs(rows_of, rows)

            def finish(hidden: Tensor) -> tuple[Tensor, ...]:
                loss = use(rows, *self._values(hidden, made, batch.tokens[rows], mask[rows], entropy))
                # Megatron divides by a number of tokens, of which there are none: coefficients are in the loss.
                return torch.zeros(()) if loss is None else loss, torch.tensor(0, dtype=torch.int), torch.zeros(())

            return self._hidden(made), finish

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(parts),
            model=self.model.module,
            num_microbatches=len(parts),
            # Not used: stages tell one another the shape of what they send.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def learn(self, batch: RolloutBatch, parts: Sequence[Tensor], mask: Tensor, entropy: bool, loss: LossOf) -> None:
        """See `tasks.engines.train_step.Learn`. On earlier stages of a pipeline `loss` is not called."""
        self._run(batch, parts, mask, entropy, loss, forward_only=False)

    @torch.no_grad()
    def sheet(self, batch: RolloutBatch, parts: Iterable[Tensor]) -> ScoreSheet:
        """Log-probabilities and entropies of the rows of this rank's `parts`; none on earlier stages of a pipeline."""
        sheet = ScoreSheet(batch)
        self._run(batch, tuple(parts), sheet.mask, True, sheet.add, forward_only=True)
        return sheet

    def score(self, batch: RolloutBatch, parts: Iterable[Tensor]) -> tuple[Tensor, float]:
        """See `tasks.engines.train_step.score_rows`; what this rank has of it."""
        sheet = self.sheet(batch, parts)
        return sheet.logprobs, mean_entropy(sheet.entropy)

    def weights_changed(self) -> None:
        """Transformer Engine quantises the weights anew in the next pass, instead of taking those of the last."""
        self.model.module.set_is_first_microbatch()

    def _head(self) -> Tensor:
        """The output layer's weight, with gradient."""
        module = self.model.module
        weight: Tensor = (
            module.shared_embedding_or_output_weight()
            if module.share_embeddings_and_output_weights
            else module.output_layer.weight
        )
        return weight

    def hidden_rows(self, rows: TokenRows, index: Tensor) -> Tensor:
        """Hidden states `[tokens, rows, hidden]`, one forward pass of padded rows."""
        return self._hidden(PaddedPass(self.passes, rows, index))

    def observe(self, observer: CalibrationObserver, rows: TokenRows, sample: TokenSample) -> None:
        """Show the observer Q, K (after norm and rotary embedding) and V of the sampled tokens of all rows."""
        for part in self.passes.parts(rows.lengths)[0]:
            with _watched(self.model, observer, sample.rows(part)):
                self.hidden_rows(rows, part)


def _over_context(values: Tensor, here: Tensor, count: int) -> Tensor:
    """Values `[count]` of all context ranks, of which this one has those at `here`, with gradient to its own.

    Each rank's loss is made of all of them, and its gradient is of its own tokens: over the ranks they add up.
    """
    at = here.to(values.device)
    whole = values.new_zeros(count).index_put((at,), values.detach())
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole.index_put((at,), values)


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

    def show(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for name, x in zip(PARTS, inputs[:3], strict=True):
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
