"""When a run says, or ends because, its training leaves what is healthy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

Judged = Literal[
    "mismatch/token_mult_prob_error",
    "mismatch/gen_kl",
    "mismatch/policy_kl",
    "mismatch/js",
    "mismatch/max_abs_logprob_diff",
    "mismatch/p99_abs_logprob_diff",
    "mismatch/sequence_mult_prob_error_max",
    "importance/ess",
    "importance/max",
    "importance/rejected_fraction",
    "policy/entropy",
    "policy/kl_to_old",
    "policy/clipped_fraction",
    "policy/ratio_max",
    "loss/policy",
    "loss/kl",
    "optim/grad_norm",
    "optim/skipped_steps",
    "optim/empty_updates",
    "reward/mean",
    "reward/zero_variance_fraction",
    "reward/timed_out",
    "reward/verifier_errors",
    "rollout/mean_length",
    "rollout/truncated_fraction",
    "calibration/saturated_fraction",
    "calibration/underflow_fraction",
    "calibration/max_rel_change",
]
"""Metrics of a step that say something about the training; their meanings and units are in the README."""


class BreakerRule(Section):
    """A step is against a rule when the metric is above `above`, below `below`, or not finite."""

    metric: Judged
    """A metric of each step. A run that has no such metric (calibration without an FP8 cache) is not judged by it."""

    above: float | None = Field(default=None, allow_inf_nan=False)
    """Largest healthy value, in the metric's unit; null: none."""

    below: float | None = Field(default=None, allow_inf_nan=False)
    """Smallest healthy value, in the metric's unit; null: none."""

    patience: int = Field(default=1, ge=1, le=1000)
    """Steps in a row that have to be against the rule before it trips (1 to 1000)."""

    action: Literal["warn", "pause", "bf16_rollout", "stop"] = "warn"
    """warn: say so, once for each time that it trips; pause: wait, with a checkpoint, until a person resumes the flow
    run in Prefect; bf16_rollout: go on with a BF16 rollout engine; stop: end the run as failed, with an exit code of
    its own."""

    @field_validator("below")
    @classmethod
    def _something_is_healthy(cls, value: float | None, info: ValidationInfo) -> float | None:
        above = info.data.get("above")
        if value is not None and above is not None and value > above:
            wrong = f"no value is healthy, since it lies over above {above:g}"
            raise Refusal(Problem("below", value, wrong, f"at most {above:g}, or null"))
        return value


class Breakers(Section):
    """Rules on the metrics of each step, judged after it; of several that trip the one that stops is heeded first."""

    rules: Annotated[tuple[BreakerRule, ...], ListAsTuple] = ()
    """Any number of rules; several may be on one metric, such as one that warns and one that stops."""

    pause_timeout_s: float = Field(default=86400.0, gt=0.0, le=1e7)
    """Longest wait for a person (seconds, > 0, <= 1e7); a run that nobody resumes ends as one that was stopped."""
