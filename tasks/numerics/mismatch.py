"""How far the trainer's probabilities are from the rollout engine's, token by token.

Notation, the same everywhere: q = log-probability of a sampled token when it was sampled, p = its
log-probability scored by the trainer at the weights that generated it, d = p - q. All statistics run
over valid tokens (response tokens; prompt and padding excluded) in fp64. d is clamped to +-20 before
any exponential and the clamped tokens are counted; metrics of |d| use the unclamped values. A missing
or non-finite q counts as d = 0 and is reported. An empty selection gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CLAMP = 20.0
"""Bound on |d| before an exponential: e^20 is 4.9e8."""


class NonFiniteScoreError(ValueError):
    """The trainer scored a valid token as NaN or inf: its weights are broken, no metric may hide that."""


@dataclass(frozen=True)
class LogRatios:
    """Valid tokens of a batch, flattened.

    `d` unclamped and `clamped` (to +-20), `p`, `q` (q = p where missing): fp64 `[tokens]`. `missing` counts
    rollout log-probabilities that were absent or non-finite.
    """

    d: Tensor
    clamped: Tensor
    p: Tensor
    q: Tensor
    missing: int


def log_ratios(p: Tensor, q: Tensor, mask: Tensor) -> LogRatios:
    """Select valid tokens and form d = p - q. `p`, `q`, `mask` (bool) share one shape.

    Raises `NonFiniteScoreError` for a non-finite p at a valid token.
    """
    p, q = p[mask].to(torch.float64), q[mask].to(torch.float64)
    if not bool(torch.isfinite(p).all()):
        raise NonFiniteScoreError(f"{int((~torch.isfinite(p)).sum())} scored log-probabilities are not finite")
    absent = ~torch.isfinite(q)
    q = torch.where(absent, p, q)
    d = p - q
    return LogRatios(d, d.clamp(-CLAMP, CLAMP), p, q, int(absent.sum()))


def require_padded(p: Tensor, q: Tensor, mask: Tensor) -> None:
    """Raise `ValueError` unless `p`, `q` and `mask` (bool) share one shape `[sequences, tokens]`.

    An integer mask would select by index, and another shape would be broadcast, both without an error.
    """
    if mask.dim() != 2 or mask.dtype != torch.bool or p.shape != mask.shape or q.shape != mask.shape:
        shapes = f"p {tuple(p.shape)}, q {tuple(q.shape)}, mask {tuple(mask.shape)} {mask.dtype}"
        raise ValueError(f"p, q and a bool mask must share one shape [sequences, tokens], got {shapes}")


def k3(x: Tensor) -> Tensor:
    """e^x - 1 - x >= 0, the low-variance KL estimator (Schulman, 2020), to a few ulp for every x."""
    # Near 0 the difference cancels (in fp32 it is 0 below 1e-7), so there the Taylor series is summed:
    # x^2/2 (1 + x/3 (1 + x/4 (...))); at |x| < 0.25 the terms beyond x^13 are below the fp64 epsilon.
    series = torch.ones_like(x)
    for n in range(13, 2, -1):
        series = 1 + series * x / n
    return torch.where(x.abs() < 0.25, series * x * x / 2, torch.expm1(x) - x)


def js_terms(p: Tensor, q: Tensor) -> Tensor:
    """Per-token Jensen-Shannon estimate: mean of k3(p - m) and k3(q - m), m = log of the 50/50 mixture.

    Both differences depend on d = p - q alone (clamped to +-20): m - p = log((1 + e^-d) / 2).
    """
    d = (p - q).clamp(-CLAMP, CLAMP)
    return 0.5 * (k3(-torch.log1p(torch.expm1(-d) / 2)) + k3(-torch.log1p(torch.expm1(d) / 2)))


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def nearest_rank(x: Tensor, share: float) -> float:
    """The smallest value with at least `share` (0, 1] of the values at or below it; 0 when empty."""
    if not x.numel():
        return 0.0
    # 99.9 / 100 * 1000 is 999.0000000000001 in floating point: the rank must still be 999.
    rank = max(1, math.ceil(round(share * x.numel(), 6)))
    return float(torch.kthvalue(x, rank).values)


def mismatch_metrics(ratios: LogRatios) -> dict[str, float]:
    """The `mismatch/*` metrics of one batch (names and formulas: README, table of metrics)."""
    d, clamped = ratios.d, ratios.clamped
    return {
        "mismatch/token_mult_prob_error": _mean(torch.exp(clamped.abs())),
        "mismatch/gen_kl": _mean(k3(clamped)),
        "mismatch/policy_kl": _mean(k3(-clamped)),
        "mismatch/js": _mean(js_terms(ratios.p, ratios.q)),
        "mismatch/max_abs_logprob_diff": float(d.abs().max()) if d.numel() else 0.0,
        "mismatch/p99_abs_logprob_diff": nearest_rank(d.abs(), 0.99),
        "mismatch/clamped_tokens": float((d.abs() > CLAMP).sum()),
        "mismatch/missing_rollout_logprobs": float(ratios.missing),
    }


def _shape_of_probabilities(logprobs: Tensor) -> Tensor:
    """e^logprobs up to a positive factor and an offset: mean 0, largest magnitude 1; all 0 for equal values.

    `[tokens]` fp64, not empty. Correlation does not see factor and offset, so the largest probability is
    divided out (e^-800 is 0 in fp64) and 1 is subtracted by expm1 (1 - e^-1e-12 keeps all its digits).
    """
    x = torch.expm1(logprobs - logprobs.max())
    x = x - x.mean()
    largest = x.abs().max()
    return torch.where(largest > 0, x / largest, 0.0)


def probability_pearson(p: Tensor, q: Tensor) -> float:
    """Pearson correlation of the probabilities e^p and e^q, in [-1, 1]. `p`, `q` `[tokens]` fp64, finite.

    Undefined where a side is constant (so for fewer than two tokens): 0, by definition here, although
    equal constants agree perfectly. Read it together with `mismatch/token_mult_prob_error`.
    """
    if not p.numel():
        return 0.0
    x, y = _shape_of_probabilities(p), _shape_of_probabilities(q)
    norm = torch.sqrt((x * x).sum() * (y * y).sum())
    return float(torch.where(norm > 0, (x * y).sum() / norm, 0.0).clamp(-1.0, 1.0))


def sequence_mismatch_metrics(p: Tensor, q: Tensor, mask: Tensor) -> dict[str, float]:
    """The `mismatch/*` metrics of whole sequences. `p`, `q`, `mask` (bool) `[sequences, tokens]`, nats.

    Means over sequences run over those with a valid token, and each of them counts alike whatever its length.
    Perplexity of a sequence is e^(-mean log-probability); its ratio, trainer over rollout, is e^(mean q - mean p),
    above 1 where the trainer is less confident. chi2 is the divergence of the trainer from the rollout,
    E_q[w^2] - 1, of the token weight w = e^d and of the sequence weight w = e^(sum d): the variance that
    importance sampling adds, in [-1, inf) as an estimate. `clamped_sequences` counts the sequences whose
    sum was moved by the clamp of a d or of the sum itself. Where q is missing, d = 0 and q reads as p.

    Sources: ppl ratio, chi2 and correlation as in verl's rollout correction (Liu, Li et al., "When Speed Kills
    Stability", 2025), the worst sequence's mean e^|d| as in NeMo RL. Raises `ValueError` for unequal or other
    shapes, `NonFiniteScoreError` for a non-finite p at a valid token.
    """
    require_padded(p, q, mask)
    ratios = log_ratios(p, q, mask)
    lengths = mask.sum(1)
    used = lengths > 0
    lengths = lengths[used]

    def sums(values: Tensor) -> Tensor:
        """Sum over each used sequence's tokens, fp64 `[used sequences]`."""
        padded = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        return padded.masked_scatter(mask, values.to(torch.float64)).sum(1)[used]

    log_weight = sums(ratios.clamped)
    log_ppl_diff = sums(ratios.q - ratios.p) / lengths
    clamped = (log_weight.abs() > CLAMP) | (sums(ratios.d.abs() > CLAMP) > 0)
    errors = sums(torch.exp(ratios.clamped.abs())) / lengths
    return {
        "mismatch/ppl_ratio": _mean(torch.exp(-log_weight / lengths)),
        "mismatch/log_ppl_diff": _mean(log_ppl_diff),
        "mismatch/log_ppl_abs_diff": _mean(log_ppl_diff.abs()),
        "mismatch/chi2_token": _mean(torch.expm1(2 * ratios.clamped)),
        "mismatch/chi2_sequence": _mean(torch.expm1(2 * log_weight.clamp(-CLAMP, CLAMP))),
        "mismatch/clamped_sequences": float(clamped.sum()),
        "mismatch/probability_pearson": probability_pearson(ratios.p, ratios.q),
        "mismatch/sequence_mult_prob_error_max": float(errors.max()) if errors.numel() else 0.0,
    }
