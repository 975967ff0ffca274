"""The trainer engine on Megatron Core: BF16 or FP8 compute copy, fp32 masters, corrected objective, calibration.

One object for each rank, built by `tasks.engines.megatron_trainer.build`. All ranks call every method alike, with the
whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import Algorithm, Correction, MegatronTrainer, Recipe, Rollout
from tasks.engines.megatron_checkpoint import named_as_hf, named_as_megatron, state_as_hf, state_as_megatron
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_model import hf_tensors
from tasks.engines.megatron_passes import passes
from tasks.engines.megatron_policy import MegatronPolicy
from tasks.engines.megatron_ranks import exchange_of, rounding_streams, this_rank
from tasks.engines.megatron_weights import read_parameters
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.step_inputs import prepare_step, score_metrics
from tasks.engines.torch_optimizer import build_optimizer, check_weights
from tasks.engines.train_step import StepParts, mean_entropy, run_updates, update_of
from tasks.engines.trainer_state import (
    OPTIMIZER,
    WEIGHTS,
    TrainerState,
    export_payload,
    read_state,
    write_state,
)
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.fingerprint import combine, fingerprints
from tasks.numerics.kv_scales import Scales
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
            own = fingerprints(dict(hf_tensors(self._reference.model)))
            self._reference_print = combine(self._ranks.merged(own))
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

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        quantized = plan_linears(self._shape, recipe.rollout_linears).quantized
        return export_payload(recipe, self._version, dict(hf_tensors(self._policy.model)), quantized, self._scales)

    def score(self, batch: RolloutBatch) -> Scores:
        own = chain(*(ranks[self._ranks.data_rank] for ranks in self._parts(batch)))
        sheet = self._policy.sheet(batch, own)
        logprobs = self._ranks.whole(sheet.logprobs, sheet.scored, sheet.mask)
        metrics = score_metrics(batch, logprobs, self._spec.correction)
        return Scores(logprobs, metrics | {"policy/entropy": mean_entropy(self._ranks.add(sheet.entropy))})

    def _parts(self, batch: RolloutBatch) -> tuple[tuple[tuple[Tensor, ...], ...], ...]:
        """Row numbers of each pass of each data-parallel rank of each update."""
        return self._policy.passes.rank_parts(batch.lengths, self._spec.algorithm.updates_per_step, self._ranks.data)

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
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
        )
        # Drawn once for all rows: micro-batches must not decide which tokens are measured.
        self._policy.observe(observer, rows, sample_tokens(rows.lengths, width, limit, seed=self._version))
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
            fingerprints=fingerprints(named_as_hf(self._policy.model, self._optimizer.weights())),
        )

    def save(self, directory: Path) -> None:
        model, optimizer = self._policy.model, self._optimizer
        save_file(named_as_hf(model, optimizer.weights()), directory / WEIGHTS)
        save_file(state_as_hf(model, optimizer.state_tensors()), directory / OPTIMIZER)
        write_state(directory, TrainerState(self._version, self._reference_print, optimizer.updates, self._scales))

    def load(self, directory: Path) -> None:
        model, optimizer = self._policy.model, self._optimizer
        files = (WEIGHTS, OPTIMIZER)
        state = read_state(directory, files, self._reference_print, self._policy.layers, self._scale_heads)
        weights = load_file(directory / WEIGHTS)
        check_weights(weights, named_as_hf(model, optimizer.weights()))
        moments = state_as_megatron(model, load_file(directory / OPTIMIZER))
        optimizer.load(named_as_megatron(model, weights), moments, state.updates)
        self._version, self._scales = state.version, state.scales
