"""One training step: sync, rollout, reward, score, train, calibrate, each a Prefect task or more."""

from __future__ import annotations

from conf.schema import MegatronTrainer, RunConfig
from flows.identity import BF16_SINCE, checkpoint_meta
from flows.inputs import input_digests
from flows.record import PHASES
from flows.sampling import Sampler
from flows.session import Session
from flows.side_records import layer_scales
from infra.provenance import peak_memory_gb
from tasks.bootstrap import rebuild_rollout
from tasks.calibrate import calibrate
from tasks.checkpoint import checkpoint
from tasks.data.tokens import TextCodec
from tasks.engines.registry import high_precision_rollout
from tasks.engines.step_inputs import correction_of
from tasks.evaluate import evaluate
from tasks.numerics.correction import product_warning
from tasks.numerics.kv_scales import Scales
from tasks.rollout import put_to_sleep
from tasks.score import score
from tasks.sync import sync
from tasks.train import train

_MUCH_REJECTED = 0.5
"""Share of rejected tokens above which a run says so, once."""


class Stepper:
    """Runs steps of an open session on a given model."""

    def __init__(
        self, session: Session, codec: TextCodec, model_dir: str, expected_linears: tuple[str, ...], drawn: int
    ) -> None:
        self._s = session
        self._codec = codec
        self._model_dir = model_dir
        self._expected_linears = expected_linears
        self._recipe = session.config.recipe
        self._sampler = Sampler(session.engines, session.dataset, session.grader, codec, session.config, drawn)
        self._warned: set[str] = set()
        self.bf16_since: int | None = None
        # Once a run: a model folder can hold many gigabytes.
        self._inputs = input_digests(session.config)

    @property
    def in_bf16(self) -> bool:
        """Whether the rollout engine is one of BF16, by the recipe or since a breaker tripped."""
        return self._recipe == high_precision_rollout(self._recipe)

    def use_bf16(self, since: int | None = None) -> None:
        """The rollout engine is one of BF16 from here on; `since`: the step after which a breaker wanted that."""
        self._recipe = high_precision_rollout(self._s.config.recipe)
        self._expected_linears = ()
        if since is not None:
            self.bf16_since = since
            self._s.record.writer.tag(BF16_SINCE, str(since))
            self._s.console.say(f"since step {since} the rollout is in BF16: a breaker tripped")

    def fall_back(self, step: int | None = None) -> None:
        """Go on with a BF16 rollout engine in place of the run's own; it is empty until the next sync."""
        self.use_bf16(step)
        rebuild_rollout(self._s.engines, self._s.config, self._recipe, self._model_dir, "BF16 rollout")

    def step(self, step: int) -> dict[str, float]:
        """Step `step` (from 1), at weight version step - 1; returns its metrics by MLflow name."""
        s, config = self._s, self._s.config
        synced, scales = self.sync()
        s.scales.add("step", step, layer_scales(scales))
        sampled = self._sampler.sample(step)
        sampled.metrics.update(put_to_sleep(s.engines, config))
        scored = score(s.engines, sampled.batch, config.tracking.top_tokens)
        s.top_tokens.add(step, scored["offenders"], self._codec)
        trained = train(s.engines, sampled.batch, scored["logprobs"], sampled.advantages)
        calibrated = calibrate(s.engines, sampled.batch, config.recipe.calibration)
        parts = [synced, sampled.metrics, scored["metrics"], trained, calibrated]
        metrics = _merge(parts, scored["tokens"], trainer_gpus(config))
        self._warn(step, metrics)
        return metrics

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        updates, correction = self._s.config.algorithm.updates_per_step, self._s.config.correction
        found: list[tuple[str, str]] = []
        if skipped := metrics["optim/skipped_steps"]:
            text = f"{skipped:.0f} of {updates} updates skipped: the gradient is not finite"
            found.append((f"skipped {step}", text))
        if empty := metrics["optim/empty_updates"]:
            reason = f"correction={correction.name} rejected every token, or all responses were filtered"
            found.append((f"empty {step}", f"{empty:.0f} of {updates} updates left out: {reason}"))
        if metrics["importance/rejected_fraction"] > _MUCH_REJECTED:
            share = f"{metrics['importance/rejected_fraction']:.0%} of the tokens"
            found.append(("rejected", f"correction={correction.name} rejects {share} (correction.rejection, outside)"))
        if (drift := product_warning(metrics, correction_of(correction))) is not None:
            found.append(("product", drift))
        for kind, text in found:
            if kind not in self._warned:
                self._warned.add(kind)
                self._s.console.say(f"warning, step {step}: {text}")

    def sync(self) -> tuple[dict[str, float], Scales]:
        """Bring the trainer's weights to the rollout engine; metrics, and the scales that were sent."""
        metrics = sync(self._s.engines, self._recipe, self._expected_linears, self._s.config.cluster)
        scales: Scales = metrics.pop("scales")
        return {name: value for name, value in metrics.items() if name != "version"}, scales

    def evaluate(self, step: int, metric: str = "eval/accuracy") -> dict[str, float]:
        """Greedy accuracy at the weights after `step` steps, on freshly synced weights and scales."""
        s = self._s
        self.sync()
        limit = s.config.rollout.max_new_tokens
        found = evaluate(s.engines, s.dataset.eval, self._codec, s.grader, step, limit, metric)
        # A checkpoint comes next, and the trainer takes all of its state back for that.
        put_to_sleep(s.engines, s.config)
        s.eval_results.add(metric, step, found["solved"])
        metrics: dict[str, float] = found["metrics"]
        return metrics

    def evaluate_bf16(self, step: int) -> dict[str, float]:
        """`eval/accuracy_bf16`: the same weights on a BF16 rollout engine, which replaces the run's own."""
        self.fall_back()
        metrics = self.evaluate(step, "eval/accuracy_bf16")
        return {"eval/accuracy_bf16": metrics["eval/accuracy_bf16"]}

    def checkpoint(self, step: int) -> dict[str, float]:
        """Publish the state after `step` steps."""
        s = self._s
        inputs, drawn = self._inputs, self._sampler.drawn
        meta = checkpoint_meta(s.config, s.mlflow_run_id(), self._model_dir, inputs, drawn, self.bf16_since)
        files = {path.name: path.read_bytes() for path in (s.record.journal.path, *s.side_records) if path.exists()}
        keep = s.config.storage.keep_last
        return checkpoint(s.engines, s.storage_target, s.identity.name, step, files, meta, keep)


def trainer_gpus(config: RunConfig) -> int:
    """GPUs by which the trainer's throughput is divided; on CPU the trainer counts as one whatever its ranks."""
    trainer = config.trainer
    return trainer.ranks if isinstance(trainer, MegatronTrainer) and trainer.device == "gpu" else 1


def _merge(parts: list[dict[str, float]], train_tokens: float, gpus: int) -> dict[str, float]:
    peak = max(peak_memory_gb(), *(part.get("memory/peak_gb", 0.0) for part in parts))
    merged: dict[str, float] = {}
    for part in parts:
        merged |= part
    merged["time/step_s"] = sum(merged[f"time/{phase}_s"] for phase in PHASES) + merged.get("time/sleep_s", 0.0)
    training_s = merged["time/score_s"] + merged["time/train_s"]
    merged["throughput/train_tokens_per_s"] = train_tokens / training_s / gpus
    return merged | {"memory/peak_gb": peak}
