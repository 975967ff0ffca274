"""The trainer engine on Megatron Core: BF16 or FP8 compute copy, fp32 masters, corrected objective, calibration.

One such engine is on each rank. Built by `tasks.engines.megatron_trainer.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from conf.schema import Algorithm, Correction, MegatronTrainer, Recipe, Rollout
from tasks.engines.megatron_calibration import observe_rows, reduce_over, same_tokens
from tasks.engines.megatron_checkpoint import save_tensors
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_export import exporter_of, gather_payload
from tasks.engines.megatron_model import world_of
from tasks.engines.megatron_policy import MegatronPolicy, passes
from tasks.engines.megatron_report import differing_copies, gathered_fingerprints
from tasks.engines.megatron_restore import load_checkpoint
from tasks.engines.megatron_weights import read_parameters
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.step_inputs import prepare_step, score_metrics
from tasks.engines.torch_optimizer import build_optimizer
from tasks.engines.train_step import StepParts, run_updates
from tasks.engines.trainer_state import TrainerState, read_state, write_state
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.fingerprint import combine
from tasks.numerics.kv_scales import Scales
from tasks.numerics.lr_schedule import LearningRate
from tasks.numerics.token_sample import sample_tokens


@dataclass(frozen=True)
class MegatronSpec:
    """The parts of the configuration that the engine is built from."""

    recipe: Recipe
    algorithm: Algorithm
    correction: Correction
    trainer: MegatronTrainer
    rollout: Rollout


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
        self._policy = policy = MegatronPolicy(model_dir, spec.recipe, layout, how)
        self._world = world_of(policy.model, layout)
        self._optimizer = build_optimizer(
            dict(policy.model.module.named_parameters()),
            lambda: {name: tensor.to(how.device) for name, tensor in read_parameters(policy.model, model_dir)},
            spec.trainer.optimizer,
            learning_rate(spec.trainer),
        )
        # The reference is the starting policy as this recipe trains it; without a KL term there is none.
        wanted = spec.algorithm.kl_coef > 0
        self._reference = MegatronPolicy(model_dir, spec.recipe, layout, how).freeze() if wanted else None
        self._reference_print: str | None = None
        if self._reference is not None:
            self._reference_print = combine(self._fingerprints(self._reference.live_weights()))
        self._scales: Scales = {}
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def _scale_heads(self) -> int | None:
        """Scales that each of q, k and v of a layer has; None for one for the whole layer."""
        by_layer = self._spec.recipe.calibration.granularity == "layer"
        return None if by_layer else self._policy.model.plan.shape.groups

    def _fingerprints(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """By Hugging Face name, of the whole model, from what each rank has of it by Megatron's names."""
        return gathered_fingerprints(self._policy.model.plan.shape, self._world, weights)

    @torch.no_grad()
    def export_weights(self, recipe: Recipe) -> SyncPayload:
        quantized = plan_linears(self._shape, recipe.rollout_linears).quantized
        policy = self._policy
        exporter = exporter_of(policy.model.plan.shape, self._world, policy.live_weights(), recipe, quantized)
        return gather_payload(exporter, recipe, self._version, self._scales)

    def score(self, batch: RolloutBatch) -> Scores:
        logprobs, entropy = self._policy.score(batch, chain(*self._parts(batch)))
        metrics = score_metrics(batch, logprobs, self._spec.correction)
        return Scores(logprobs, metrics | {"policy/entropy": entropy})

    def _parts(self, batch: RolloutBatch) -> tuple[tuple[Tensor, ...], ...]:
        return self._policy.passes.parts(batch.lengths, self._spec.algorithm.updates_per_step)

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        spec, reference = self._spec, self._reference
        limit = spec.rollout.max_new_tokens
        step = prepare_step(batch, logprobs, advantages, spec.algorithm, spec.correction, limit)
        parts = StepParts(
            lambda rows, mask, entropy: self._policy.evaluate(batch, rows, mask, entropy),
            self._optimizer,
            None if reference is None else lambda update: reference.score(batch, update)[0],
            lambda: None,
        )
        metrics = run_updates(parts, step, self._parts(batch), spec.algorithm)
        self._version += 1
        return metrics

    @torch.no_grad()
    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        policy = self._spec.recipe.calibration
        limit, width = policy.max_tokens_per_sequence, rows.tokens.shape[1]
        observer = CalibrationObserver(
            self._policy.layers,
            policy.margin,
            policy.percentile,
            self._scales,
            self._scale_heads,
            subsampled=limit is not None,
            replicas=same_tokens(self._policy.model, self._scale_heads),
        )
        # Drawn once for all rows: neither micro-batches nor ranks decide which tokens are measured.
        observe_rows(self._policy, observer, rows, sample_tokens(rows.lengths, width, limit, seed=self._version))
        reduce_over(self._world, observer)
        result = observer.result()
        self._scales = result.scales
        return result.metrics

    def report(self) -> EngineReport:
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
        save_tensors(self._policy.model.plan.shape, self._world, self._optimizer, directory)
        if self._world.rank == 0:
            state = TrainerState(self._version, self._reference_print, self._optimizer.updates, self._scales)
            write_state(directory, state)

    def load(self, directory: Path) -> None:
        layers, heads = self._policy.layers, self._scale_heads
        state = self._world.together(
            f"loading {directory}", lambda: read_state(directory, self._reference_print, layers, heads)
        )
        settings = self._spec.trainer.optimizer
        load_checkpoint(self._policy.model, self._world, directory, settings, self._optimizer, state.updates)
        self._version, self._scales = state.version, state.scales
