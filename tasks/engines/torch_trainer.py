"""The PyTorch trainer engine: BF16 or FP8 compute copy, fp32 master weights and optimiser."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import Algorithm, Recipe, Rollout, Trainer
from conf.schema import Correction as CorrectionConfig
from tasks.engines.precision_plan import block_spec, plan_linears, scale_name
from tasks.engines.protocols import EngineError, EngineReport, RolloutBatch, Scores, SyncPayload, TokenRows
from tasks.engines.torch_attention import WholeSequenceAttention, install_hook
from tasks.engines.torch_linears import Fp8TrainingLinear, use_fp8_training
from tasks.engines.torch_models import check_plain_head, forward_hidden, head_logits, loaded_model, weights
from tasks.engines.torch_optimizer import MasterOptimizer
from tasks.numerics.calibration import CalibrationObserver, Scales
from tasks.numerics.fingerprint import fingerprint
from tasks.numerics.fp8 import quantize_weight
from tasks.numerics.importance import (
    Correction,
    NoCorrection,
    TokenTruncation,
    importance_metrics,
    token_weights,
)
from tasks.numerics.logprobs import token_entropy, token_logprobs
from tasks.numerics.mismatch import log_ratios, mismatch_metrics
from tasks.numerics.objective import LossInputs, ObjectiveSettings, policy_loss

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "trainer.json"


@dataclass(frozen=True)
class TrainerSpec:
    """The parts of the configuration that a trainer engine is built from."""

    recipe: Recipe
    algorithm: Algorithm
    correction: CorrectionConfig
    trainer: Trainer
    rollout: Rollout


def correction_of(config: CorrectionConfig) -> Correction:
    """The numerics' correction for a configured one."""
    return TokenTruncation(config.cap) if config.name == "token_truncation" else NoCorrection(config.cap)


