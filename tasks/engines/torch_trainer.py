"""The PyTorch trainer engine: BF16 or FP8 compute copy, optimiser, corrected objective, calibration."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import Algorithm, Correction, Recipe, Rollout, TorchTrainer
from tasks.engines.precision_plan import block_spec, plan_linears, scale_name
from tasks.engines.protocols import EngineError, EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.step_inputs import LossLedger, StepInputs, objective_of, prepare_step, score_metrics, update_batches
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
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.fingerprint import combine, fingerprints
from tasks.numerics.fp8 import quantize_weight_as
from tasks.numerics.kv_scales import CalibrationError, Scales, scale_faults, scales_from_json, scales_to_json
from tasks.numerics.loss import policy_loss
from tasks.numerics.token_sample import sample_tokens

log = logging.getLogger(__name__)

_WEIGHTS, _OPTIMIZER, _AMAX = "weights.safetensors", "optimizer.safetensors", "amax.safetensors"
_STATE = "trainer.json"


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
        spec = block_spec(recipe.rollout_linears)
        model = self._policy.model
        quantized = {f"{name}.weight" for name in plan_linears(model, recipe.rollout_linears).quantized}
        tensors: dict[str, Tensor] = {}
        for name, weight in weights(model).items():
            if name in quantized:
                q = quantize_weight_as(name, weight, spec.weight_format)
                tensors[name], tensors[scale_name(name)] = q.codes, q.scales
            else:
                tensors[name] = weight.clone()
        scales = dict(self._scales) if recipe.kv.quantized else {}
        return SyncPayload(self._version, tensors, scales, fingerprints(tensors))

    def _batches(self, batch: RolloutBatch) -> tuple[tuple[Tensor, ...], ...]:
        samples = batch.tokens.shape[0]
        return update_batches(samples, self._spec.algorithm.updates_per_step, self._spec.trainer.micro_batch_size)

    def score(self, batch: RolloutBatch) -> Scores:
        logprobs, entropy = self._policy.score(batch, chain(*self._batches(batch)))
        metrics = score_metrics(batch, logprobs, self._spec.correction)
        return Scores(logprobs, metrics | {"policy/entropy": entropy})

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        spec = self._spec
        limit = spec.rollout.max_new_tokens
        step = prepare_step(batch, logprobs, advantages, spec.algorithm, spec.correction, limit)
        ledger, norms, skipped, empty, clipped = LossLedger(spec.algorithm.entropy_coef > 0), [], 0, 0, 0
        rate = self._optimizer.learning_rate
        updates = self._batches(batch)
        for update in updates:
            if not bool(step.kept[torch.cat(update)].any()):
                empty += 1
                continue
            # Scored here, not once for all: under delayed scaling the scales move with each update.
            reference = None if self._reference is None else self._reference.score(batch, update)[0]
            for rows in update:
                self._accumulate(batch.tokens[rows], step, rows, reference, ledger)
            outcome = self._optimizer.step()
            advance_delayed(self._policy.model)
            norms.append(outcome.grad_norm)
            rate = outcome.learning_rate
            clipped += outcome.clipped_weights
            if outcome.skipped:
                skipped += 1
                log.warning("update %d is skipped: its gradient norm is %s", self._optimizer.updates, outcome.grad_norm)
        self._version += 1
        return (
            step.metrics
            | ledger.metrics(len(updates) - empty, int(step.kept.sum()))
            | {
                "optim/grad_norm": _mean_norm(norms),
                "optim/lr": rate,
                "optim/skipped_steps": float(skipped),
                "optim/empty_updates": float(empty),
                "optim/clipped_weights": float(clipped),
                **self._optimizer.memory(),
            }
        )

    def _accumulate(
        self, tokens: Tensor, step: StepInputs, rows: Tensor, reference: Tensor | None, ledger: LossLedger
    ) -> None:
        """Forward and backward of one micro-batch; gradients add up until the optimiser's step."""
        if not bool(step.kept[rows].any()):
            return
        wants_entropy = self._spec.algorithm.entropy_coef > 0
        logprobs, entropy = self._policy.evaluate(tokens, step.kept[rows], wants_entropy)
        out = policy_loss(step.loss_inputs(rows, logprobs, reference, entropy), objective_of(self._spec.algorithm))
        out.loss.backward()
        ledger.add(out.sums, out.counts, out.maxima)

    @torch.no_grad()
    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        policy = self._spec.recipe.calibration
        limit, width = policy.max_tokens_per_sequence, rows.tokens.shape[1]
        observer = CalibrationObserver(
            self._policy.layers,
            policy.margin,
            policy.percentile,
            self._scales,
            scale_heads(self._policy.model, policy),
            subsampled=limit is not None,
        )
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

    def save(self, directory: Path) -> None:
        save_file({n: t.contiguous() for n, t in self._optimizer.weights().items()}, directory / _WEIGHTS)
        save_file(self._optimizer.state_tensors(), directory / _OPTIMIZER)
        save_file(delayed_state(self._policy.model), directory / _AMAX)
        state = {
            "version": self._version,
            "reference": self._reference_print,
            "updates": self._optimizer.updates,
            # float.hex keeps every bit and cannot be rounded by a JSON reader.
            "scales": scales_to_json(self._scales),
        }
        (directory / _STATE).write_text(json.dumps(state, indent=1, sort_keys=True))

    def load(self, directory: Path) -> None:
        absent = [name for name in (_WEIGHTS, _OPTIMIZER, _AMAX, _STATE) if not (directory / name).is_file()]
        if absent:
            raise EngineError(f"{directory} is no checkpoint of this engine: it lacks {', '.join(absent)}")
        state = json.loads((directory / _STATE).read_text())
        if state["reference"] != self._reference_print:
            raise EngineError(
                f"{directory}: the KL term's reference policy was {state['reference']}, and the starting weights here "
                f"are {self._reference_print}: a continued run needs the model that it started from"
            )
        scales = self._written_scales(directory, state["scales"])
        load_delayed_state(self._policy.model, load_file(directory / _AMAX))
        self._optimizer.load(load_file(directory / _WEIGHTS), load_file(directory / _OPTIMIZER), state["updates"])
        self._version, self._scales = state["version"], scales

    def _written_scales(self, directory: Path, written: dict[str, str | list[str]]) -> Scales:
        try:
            scales = scales_from_json(written)
        except CalibrationError as error:
            raise EngineError(f"{directory / _STATE}: {error}") from error
        heads = scale_heads(self._policy.model, self._spec.recipe.calibration)
        faults = scale_faults(scales, self._policy.layers, heads) if scales else ()
        if faults:
            raise EngineError(f"{directory}: the Q/K/V scales do not fit this model and recipe: {faults[0]}")
        return scales


def _mean_norm(norms: list[float]) -> float:
    """Mean of the finite norms, so that one skipped update does not hide the others; 0 for no update at all."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return sum(finite) / len(finite) if finite else math.fsum(norms[:1])
