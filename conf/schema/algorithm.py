"""The policy-gradient objective, and the correction between sampling policy and trained policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from conf.schema.base import Problem, Refusal, Section


class Algorithm(Section):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) with a token-mean loss."""

    name: Literal["grpo"] = "grpo"
    """The only algorithm so far."""

    group_size: int = Field(default=8, ge=2)
    """Answers sampled per prompt (samples, >= 2: the advantage compares answers within a group)."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts drawn per step (prompts, >= 1)."""

    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser updates per step (>= 1); they share the step's samples evenly."""

    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The policy ratio is clipped from below at 1 - clip_low (0 < x < 1)."""

    clip_high: float = Field(default=0.2, gt=0.0)
    """The policy ratio is clipped from above at 1 + clip_high (> 0)."""

    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL term against the starting policy in the loss (>= 0; 0 leaves it out)."""

    advantage_eps: float = Field(default=1e-6, gt=0.0)
    """Added to a group's standard deviation before dividing by it (reward units, > 0)."""

    @property
    def samples_per_step(self) -> int:
        """Samples that one step generates: prompts times group size."""
        return self.prompts_per_step * self.group_size

    @property
    def samples_per_update(self) -> int:
        """Samples behind one optimiser update."""
        return self.samples_per_step // self.updates_per_step

    @field_validator("updates_per_step")
    @classmethod
    def _updates_share_evenly(cls, value: int, info: ValidationInfo) -> int:
        prompts, group = info.data.get("prompts_per_step"), info.data.get("group_size")
        if prompts is None or group is None or prompts * group % value == 0:
            return value
        raise Refusal(
            Problem(
                "updates_per_step",
                value,
                f"does not divide the {prompts * group} samples of a step "
                f"(prompts_per_step {prompts} * group_size {group})",
                f"a divisor of {prompts * group}",
                str(nearest_divisor(prompts * group, value)),
            )
        )


class Correction(Section):
    """Importance weighting that corrects for sampling in another precision than training."""

    name: Literal["token_truncation", "none"] = "token_truncation"
    """token_truncation weights each token with min(exp(d), cap), d = trainer - rollout log-probability."""

    cap: float = Field(default=2.0, gt=1.0)
    """Largest importance weight (factor, > 1)."""

    allow_uncorrected: bool = False
    """Whether an FP8 rollout may be trained on without a correction."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller one of two equally near."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