class TorchTrainerEngine:
    """See `tasks.engines.protocols.TrainerEngine`."""

    name = "torch"

    def __init__(self, model_dir: Path, spec: TrainerSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self._spec = spec
        self._temperature = spec.rollout.temperature
        self._model = loaded_model(model_dir, torch.bfloat16)
        plan = plan_linears(self._model, spec.recipe.training_linears)
        use_fp8_training(self._model, plan.quantized, block_spec(spec.recipe.training_linears))
        self._attention = WholeSequenceAttention()
        self._layers = install_hook(self._model, self._attention)
        check_plain_head(self._model)
        master = weights(loaded_model(model_dir, torch.float32))
        self._optimizer = MasterOptimizer(dict(self._model.named_parameters()), master, spec.trainer.optimizer)
        self._reference = self._frozen_reference(model_dir)
        self._scales: Scales = {}
        self._version = 0

    def _frozen_reference(self, model_dir: Path) -> TorchTrainerEngine | None:
        """A second engine that never trains, for the KL term; None without one."""
        if self._spec.algorithm.kl_coef == 0:
            return None
        algorithm = self._spec.algorithm.model_copy(update={"kl_coef": 0.0})
        return TorchTrainerEngine(model_dir, TrainerSpec(**{**vars(self._spec), "algorithm": algorithm}))

    @property
    def version(self) -> int:
        return self._version

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        spec = block_spec(recipe.rollout_linears)
        quantized = {f"{name}.weight" for name in plan_linears(self._model, recipe.rollout_linears).quantized}
        tensors: dict[str, Tensor] = {}
        for name, weight in weights(self._model).items():
            if name in quantized:
                q = quantize_weight(name, weight, spec.weight, spec.power_of_two)
                tensors[name], tensors[scale_name(name)] = q.codes, q.scales
            else:
                tensors[name] = weight.clone()
        scales = dict(self._scales) if recipe.kv.quantized else {}
        return SyncPayload(self._version, tensors, scales, {n: fingerprint(t) for n, t in tensors.items()})

    def _response_hidden(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Hidden states that predict the response tokens, `[valid tokens, hidden]`, in row-major order."""
        hidden = forward_hidden(self._model, tokens, torch.arange(tokens.shape[1]).unsqueeze(0))
        return hidden[:, :-1][mask[:, 1:]]

    @torch.no_grad()
    def score(self, batch: RolloutBatch) -> Scores:
        mask = batch.response_mask()
        logprobs, entropies = self._logprobs(batch, mask)
        ratios = log_ratios(logprobs, batch.logprobs, mask)
        entropy = float(entropies.to(torch.float64).mean()) if entropies.numel() else 0.0
        metrics = mismatch_metrics(ratios) | importance_metrics(ratios, self._spec.correction.cap)
        return Scores(logprobs, metrics | {"policy/entropy": entropy})

    def _logprobs(self, batch: RolloutBatch, mask: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies = torch.full(mask.shape, float("nan")), []
        for rows in torch.arange(mask.shape[0]).split(self._spec.trainer.micro_batch_size):
            tokens, valid = batch.tokens[rows], mask[rows]
            logits = head_logits(self._model, self._response_hidden(tokens, valid))
            part = torch.full(valid.shape, float("nan"))
            part[valid] = token_logprobs(logits, tokens[valid], self._temperature)
            logprobs[rows] = part
            entropies.append(token_entropy(logits, self._temperature))
        return logprobs, torch.cat(entropies)

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        mask = batch.response_mask()
        importance = token_weights(logprobs, batch.logprobs, mask, correction_of(self._spec.correction))
        reference = None if self._reference is None else self._reference.score(batch).logprobs
        sums: dict[str, float] = {}
        norms, skipped = [], 0
        samples = mask.shape[0]
        for update in torch.arange(samples).chunk(self._spec.algorithm.updates_per_step):
            normalizer = max(1.0, float(mask[update].sum()))
            for rows in update.split(self._spec.trainer.micro_batch_size):
                inputs = self._loss_inputs(batch, rows, mask, logprobs, advantages, importance, reference)
                out = policy_loss(inputs, self._objective(), normalizer)
                out.loss.backward()
                for name, value in out.sums.items():
                    sums[name] = sums.get(name, 0.0) + value
            outcome = self._optimizer.step()
            norms.append(outcome.grad_norm)
            skipped += outcome.skipped
        self._version += 1
        tokens = max(1.0, float(mask.sum()))
        return {name: value / tokens for name, value in sums.items()} | {
            "optim/grad_norm": sum(norms) / len(norms),
            "optim/lr": outcome.learning_rate,
            "optim/skipped_steps": float(skipped),
        }

    def _objective(self) -> ObjectiveSettings:
        a = self._spec.algorithm
        return ObjectiveSettings(a.clip_low, a.clip_high, a.kl_coef)

    def _loss_inputs(
        self,
        batch: RolloutBatch,
        rows: Tensor,
        mask: Tensor,
        old: Tensor,
        advantages: Tensor,
        importance: Tensor,
        reference: Tensor | None,
    ) -> LossInputs:
        """One micro-batch as `[1, valid tokens]`: only response tokens are ever materialised."""
        valid = mask[rows]
        logits = head_logits(self._model, self._response_hidden(batch.tokens[rows], valid))
        current = token_logprobs(logits, batch.tokens[rows][valid], self._temperature)
        per_token = advantages[rows].to(torch.float32).unsqueeze(1).expand(valid.shape)
        return LossInputs(
            logprobs=current.unsqueeze(0),
            old_logprobs=old[rows][valid].unsqueeze(0),
            advantages=per_token[valid].unsqueeze(0),
            weights=importance[rows][valid].unsqueeze(0),
            mask=torch.ones(1, current.numel(), dtype=torch.bool),
            reference_logprobs=None if reference is None else reference[rows][valid].unsqueeze(0),
        )

    @torch.no_grad()
    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        policy = self._spec.recipe.calibration
        observer = CalibrationObserver(self._layers, policy.margin, policy.percentile, self._scales)
        self._attention.observer = observer
        try:
            for part in torch.arange(rows.tokens.shape[0]).split(self._spec.trainer.micro_batch_size):
                tokens, positions = rows.tokens[part], torch.arange(rows.tokens.shape[1]).unsqueeze(0)
                self._attention.real = positions < rows.lengths[part].unsqueeze(1)
                forward_hidden(self._model, tokens, positions)
        finally:
            self._attention.observer = self._attention.real = None
        result = observer.result()
        self._scales = result.scales
        return result.metrics

    def report(self) -> EngineReport:
        fp8 = [name for name, m in self._model.named_modules() if isinstance(m, Fp8TrainingLinear)]
        return EngineReport(
            engine=self.name,
            version=self._version,
            quantized_linears=tuple(fp8),
            linear_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            kv_dtype="bfloat16",
            query_dtype="bfloat16",
            scales=dict(self._scales),
            fingerprints={name: fingerprint(t) for name, t in self._optimizer.master.items()},
        )

    def save(self, directory: Path) -> None:
        save_file({n: t.contiguous() for n, t in self._optimizer.master.items()}, directory / _WEIGHTS)
        save_file(self._optimizer.state_tensors(), directory / _OPTIMIZER)
        state = {
            "version": self._version,
            "updates": self._optimizer.updates,
            # float.hex keeps every bit and cannot be rounded by a JSON reader.
            "scales": {f"{layer}.{part}": scale.hex() for (layer, part), scale in self._scales.items()},
        }
        (directory / _STATE).write_text(json.dumps(state, indent=1, sort_keys=True))

    def load(self, directory: Path) -> None:
        absent = [name for name in (_WEIGHTS, _OPTIMIZER, _STATE) if not (directory / name).is_file()]
        if absent:
            raise EngineError(f"{directory} is no checkpoint of this engine: it lacks {', '.join(absent)}")
        state = json.loads((directory / _STATE).read_text())
        scales: Scales = {}
        for key, value in state["scales"].items():
            layer, _, part = key.partition(".")
            if int(layer) >= self._layers:
                raise EngineError(f"checkpoint has a scale for layer {layer}, the model has {self._layers} layers")
            scales[(int(layer), part)] = float.fromhex(value)
        self._optimizer.load(load_file(directory / _WEIGHTS), load_file(directory / _OPTIMIZER), state["updates"])
        self._version, self._scales = state["version"], scales
