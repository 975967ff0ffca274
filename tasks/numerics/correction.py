"""Correction of the rollout engine's distribution to the trainer's: a weight for each token, and which tokens stay.

Weights are e^(log train/rollout), taken per token or per sequence; rejection (`tasks.numerics.rejection`) removes
tokens altogether. All bounds are on train/rollout. Nothing here carries a gradient, and nothing here decides the
loss's denominator: `kept` and the mask are both available to the caller, whose key says which one counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.numerics.mismatch import CLAMP
from tasks.numerics.rejection import MaskedRatios, RejectionRule, kept_by, masked_ratios, require, require_choice

WeightLevel = Literal["none", "token", "sequence", "geometric"]
Outside = Literal["truncate", "mask"]

GEOMETRIC_MEDIAN = "importance/sequence_geometric_median"
PRODUCT_MEDIAN = "importance/sequence_product_median"


@dataclass(frozen=True)
class Weighting:
    """The importance weight w of a token, with c = d clamped to +-20.

    | level       | w; one value for all valid tokens of a sequence, except at token level                   |
    |-------------|------------------------------------------------------------------------------------------|
    | `none`      | 1                                                                                        |
    | `token`     | e^c (truncated: Ionides, 2008; for rollout engines Yao et al., 2025)                     |
    | `sequence`  | e^(sum c), sum clamped to +-20: likelihood ratio of the response, drifts with its length |
    | `geometric` | e^(mean c), length-normalised, the form of GSPO's ratio (arXiv 2507.18071)               |

    `outside` decides about w beyond the bounds: `truncate` gives min(max(w, lower), upper), `mask` weighs 0 and
    rejects (IcePop at token level, arXiv 2510.18855). `upper` None does not limit: with `lower` 0, plain
    importance sampling. The clamp keeps w within e^-20..e^20 in any case.

    Raises ValueError unless 0 <= lower < 1 < upper, or for a mask without a bound.
    """

    level: WeightLevel
    lower: float = 0.0
    upper: float | None = 2.0
    outside: Outside = "truncate"

    def __post_init__(self) -> None:
        require_choice("level", self.level, get_args(WeightLevel))
        require_choice("outside", self.outside, get_args(Outside))
        require(0.0 <= self.lower < 1.0, "lower", self.lower, "from 0 and below 1")
        finite = self.upper is None or 1.0 < self.upper < math.inf
        require(finite, "upper", self.upper, "a finite number above 1, or None for no bound")
        bounded = self.upper is not None or self.lower > 0
        require(self.outside == "truncate" or bounded, "upper", self.upper, "a number when outside is mask and lower 0")


@dataclass(frozen=True)
class Correction:
    """A weight, rejection rules (a token must pass all) and self-normalisation.

    `self_normalize` divides the final weights by their mean over what is kept: over tokens for `none` and
    `token`, over sequences (each counts once) for `sequence` and `geometric`. The mean weight is then 1, at the
    price of a bias of order 1/n (Owen, 2013, chapter 9), and a weight may exceed `upper`.
    """

    weighting: Weighting
    rejection: tuple[RejectionRule, ...] = ()
    self_normalize: bool = False


@dataclass(frozen=True)
class CorrectionOutputs:
    """`weights` fp32, detached, exactly 0 at masked and rejected tokens; `kept` bool: valid and not rejected.

    Both `[sequences, tokens]`. `metrics` as in `correct`.
    """

    weights: Tensor
    kept: Tensor
    metrics: dict[str, float]


def correct(p: Tensor, q: Tensor, mask: Tensor, advantages: Tensor, correction: Correction) -> CorrectionOutputs:
    """Weigh and reject the tokens of one whole update: the mean of `self_normalize` runs over all of it.

    `p`, `q`, `mask` (bool) `[sequences, tokens]`; `advantages` `[sequences]`. Order: raw weight; truncate or
    mask; rejection rules; self-normalisation; 0 elsewhere. With nothing kept, all weights are 0.

    Metrics (shares, of valid tokens unless said; 0 without any): `importance/rejected_fraction`;
    `importance/rejected_sequences_fraction`, of sequences with valid tokens, those of which none is kept;
    `importance/rejected_fraction_<statistic>_<level>`, what each rule alone rejects (`_2` and so on when a
    name repeats); `importance/weight_mean`, mean final weight, rejected tokens counting 0;
    `importance/self_normalizer`, the mean that was divided by (only with `self_normalize`).

    Raises `NonFiniteScoreError` for a non-finite p at a valid token, ValueError for shapes that do not fit.
    """
    ratios = masked_ratios(p, q, mask)
    raw, inside = _weigh(ratios, correction.weighting)
    by_rule = [kept_by(rule, ratios, advantages) for rule in correction.rejection]
    kept = ratios.valid & inside
    for passed in by_rule:
        kept = kept & passed
    weights = torch.where(kept, raw, 0.0)
    metrics = _rejection_metrics(ratios, kept) | _rule_metrics(ratios, correction.rejection, by_rule)
    if correction.self_normalize:
        mean = _mean_weight(weights, kept, correction.weighting.level)
        weights = weights / torch.where(mean > 0, mean, 1.0)
        metrics["importance/self_normalizer"] = float(mean)
    metrics["importance/weight_mean"] = _share(weights.sum(), ratios.lengths.sum())
    return CorrectionOutputs(weights.to(torch.float32), kept, metrics)


def _log_weights(ratios: MaskedRatios, level: WeightLevel) -> Tensor:
    """log w before bounds, fp64: `[sequences, tokens]` for tokens, `[sequences, 1]` for sequences."""
    clamped = ratios.d.clamp(-CLAMP, CLAMP)
    if level == "none":
        return torch.zeros_like(clamped)
    if level == "token":
        return clamped
    total = clamped.sum(dim=1, keepdim=True)
    if level == "sequence":
        return total.clamp(-CLAMP, CLAMP)
    return total / ratios.lengths.clamp(min=1).unsqueeze(1)


def _weigh(ratios: MaskedRatios, weighting: Weighting) -> tuple[Tensor, Tensor]:
    """Weights after truncation, and where a mask keeps them; both broadcast to `[sequences, tokens]`."""
    log_w = _log_weights(ratios, weighting.level)
    w = torch.exp(log_w)
    if weighting.outside == "truncate":
        return w.clamp(min=weighting.lower, max=weighting.upper), torch.ones_like(w, dtype=torch.bool)
    # In log space, as rejection rules compare: the same bound then decides the same in both.
    inside = torch.ones_like(w, dtype=torch.bool)
    if weighting.lower > 0:
        inside &= log_w >= math.log(weighting.lower)
    if weighting.upper is not None:
        inside &= log_w <= math.log(weighting.upper)
    return w, inside


def _mean_weight(weights: Tensor, kept: Tensor, level: WeightLevel) -> Tensor:
    """Mean over kept tokens, or over sequences with a kept token; a scalar, 0 with nothing kept."""
    if level in ("none", "token"):
        return weights.sum() / kept.sum().clamp(min=1)
    counts = kept.sum(dim=1)
    return (weights.sum(dim=1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.to(torch.float64) / whole.clamp(min=1))


def _rejection_metrics(ratios: MaskedRatios, kept: Tensor) -> dict[str, float]:
    present = ratios.lengths > 0
    emptied = present & ~kept.any(dim=1)
    return {
        "importance/rejected_fraction": _share((ratios.valid & ~kept).sum(), ratios.lengths.sum()),
        "importance/rejected_sequences_fraction": _share(emptied.sum(), present.sum()),
    }


def _rule_metrics(ratios: MaskedRatios, rules: tuple[RejectionRule, ...], by_rule: list[Tensor]) -> dict[str, float]:
    # Not `rejected_fraction/NAME`: file stores of MLflow keep a metric as a file, which cannot also be a folder.
    metrics: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for rule, passed in zip(rules, by_rule, strict=True):
        seen[rule.name] += 1
        suffix = "" if seen[rule.name] == 1 else f"_{seen[rule.name]}"
        rejected = _share((ratios.valid & ~passed).sum(), ratios.lengths.sum())
        metrics[f"importance/rejected_fraction_{rule.name}{suffix}"] = rejected
    return metrics


def product_shrinkage(p: Tensor, q: Tensor, mask: Tensor) -> dict[str, float]:
    """How products of token ratios compare with their geometric means, over sequences with valid tokens.

    Medians (mean of the middle two) of e^(mean d), `importance/sequence_geometric_median`, and of e^(sum d),
    `importance/sequence_product_median`; both with the clamps of `Weighting`. The expected log-product is -L times
    the KL divergence from rollout to trainer per token, so at equal quality it falls with the length L.
    Shapes and errors as in `correct`; 0 without a valid token.
    """
    ratios = masked_ratios(p, q, mask)
    present = ratios.lengths > 0
    geometric = torch.exp(_log_weights(ratios, "geometric"))[present]
    product = torch.exp(_log_weights(ratios, "sequence"))[present]
    if not product.numel():
        return {GEOMETRIC_MEDIAN: 0.0, PRODUCT_MEDIAN: 0.0}
    return {
        GEOMETRIC_MEDIAN: float(torch.quantile(geometric, 0.5)),
        PRODUCT_MEDIAN: float(torch.quantile(product, 0.5)),
    }


def product_warning(metrics: Mapping[str, float], correction: Correction) -> str | None:
    """A warning when `correction` uses products of token ratios and length alone has moved them; else None.

    `metrics` holds those of `product_shrinkage`. The tokens agree (median geometric mean in [0.9, 1.1]) while the
    median product is below 0.5 or above 2.
    """
    rules = any(rule.statistic == "k1" and rule.level == "sequence_sum" for rule in correction.rejection)
    if correction.weighting.level != "sequence" and not rules:
        return None
    geometric, product = metrics[GEOMETRIC_MEDIAN], metrics[PRODUCT_MEDIAN]
    if not 0.9 <= geometric <= 1.1 or 0.5 <= product <= 2.0:
        return None
    return (
        f"tokens agree (median geometric mean of train/rollout {geometric:.6g}), but the median product over a "
        f"response is {product:.3g}: products drift with length, so this correction measures length, not disagreement. "
        "Use a geometric or token level weight, and sequence_mean in place of sequence_sum rejection."
    )
