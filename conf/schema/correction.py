"""The correction between the policy that samples and the policy that is trained. Bounds are on train / rollout."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

_RATIO_STATISTIC = "k1"


class RejectionRule(Section):
    """One reason to leave tokens or whole sequences out of the loss. d = trainer - rollout log-probability."""

    statistic: Literal["k1", "k2", "k3", "probability"]
    """k1 bounds e^d itself; k2 = d^2/2 and k3 = e^d - 1 - d are in nats; probability is trainer - rollout."""

    level: Literal["token", "sequence_mean", "sequence_max", "sequence_sum"]
    """Judge each token, or a sequence by the mean, the extreme or the sum (product of ratios) over its tokens."""

    lower: float | None = None
    """Kept from here on: a ratio in (0, 1) for k1, a difference in [-1, 0) for probability; null is no bound."""

    upper: float | None = None
    """Kept up to here: a ratio > 1 for k1, nats > 0 for k2 and k3, a difference in (0, 1] for probability."""

    advantages: Literal["any", "positive", "negative"] = "any"
    """Samples that the rule applies to, by the sign of their advantage."""

    @field_validator("level")
    @classmethod
    def _probabilities_are_of_tokens(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("statistic") == "probability" and value == "sequence_sum":
            wrong = "a sum of probability differences has no meaning"
            raise Refusal(Problem("level", value, wrong, "token, sequence_mean or sequence_max"))
        return value

    @field_validator("lower")
    @classmethod
    def _lower_fits(cls, value: float | None, info: ValidationInfo) -> float | None:
        statistic = info.data.get("statistic")
        if value is None or statistic is None:
            return value
        if statistic in ("k2", "k3"):
            raise Refusal(Problem("lower", value, f"{statistic} is 0 at agreement and has no lower bound", "null"))
        low, high = (0.0, 1.0) if statistic == _RATIO_STATISTIC else (-1.0, 0.0)
        least = sys.float_info.min if statistic == _RATIO_STATISTIC else low
        if not least <= value < high:
            wrong, form = f"outside of what {statistic} can be bounded by", "(0, 1)" if high == 1.0 else "[-1, 0)"
            raise Refusal(Problem("lower", value, wrong, f"a number in {form}, or null"))
        return value

    @field_validator("upper")
    @classmethod
    def _upper_fits(cls, value: float | None, info: ValidationInfo) -> float | None:
        statistic = info.data.get("statistic")
        if value is None and info.data.get("lower", 0.0) is None:
            raise Refusal(Problem("upper", value, "a rule without bounds rejects nothing", "lower, upper or both"))
        if value is None or statistic is None:
            return value
        low = 1.0 if statistic == _RATIO_STATISTIC else 0.0
        if not value > low or (statistic == "probability" and value > 1.0):
            allowed = "a number in (0, 1], or null" if statistic == "probability" else f"a number > {low:g}, or null"
            raise Refusal(Problem("upper", value, f"outside of what {statistic} can be bounded by", allowed))
        return value


class Correction(Section):
    """Importance weights and rejection; the options of the group are the combinations that are in use."""

    name: str = Field(default="token_truncation", min_length=1)
    """Name of the combination, shown in tables; the other keys decide what is computed."""

    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    """Weight of a token: 1, e^d, e^(sum of d over its sequence), or e^(mean of d over its sequence)."""

    lower: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Lower bound of the weight (factor, 0 <= x < 1; 0 is none)."""

    cap: float | None = Field(default=2.0, gt=1.0)
    """Upper bound of the weight (factor, > 1); null is none."""

    outside: Literal["truncate", "mask"] = "truncate"
    """Beyond a bound: the weight is set to it, or the token (with a sequence's weight: the sequence) is rejected."""

    rejection: Annotated[tuple[RejectionRule, ...], ListAsTuple] = ()
    """Rules of which every one must keep a token."""

    self_normalize: bool = False
    """Whether weights are divided by their mean over what is kept in the step's batch."""

    denominator: Literal["all", "kept"] = "all"
    """Tokens or sequences that the loss is divided by: all valid ones, or those not rejected."""

    allow_uncorrected: bool = False
    """Whether an FP8 rollout may be trained on without a correction."""

    @property
    def corrects(self) -> bool:
        """False when sampled and trained policy are treated as one."""
        return self.weight != "none" or bool(self.rejection)

    @field_validator("outside")
    @classmethod
    def _mask_has_a_bound(cls, value: str, info: ValidationInfo) -> str:
        if value == "mask" and info.data.get("weight") == "none":
            raise Refusal(Problem("outside", value, "weight none has no bound to be beyond", "truncate, or a weight"))
        if value == "mask" and info.data.get("cap", 0) is None and info.data.get("lower") == 0.0:
            raise Refusal(
                Problem("outside", value, "there is no bound to be beyond", "truncate, or mask with cap or lower")
            )
        return value
