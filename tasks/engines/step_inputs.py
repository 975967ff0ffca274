"""What every trainer engine computes alike: metrics of a score, and weights, masks and coefficients of a step.

An engine adds the forward and backward passes; nothing here depends on how it makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import Algorithm, Calibration
from conf.schema import Correction as CorrectionConfig
from tasks.engines.protocols import RolloutBatch
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.correction import Correction, Weighting, correct, product_shrinkage
from tasks.numerics.importance import importance_metrics
from tasks.numerics.kv_scales import Scales
from tasks.numerics.loss import LossInputs, ObjectiveSettings
from tasks.numerics.mismatch import log_ratios, mismatch_metrics, sequence_mismatch_metrics
from tasks.numerics.mismatch_detail import abs_diff_by_position, position_metrics
from tasks.numerics.normalization import loss_coefficients
from tasks.numerics.rejection import RejectionRule


def correction_of(config: CorrectionConfig) -> Correction:
    """The numerics' correction for a configured one."""
    rules = tuple(RejectionRule(r.statistic, r.level, r.lower, r.upper, r.advantages) for r in config.rejection)
    weighting = Weighting(config.weight, config.lower, config.cap, config.outside)
    return Correction(weighting, rules, config.self_normalize)


def objective_of(config: Algorithm) -> ObjectiveSettings:
    """The numerics' objective for a configured one."""
    return ObjectiveSettings(
        ratio=config.ratio,
        surrogate=config.surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_gradient=config.kl_gradient,
        entropy_coef=config.entropy_coef,
    )


def calibration_observer(
    policy: Calibration, layers: int, in_use: Scales, heads: int | None, replicas: int = 1
) -> CalibrationObserver:
    """An observer as the recipe's policy says; see there for `in_use`, `heads` and `replicas`."""
    return CalibrationObserver(
        layers,
        policy.margin,
        policy.percentile,
        in_use,
        heads,
        subsampled=policy.max_tokens_per_sequence is not None,
        replicas=replicas,
    )


def score_metrics(batch: RolloutBatch, logprobs: Tensor, correction: CorrectionConfig) -> dict[str, float]:
    """`mismatch/*` and `importance/*` of a batch; `logprobs` p `[samples, width]`, whatever it is off the response."""
    mask = batch.response_mask()
    ratios = log_ratios(logprobs, batch.logprobs, mask)
    return (
        mismatch_metrics(ratios)
        | sequence_mismatch_metrics(logprobs, batch.logprobs, mask)
        | position_metrics(abs_diff_by_position(logprobs, batch.logprobs, mask))
        | importance_metrics(ratios, correction.cap, correction.lower)
        | product_shrinkage(logprobs, batch.logprobs, mask)
    )


def update_batches(samples: int, updates: int, micro_batch: int) -> tuple[tuple[Tensor, ...], ...]:
    """Row numbers of each micro-batch of each optimiser update.

    Scoring goes through the same batches: under per-tensor scaling a token's value depends on what it is computed
    with, and the policy ratio must be 1 before the first update.
    """
    return tuple(rows.split(micro_batch) for rows in torch.arange(samples).chunk(updates))


@dataclass(frozen=True)
class StepInputs:
    """Everything about a step's loss that is known before its first update.

    `kept` bool, `weights`, `coefficients` fp32, `advantages` fp32, `old` p: `[samples, width]`.
    """

    kept: Tensor
    weights: Tensor
    coefficients: Tensor
    advantages: Tensor
    old: Tensor
    metrics: dict[str, float]

    def loss_inputs(
        self, rows: Tensor, logprobs: Tensor, reference: Tensor | None = None, entropy: Tensor | None = None
    ) -> LossInputs:
        """One micro-batch; `logprobs`, `entropy` of its kept tokens in row-major order (with gradient)."""
        kept = self.kept[rows]

        def spread(values: Tensor) -> Tensor:
            return torch.zeros(kept.shape, dtype=values.dtype, device=values.device).masked_scatter(kept, values)

        return LossInputs(
            logprobs=spread(logprobs),
            old_logprobs=self.old[rows],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            coefficients=self.coefficients[rows],
            mask=kept,
            reference_logprobs=None if reference is None else reference[rows],
            entropy=None if entropy is None else spread(entropy),
        )


def prepare_step(
    batch: RolloutBatch,
    logprobs: Tensor,
    advantages: Tensor,
    algorithm: Algorithm,
    correction: CorrectionConfig,
    length_limit: int,
) -> StepInputs:
    """Correct, filter and normalise a step. `logprobs` p from the score, `advantages` `[samples]`.

    Overlong filtering takes truncated samples out before anything is counted. Rejected tokens take part in
    no term of the loss; `correction.denominator` says whether they still count in what it is divided by.
    """
    valid = batch.response_mask()
    if algorithm.overlong.filter:
        valid = valid & ~batch.truncated.unsqueeze(1)
    corrected = correct(logprobs, batch.logprobs, valid, advantages, correction_of(correction))
    counted = corrected.kept if correction.denominator == "kept" else valid
    length = algorithm.normalization_length or length_limit
    parts = [
        loss_coefficients(part, algorithm.normalization, length) for part in counted.chunk(algorithm.updates_per_step)
    ]
    return StepInputs(
        kept=corrected.kept,
        weights=corrected.weights,
        coefficients=torch.cat(parts),
        advantages=advantages.to(torch.float32).unsqueeze(1).expand(valid.shape),
        old=logprobs,
        metrics=corrected.metrics,
    )


class LossLedger:
    """Adds up what micro-batches report into the metrics of a step; `entropy`: whether the loss has such a term."""

    def __init__(self, entropy: bool) -> None:
        # All names from the start: a step without any token reports 0, not nothing.
        self._sums = {"loss/policy": 0.0, "loss/kl": 0.0} | ({"loss/entropy": 0.0} if entropy else {})
        self._counts = {"policy/clipped_fraction": 0.0, "policy/kl_to_old": 0.0, "policy/ratio_mean": 0.0}
        self._maxima = {"policy/ratio_max": 0.0}

    def add(self, sums: dict[str, float], counts: dict[str, float], maxima: dict[str, float]) -> None:
        """Take in the outputs of one micro-batch (`LossOutputs`)."""
        for total, part in ((self._sums, sums), (self._counts, counts)):
            for name in total:
                total[name] += part[name]
        for name, value in maxima.items():
            self._maxima[name] = max(self._maxima[name], value)

    @property
    def entries(self) -> tuple[list[float], list[float]]:
        """What adds up over micro-batches, and of what the highest counts."""
        return [*self._sums.values(), *self._counts.values()], list(self._maxima.values())

    def replace(self, added: Sequence[float], highest: Sequence[float]) -> None:
        """Take `entries` of several ledgers together for this one's."""
        self._sums = dict(zip(self._sums, added, strict=False))
        self._counts = dict(zip(self._counts, added[len(self._sums) :], strict=True))
        self._maxima = dict(zip(self._maxima, highest, strict=True))

    def metrics(self, updates: int, tokens: int) -> dict[str, float]:
        """Losses averaged over the `updates` that had tokens; counts divided by those `tokens`; 0 without any."""
        return (
            {name: value / max(1, updates) for name, value in self._sums.items()}
            | {name: value / max(1, tokens) for name, value in self._counts.items()}
            | self._maxima
        )
