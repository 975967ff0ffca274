"""The trainer engine on Megatron Core: BF16 or FP8 compute copy, fp32 masters, corrected objective, calibration.

One object for each rank, built by `tasks.engines.megatron_trainer.build`. All ranks call every method alike, with the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from conf.schema import Algorithm, Correction, MegatronTrainer, Recipe, Rollout
from tasks.engines.megatron_calibration import observe_rows, reduce_over, same_tokens
from tasks.engines.megatron_checkpoint import save_tensors
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_delayed import load_history, save_history
from tasks.engines.megatron_export import exporter_of, gather_payload
from tasks.engines.megatron_model import world_of
from tasks.engines.megatron_passes import passes
from tasks.engines.megatron_policy import MegatronPolicy
from tasks.engines.megatron_ranks import exchange_of, rounding_streams, this_rank
from tasks.engines.megatron_report import differing_copies, gathered_fingerprints
from tasks.engines.megatron_restore import load_checkpoint
from tasks.engines.megatron_weights import read_parameters
from tasks.engines.offload import HostCopies
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.step_inputs import calibration_observer, prepare_step, score_metrics
from tasks.engines.torch_optimizer import build_optimizer
from tasks.engines.train_step import StepParts, mean_entropy, run_updates, update_of
from tasks.engines.trainer_state import TrainerState, read_state, write_state
from tasks.numerics.fingerprint import combine
from tasks.numerics.kv_scales import Scales, unit_scales
from tasks.numerics.lr_schedule import LearningRate
from tasks.numerics.token_sample import sample_tokens


@dataclass(frozen=True)
class MegatronSpec:
    """The parts of the configuration that the engine is built from. `dtype` of the compute copy: fp32 in tests."""

    recipe: Recipe
    algorithm: Algorithm
    correction: Correction
    trainer: MegatronTrainer
    rollout: Rollout
    dtype: torch.dtype = torch.bfloat16


def learning_rate(trainer: MegatronTrainer) -> LearningRate:
    """The learning rate of each update as the trainer's settings say."""
    optimizer, schedule = trainer.optimizer, trainer.lr_schedule
    return LearningRate(
        optimizer.learning_rate, optimizer.warmup_steps, schedule.shape, schedule.min_lr, schedule.decay_updates
    )


