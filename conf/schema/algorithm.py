"""The policy-gradient objective: advantages, surrogate, regularisers, normalisation and what is sampled for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from conf.schema.base import Problem, Refusal, Section


class DynamicSampling(Section):
    """Sample until the verifier's rewards differ in every group of a step (DAPO, arXiv:2503.14476, section 3.2)."""

    enabled: bool = False
    """Whether groups whose unshaped rewards are all equal are replaced by groups of further prompts."""

    max_generation_batches: int = Field(default=10, ge=1)
    """Batches of prompts_per_step prompts that a step may sample, at most (batches, >= 1)."""

    when_exhausted: Literal["fill", "fail"] = "fill"
    """After the last batch: fill the step with groups of equal verifier rewards, or fail the run."""


class Overlong(Section):
    """Responses that reach, or nearly reach, rollout.max_new_tokens (DAPO, arXiv:2503.14476, section 3.4)."""

    filter: bool = False
    """Whether truncated responses are left out of the loss; their rewards stay in the group's baseline."""

    penalty: float = Field(default=0.0, ge=0.0)
    """Taken from the reward at rollout.max_new_tokens, linearly over the buffer (reward units, >= 0; 0 is off)."""

    buffer: int | None = Field(default=None, ge=1)
    """Tokens below the limit in which the penalty rises (tokens, >= 1); null is a fifth of rollout.max_new_tokens."""


class Algorithm(Section):
    """One objective, put together from its parts; the options of the group are the published combinations."""

    name: str = Field(default="grpo", min_length=1)
    """Name of the combination, shown in tables; the other keys decide what is computed."""

    group_size: int = Field(default=8, ge=2)
    """Answers sampled per prompt (samples, >= 2: the advantage compares answers within a group)."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts drawn per step (prompts, >= 1)."""

    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser updates per step (>= 1); they share the step's samples evenly."""

    advantage_baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is taken from a reward: the mean of its group, or the mean of the group's other samples (RLOO)."""

    advantage_scale: Literal["group_std", "leave_one_out_std", "batch_whitened", "none"] = "group_std"
    """Divisor: group's std (n - 1), the others' std, mean and std over the batch's response tokens, or nothing."""

    advantage_eps: float = Field(default=1e-6, gt=0.0)
    """Added to a standard deviation before dividing by it (reward units, > 0)."""

    ratio: Literal["token", "sequence"] = "token"
    """Policy ratio of each token, or the length-normalised one of its sequence (GSPO)."""

    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    """clip: PPO's pessimistic minimum; cispo: clipped, detached ratio times log-probability; reinforce: no ratio."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """The policy ratio is clipped from below at 1 - clip_low (0 < x <= 1; 1 is no lower bound)."""

    clip_high: float = Field(default=0.2, gt=0.0)
    """The policy ratio is clipped from above at 1 + clip_high (> 0)."""

    dual_clip: float | None = Field(default=None, gt=1.0)
    """With surrogate clip, the loss of a negative advantage is at most dual_clip * |A| (> 1); null is off."""

    normalization: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Loss over an update: token mean, mean of sequence means, or sum / (sequences * normalization_length)."""

    normalization_length: int | None = Field(default=None, ge=1)
    """Constant length of fixed_length (tokens, >= 1); null is rollout.max_new_tokens."""

    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL term against the starting policy in the loss (>= 0; 0 leaves it out)."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL(policy to reference) for each token: k1 = -x, k2 = x^2/2, k3 = e^x - 1 - x, x = ref - policy."""

    kl_gradient: Literal["unbiased", "pathwise"] = "unbiased"
    """unbiased: importance-weighted, with the score-function part; pathwise: the estimate differentiated as is."""

    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus in the loss (>= 0; 0 leaves it out)."""

    dynamic_sampling: DynamicSampling = DynamicSampling()
    """Replacing groups that carry no gradient."""

    overlong: Overlong = Overlong()
    """Responses at the length limit."""

    @property
    def samples_per_step(self) -> int:
        """Samples that one step trains on: prompts times group size."""
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

    @field_validator("advantage_scale")
    @classmethod
    def _others_have_a_spread(cls, value: str, info: ValidationInfo) -> str:
        if value == "leave_one_out_std" and info.data.get("group_size") == 2:
            wrong = "the standard deviation of the others needs two of them, and group_size is 2"
            raise Refusal(Problem("advantage_scale", value, wrong, "another scale, or group_size >= 3"))
        return value

    @field_validator("surrogate")
    @classmethod
    def _sequence_ratio_is_clipped(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("ratio") == "sequence" and value != "clip":
            raise Refusal(
                Problem("surrogate", value, "is defined for a ratio of each token", "clip with ratio sequence")
            )
        return value

    @field_validator("normalization")
    @classmethod
    def _sequence_ratio_weighs_sequences(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("ratio") == "sequence" and value == "token_mean":
            wrong = "lets long responses weigh more, and ratio sequence is one ratio a response"
            raise Refusal(Problem("normalization", value, wrong, "sequence_mean or fixed_length with ratio sequence"))
        return value


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller one of two equally near."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
