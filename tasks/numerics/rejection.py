"""Which tokens are too far from the rollout engine's distribution to be trained on.

Notation as in `tasks.numerics.mismatch`: d = p - q (log of train over rollout). A statistic is compared, never
used as a value, so it is taken from the unclamped d and ratios are compared in log space: no bound meets the
clamp at +-20 and none is turned over. A missing q counts as d = 0, which every rule keeps.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.numerics.mismatch import NonFiniteScoreError, k3

Statistic = Literal["k1", "k2", "k3", "probability"]
RejectionLevel = Literal["token", "sequence_mean", "sequence_max", "sequence_sum"]
AdvantageSign = Literal["any", "positive", "negative"]


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """Raise ValueError naming the field, its value and what is allowed."""
    if not ok:
        raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, field, value, ", ".join(choices))


@dataclass(frozen=True)
class RejectionRule:
    """Keep a token, or a whole sequence, only while lower <= statistic <= upper (bounds inclusive).

    | statistic     | per token              | bounds                                                               |
    |---------------|------------------------|----------------------------------------------------------------------|
    | `k1`          | train/rollout, e^d     | ratios, 0 < lower < 1 < upper                                        |
    | `k2`          | d^2/2 (Schulman, 2020) | nats, upper only                                                     |
    | `k3`          | e^d - 1 - d (the same) | nats, upper only                                                     |
    | `probability` | e^p - e^q              | -1 <= lower < 0 < upper <= 1; `sequence_sum` any lower < 0 < upper   |

    Over a sequence's valid tokens: `sequence_mean` is the mean (for `k1` the geometric mean e^(mean d)),
    `sequence_sum` the sum (for `k1` the product e^(sum d)), `sequence_max` asks it of every token, so that one
    outlier rejects its sequence. Means and sums of `probability` are of signed differences, which can cancel.

    A bound that is None does not limit. `advantages` restricts the rule to sequences whose advantage is above
    (`positive`) or below (`negative`) 0. Published rules in these terms: IcePop, k1 token [0.5, 5]
    (arXiv 2510.18855); binary trust region of DPPO, probability token, upper for positive and lower for negative
    advantages (arXiv 2602.04879); off-policy sequence mask of DeepSeek-V3.2, k1 sequence_mean, lower e^-delta,
    negative (arXiv 2512.02556).

    Raises ValueError for bounds that the statistic does not have, or that reject d = 0.
    """

    statistic: Statistic
    level: RejectionLevel
    lower: float | None = None
    upper: float | None = None
    advantages: AdvantageSign = "any"

    def __post_init__(self) -> None:
        require_choice("statistic", self.statistic, get_args(Statistic))
        require_choice("level", self.level, get_args(RejectionLevel))
        require_choice("advantages", self.advantages, get_args(AdvantageSign))
        require(self.lower is not None or self.upper is not None, "lower and upper", None, "at least one bound")
        neutral, least, most, allowed = self._range()
        if self.statistic in ("k2", "k3"):
            require(self.lower is None, "lower", self.lower, f"None: {self.statistic} is never below 0")
        if self.lower is not None:
            require(least <= self.lower < neutral, "lower", self.lower, allowed)
        if self.upper is not None:
            require(neutral < self.upper <= most, "upper", self.upper, allowed)

    def _range(self) -> tuple[float, float, float, str]:
        """The statistic at d = 0, the least and the greatest bound, and the same in words."""
        top = sys.float_info.max
        if self.statistic == "k1":
            return 1.0, sys.float_info.min, top, "ratios train/rollout with 0 < lower < 1 < upper"
        if self.statistic in ("k2", "k3"):
            return 0.0, -top, top, f"nats of {self.statistic} with 0 < upper"
        if self.level == "sequence_sum":
            return 0.0, -top, top, "sums of probabilities with lower < 0 < upper"
        return 0.0, -1.0, 1.0, "probabilities with -1 <= lower < 0 < upper <= 1"

    @property
    def name(self) -> str:
        """`<statistic>_<level>`, as used in metric names."""
        return f"{self.statistic}_{self.level}"


@dataclass(frozen=True)
class MaskedRatios:
    """Log-probabilities of a padded batch, detached, fp64 `[sequences, tokens]`, 0 where `valid` is false.

    `q` is p where the rollout's is missing or non-finite; `d` = p - q, unclamped; `lengths` int64
    `[sequences]` counts valid tokens.
    """

    p: Tensor
    q: Tensor
    d: Tensor
    valid: Tensor
    lengths: Tensor


def masked_ratios(p: Tensor, q: Tensor, mask: Tensor) -> MaskedRatios:
    """Form d at the valid tokens. `p`, `q`, `mask` (bool) `[sequences, tokens]`; masked values may be anything.

    Raises ValueError for shapes that differ, `NonFiniteScoreError` for a non-finite p at a valid token.
    """
    if p.ndim != 2 or p.shape != q.shape or p.shape != mask.shape:
        shapes = f"p {list(p.shape)}, q {list(q.shape)}, mask {list(mask.shape)}"
        raise ValueError(f"{shapes}: all must be [sequences, tokens]")
    p = torch.where(mask, p.detach().to(torch.float64), 0.0)
    broken = ~torch.isfinite(p)
    if bool(broken.any()):
        raise NonFiniteScoreError(f"{int(broken.sum())} scored log-probabilities are not finite")
    q = q.detach().to(torch.float64)
    q = torch.where(mask & torch.isfinite(q), q, p)
    return MaskedRatios(p, q, p - q, mask, mask.sum(dim=1))


def _token_statistic(ratios: MaskedRatios, statistic: Statistic) -> Tensor:
    """fp64 `[sequences, tokens]`, 0 at masked tokens; k1 as its logarithm. k2 and k3 may overflow to +inf."""
    if statistic == "k1":
        return ratios.d
    if statistic == "k2":
        return ratios.d**2 / 2
    if statistic == "k3":
        return k3(ratios.d)
    return torch.exp(ratios.p) - torch.exp(ratios.q)


def _within(x: Tensor, rule: RejectionRule) -> Tensor:
    lower, upper = rule.lower, rule.upper
    if rule.statistic == "k1":
        lower = None if lower is None else math.log(lower)
        upper = None if upper is None else math.log(upper)
    inside = torch.ones_like(x, dtype=torch.bool)
    if lower is not None:
        inside &= x >= lower
    if upper is not None:
        inside &= x <= upper
    return inside


def kept_by(rule: RejectionRule, ratios: MaskedRatios, advantages: Tensor) -> Tensor:
    """Tokens that one rule keeps: bool `[sequences, tokens]`, false at masked tokens. `advantages` `[sequences]`.

    Statistics run over all valid tokens, whatever other rules say: the order of rules does not matter.
    Raises ValueError when `advantages` is not one value a sequence.
    """
    if advantages.shape != ratios.lengths.shape:
        raise ValueError(f"advantages {list(advantages.shape)}: must be {list(ratios.lengths.shape)}, one a sequence")
    x = _token_statistic(ratios, rule.statistic)
    if rule.level == "token":
        inside = _within(x, rule)
    elif rule.level == "sequence_max":
        # Every band contains the 0 that stands at masked tokens.
        inside = _within(x, rule).all(dim=1, keepdim=True)
    elif rule.level == "sequence_mean":
        inside = _within(x.sum(dim=1, keepdim=True) / ratios.lengths.clamp(min=1).unsqueeze(1), rule)
    else:
        inside = _within(x.sum(dim=1, keepdim=True), rule)
    if rule.advantages != "any":
        applies = advantages > 0 if rule.advantages == "positive" else advantages < 0
        inside = inside | ~applies.unsqueeze(1)
    return ratios.valid & inside