class MegatronTrainerEngine:
    """See `tasks.engines.protocols.TrainerEngine`."""

    name = "megatron"

    def __init__(self, model_dir: Path, spec: MegatronSpec, layout: Layout) -> None:
        self._spec = spec
        self._shape = folder_shape(model_dir)
        how = passes(spec.trainer, spec.recipe, spec.rollout.temperature)
        self._ranks = this_rank(layout, how.device)
        self._policy = policy = MegatronPolicy(model_dir, spec.recipe, layout, how, spec.dtype)
        self._world = world_of(policy.model, layout)
        exchange = exchange_of(policy.model, layout, spec.trainer.distributed_optimizer)
        self._optimizer = build_optimizer(
            dict(policy.model.module.named_parameters()),
            lambda: {
                name: tensor.to(how.device)
                for name, tensor in read_parameters(policy.model, model_dir)
                if exchange.owned(name)
            },
            spec.trainer.optimizer,
            learning_rate(spec.trainer),
            exchange,
            rounding_streams(policy.model),
        )
        # The reference is the starting policy as this recipe trains it; without a KL term there is none.
        self._reference: MegatronPolicy | None = None
        self._reference_print: str | None = None
        if spec.algorithm.kl_coef > 0:
            self._reference = MegatronPolicy(model_dir, spec.recipe, layout, how, spec.dtype).freeze()
            self._reference_print = combine(self._fingerprints(self._reference.live_weights()))
        self._scales: Scales = {}
        self._version = 0
        self._models, self._masters = HostCopies(), HostCopies()

    @property
    def version(self) -> int:
        return self._version

    @property
    def _scale_heads(self) -> int | None:
        """Scales that each of q, k and v of a layer has; None for one for the whole layer."""
        by_layer = self._spec.recipe.calibration.granularity == "layer"
        return None if by_layer else self._policy.model.plan.shape.groups

    def offload(self) -> None:
        """See the protocol; with `trainer.offload` only."""
        if self._spec.trainer.offload:
            self._put_masters_away()
            if not self._models.away:
                for policy in self._policies():
                    policy.forget()
                self._models.take(self._model_tensors())

    def _let_go(self, copies: HostCopies, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Begin to copy to the host what has to leave soon, beside what the device computes until then."""
        if self._spec.trainer.offload and not copies.away and not copies.leaving:
            copies.start(tensors())

    def _model_tensors(self) -> Iterator[Tensor]:
        return (x for policy in self._policies() for x in policy.model.module.parameters())

    def _put_masters_away(self) -> None:
        if not self._masters.away:
            self._masters.take(self._optimizer.tensors())
        else:
            # As `take` does: what a calibration in between computed with is kept for it to use again.
            torch.cuda.empty_cache()

    def _policies(self) -> tuple[MegatronPolicy, ...]:
        return (self._policy,) if self._reference is None else (self._policy, self._reference)

    def _fetch(self, masters: bool) -> None:
        """Have the models on the device, and masters and moments too if they are wanted."""
        self._models.give_back()
        if masters:
            self._masters.give_back()

    @property
    def _remembers(self) -> bool:
        """Whether products of a step depend on those of earlier ones."""
        linears = self._spec.recipe.training_linears
        return linears.quantized and linears.scaling == "tensor_delayed"

    def _fingerprints(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """By Hugging Face name, of the whole model, from what each rank has of it by Megatron's names."""
        return gathered_fingerprints(self._policy.model.plan.shape, self._world, weights)

    @torch.no_grad()
    def export_weights(self, recipe: Recipe) -> SyncPayload:
        self._let_go(self._masters, self._optimizer.tensors)
        self._fetch(masters=False)
        quantized = plan_linears(self._shape, recipe.rollout_linears).quantized
        if self._spec.trainer.offload and self._world.size > 1:
            # Rank 0 gathers the whole model, more than its gradients left room for.
            self._put_masters_away()
        policy = self._policy
        exporter = exporter_of(policy.model.plan.shape, self._world, policy.live_weights(), recipe, quantized)
        payload = gather_payload(exporter, recipe, self._version, self._scales)
        if self._spec.trainer.offload:
            # A rollout engine on the same device needs the room from here on.
            self._put_masters_away()
            self._let_go(self._models, self._model_tensors)
        return payload

    def score(self, batch: RolloutBatch) -> Scores:
        self._fetch(masters=False)
        own = chain(*(ranks[self._ranks.data_rank] for ranks in self._parts(batch)))
        sheet = self._policy.sheet(batch, own)
        logprobs = self._ranks.whole(sheet.logprobs, sheet.scored, sheet.mask)
        metrics = score_metrics(batch, logprobs, self._spec.correction)
        return Scores(logprobs, metrics | {"policy/entropy": mean_entropy(self._ranks.add(sheet.entropy))})

    def _parts(self, batch: RolloutBatch) -> tuple[tuple[tuple[Tensor, ...], ...], ...]:
        """Row numbers of each pass of each data-parallel rank of each update."""
        return self._policy.passes.rank_parts(batch.lengths, self._spec.algorithm.updates_per_step, self._ranks.data)

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        self._fetch(masters=True)
        spec, policy, reference = self._spec, self._policy, self._reference
        limit = spec.rollout.max_new_tokens
        step = prepare_step(batch, logprobs, advantages, spec.algorithm, spec.correction, limit)
        parts = StepParts(
            lambda passes, mask, entropy, loss: policy.learn(batch, passes, mask, entropy, loss),
            self._optimizer,
            None if reference is None else lambda passes: reference.score(batch, passes)[0],
            policy.weights_changed,
            self._ranks.totals,
        )
        updates = [update_of(ranks, step.kept, self._ranks.data_rank) for ranks in self._parts(batch)]
        metrics = run_updates(parts, step, updates, spec.algorithm)
        self._version += 1
        self._let_go(self._masters, self._optimizer.tensors)
        return metrics

    @torch.no_grad()
    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        policy = self._spec.recipe.calibration
        if policy.refresh == "never":
            self._scales = unit_scales(self._policy.layers, self._scale_heads)
            return {}
        self._fetch(masters=False)
        limit, width = policy.max_tokens_per_sequence, rows.tokens.shape[1]
        heads = self._scale_heads
        replicas = same_tokens(self._policy.model, heads)
        observer = calibration_observer(policy, self._policy.layers, self._scales, heads, replicas)
        # Drawn once for all rows: neither micro-batches nor ranks decide which tokens are measured.
        observe_rows(self._policy, observer, rows, sample_tokens(rows.lengths, width, limit, seed=self._version))
        reduce_over(self._world, observer)
        result = observer.result()
        self._scales = result.scales
        return result.metrics

    def report(self) -> EngineReport:
        self._fetch(masters=True)
        # Megatron's configuration, as the live modules hold it, decides what computes in FP8.
        live = bool(self._policy.model.module.config.fp8)
        fp8 = plan_linears(self._shape, self._spec.recipe.training_linears).quantized if live else ()
        return EngineReport(
            engine=self.name,
            version=self._version,
            quantized_linears=fp8,
            linear_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            kv_dtype="bfloat16",
            query_dtype="bfloat16",
            scales=dict(self._scales),
            fingerprints=self._fingerprints(self._optimizer.weights()),
            problems=differing_copies(self._policy.model.plan.shape, self._world, self._policy.live_weights()),
        )

    def save(self, directory: Path) -> None:
        self._fetch(masters=True)
        if self._remembers:
            save_history(self._policy.model, directory, self._world.rank, self._world.size)
        save_tensors(self._policy.model.plan.shape, self._world, self._optimizer, directory)
        if self._world.rank == 0:
            state = TrainerState(self._version, self._reference_print, self._optimizer.updates, self._scales)
            write_state(directory, state)

    def load(self, directory: Path) -> None:
        self._fetch(masters=True)
        layers, heads = self._policy.layers, self._scale_heads
        state = self._world.together(
            f"loading {directory}", lambda: read_state(directory, self._reference_print, layers, heads)
        )
        settings = self._spec.trainer.optimizer
        load_checkpoint(self._policy.model, self._world, directory, settings, self._optimizer, state.updates)
        if self._remembers:
            self._world.together(f"loading {directory}", lambda: load_history(self._policy.model, directory))
        self._policy.weights_changed()
        self._version, self._scales = state.version, state.scales
