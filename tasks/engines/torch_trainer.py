"""The PyTorch trainer engine: BF16 or FP8 compute copy, optimiser, corrected objective, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import Algorithm, Correction, Recipe, Rollout, TorchTrainer
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.step_inputs import calibration_observer, prepare_step, score_metrics, update_batches
from tasks.engines.tensor_files import TensorFiles, rank_file, rank_files
from tasks.engines.torch_attention import scale_heads
from tasks.engines.torch_linears import (
    Fp8TrainingLinear,
    advance_delayed,
    delayed_state,
    load_delayed_state,
    share_delayed,
)
from tasks.engines.torch_models import forward_hidden, loaded_model, weights
from tasks.engines.torch_optimizer import build_optimizer
from tasks.engines.torch_policy import TorchPolicy
from tasks.engines.train_step import StepParts, one_by_one, run_updates, update_of
from tasks.engines.trainer_state import (
    OPTIMIZER,
    WEIGHTS,
    TrainerState,
    export_payload,
    read_state,
    write_state,
)
from tasks.numerics.fingerprint import combine, fingerprints
from tasks.numerics.kv_scales import Scales, unit_scales
from tasks.numerics.token_sample import sample_tokens

_AMAX = "amax.safetensors"


@dataclass(frozen=True)
class TrainerSpec:
    """The parts of the configuration that a trainer engine is built from."""

    recipe: Recipe
    algorithm: Algorithm
    correction: Correction
    trainer: TorchTrainer
    rollout: Rollout


class TorchTrainerEngine:
    """See `tasks.engines.protocols.TrainerEngine`."""

    name = "torch"

    def __init__(self, model_dir: Path, spec: TrainerSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self._spec = spec
        self._policy = TorchPolicy(model_dir, spec.recipe, spec.rollout.temperature)
        self._optimizer = build_optimizer(
            dict(self._policy.model.named_parameters()),
            lambda: weights(loaded_model(model_dir, torch.float32)),
            spec.trainer.optimizer,
        )
        # The reference is the starting policy as this recipe trains it; without a KL term there is none.
        wanted = spec.algorithm.kl_coef > 0
        self._reference = TorchPolicy(model_dir, spec.recipe, spec.rollout.temperature).freeze() if wanted else None
        self._reference_print: str | None = None
        if self._reference is not None:
            # Quantised as the policy is at the same moment: at equal weights the KL is exactly 0.
            share_delayed(self._policy.model, self._reference.model)
            self._reference_print = combine(fingerprints(weights(self._reference.model)))
        self._scales: Scales = {}
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        model = self._policy.model
        quantized = plan_linears(model, recipe.rollout_linears).quantized
        return export_payload(recipe, self._version, weights(model), quantized, self._scales)

    def _batches(self, batch: RolloutBatch) -> tuple[tuple[Tensor, ...], ...]:
        samples = batch.tokens.shape[0]
        return update_batches(samples, self._spec.algorithm.updates_per_step, self._spec.trainer.micro_batch_size)

    def score(self, batch: RolloutBatch) -> Scores:
        logprobs, entropy = self._policy.score(batch, chain(*self._batches(batch)))
        metrics = score_metrics(batch, logprobs, self._spec.correction)
        return Scores(logprobs, metrics | {"policy/entropy": entropy})

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        spec, reference = self._spec, self._reference
        limit = spec.rollout.max_new_tokens
        step = prepare_step(batch, logprobs, advantages, spec.algorithm, spec.correction, limit)
        parts = StepParts(
            one_by_one(lambda rows, mask, entropy: self._policy.evaluate(batch.tokens[rows], mask, entropy)),
            self._optimizer,
            None if reference is None else lambda passes: reference.score(batch, passes)[0],
            lambda: advance_delayed(self._policy.model),
        )
        updates = [update_of((passes,), step.kept) for passes in self._batches(batch)]
        metrics = run_updates(parts, step, updates, spec.algorithm)
        self._version += 1
        return metrics

    @torch.no_grad()
    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        policy = self._spec.recipe.calibration
        limit, width = policy.max_tokens_per_sequence, rows.tokens.shape[1]
        heads = scale_heads(self._policy.model, policy)
        if policy.refresh == "never":
            self._scales = unit_scales(self._policy.layers, heads)
            return {}
        observer = calibration_observer(policy, self._policy.layers, self._scales, heads)
        # Drawn once for all rows: micro-batches must not decide which tokens are measured.
        sample = sample_tokens(rows.lengths, width, limit, seed=self._version)
        self._policy.attention.observer = observer
        try:
            for part in torch.arange(rows.tokens.shape[0]).split(self._spec.trainer.micro_batch_size):
                self._policy.attention.sample = sample.rows(part)
                forward_hidden(self._policy.model, rows.tokens[part], torch.arange(width).unsqueeze(0))
        finally:
            self._policy.attention.observer = self._policy.attention.sample = None
        result = observer.result()
        self._scales = result.scales
        return result.metrics

    def report(self) -> EngineReport:
        fp8 = [name for name, m in self._policy.model.named_modules() if isinstance(m, Fp8TrainingLinear)]
        return EngineReport(
            engine=self.name,
            version=self._version,
            quantized_linears=tuple(fp8),
            linear_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            kv_dtype="bfloat16",
            query_dtype="bfloat16",
            scales=dict(self._scales),
            fingerprints=fingerprints(self._optimizer.weights()),
        )

    def offload(self) -> None:
        """Nothing: this engine computes in host memory."""

    def save(self, directory: Path) -> None:
        weights = {n: t.contiguous() for n, t in self._optimizer.weights().items()}
        save_file(weights, directory / rank_file(WEIGHTS, 0, 1))
        save_file(self._optimizer.state_tensors(), directory / rank_file(OPTIMIZER, 0, 1))
        save_file(delayed_state(self._policy.model), directory / _AMAX)
        write_state(
            directory, TrainerState(self._version, self._reference_print, self._optimizer.updates, self._scales)
        )

    def load(self, directory: Path) -> None:
        heads = scale_heads(self._policy.model, self._spec.recipe.calibration)
        state = read_state(directory, self._reference_print, self._policy.layers, heads)
        files = [rank_files(directory, stem) for stem in (WEIGHTS, OPTIMIZER)]
        # A trainer without delayed scaling writes no such file.
        amax = load_file(directory / _AMAX) if (directory / _AMAX).is_file() else {}
        with TensorFiles(files[0]) as weights, TensorFiles(files[1]) as moments:
            held, kinds = ({name: part.get(name) for name in part.forms} for part in (weights, moments))
        load_delayed_state(self._policy.model, amax)
        self._optimizer.load(held, kinds, state.updates)
        self._version, self._scales = state.version, state.scales
