"""The policy objective on tensors: surrogate with importance weights, KL to a reference, entropy.

pi = log-probability of a sampled token under the current weights, p = the same scored before any update of the step,
r = e^(pi - p). Exponents are clamped to +-20. What is divided by is decided by coefficients
(`tasks.numerics.normalization`), so that the losses of an update's micro-batches add up to its loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from tasks.numerics.kl import KlEstimator, KlGradient, kl_term
from tasks.numerics.mismatch import CLAMP, k3

Ratio = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "reinforce"]


@dataclass(frozen=True)
class ObjectiveSettings:
    """Which objective, see `policy_loss` for the formulas.

    `ratio` per token, or one per sequence: e^(mean of pi - p over its tokens) (GSPO: Zheng et al., 2025,
    arXiv 2507.18071). The ratio is clipped to [1 - clip_low, 1 + clip_high] (clip_low 1: not from below); dual_clip is
    the bound c > 1 of `clip` alone; `reinforce` clips nothing. `kl_estimator` and `kl_gradient`:
    `tasks.numerics.kl`. A part with coefficient 0 is reported where its input is given, and not differentiated.
    """

    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_gradient: KlGradient = "unbiased"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low = {self.clip_low}: allowed are 0 to 1")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high = {self.clip_high}: allowed are numbers >= 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: allowed are None and numbers > 1")
        for name, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}: allowed are finite numbers >= 0")


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole sequences, every tensor `[sequences, tokens]`.

    `logprobs` pi, with gradient; `old_logprobs` p; `advantages` one value a token; `weights` importance weights;
    `coefficients` rows of the update's `loss_coefficients`; `mask` bool, true at the tokens that count;
    `reference_logprobs` of the frozen reference; `entropy` of the policy at each token, nats, with gradient where it
    has a coefficient. Only `logprobs` and `entropy` are differentiated. Masked positions may hold anything.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    coefficients: Tensor
    mask: Tensor
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(f"needed are [sequences, tokens] and a bool mask, got {tuple(shape)}, {self.mask.dtype}")
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{field.name} must be {tuple(shape)} like logprobs, got {tuple(tensor.shape)}")


@dataclass(frozen=True)
class LossOutputs:
    """`loss` to differentiate: scalar in the dtype of `logprobs`. The rest is fp64 and additive over micro-batches.

    `sums`: coefficient-weighted `loss/policy`, `loss/kl`, `loss/entropy` (the entropy itself, before its
    coefficient and sign); add them up over one update. `counts`: sums over tokens, to be divided by the number of
    valid tokens: `policy/clipped_fraction`, `policy/kl_to_old` (k3 of p - pi), `policy/ratio_mean` (before clipping).
    `maxima`: `policy/ratio_max` (before clipping; 0 without valid tokens); take the highest.
    """

    loss: Tensor
    sums: dict[str, float]
    counts: dict[str, float]
    maxima: dict[str, float]


def policy_ratio(log_ratio: Tensor, mask: Tensor, ratio: Ratio) -> Tensor:
    """e^(pi - p) of each token, or e^(mean of pi - p over the sequence's tokens) at all its tokens.

    `log_ratio` `[sequences, tokens]`, 0 where `mask` is false; so is its mean in a sequence without tokens. The
    exponent (for a sequence: the mean) is clamped to +-20. The gradient of a sequence's ratio runs through
    all its tokens.
    """
    if ratio == "sequence":
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = log_ratio.sum(1, keepdim=True, dtype=torch.float64) / count
        log_ratio = torch.where(mask, mean.to(log_ratio.dtype), 0.0)
    return torch.exp(log_ratio.clamp(-CLAMP, CLAMP))


def surrogate_terms(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Loss of each token before weighting, and where clipping took effect (bool). All of one shape.

    - `clip`: -min(r A, clip(r) A) (PPO: Schulman et al., 2017, arXiv 1707.06347), with dual_clip c at most -c A
      where A < 0 (Ye et al., 2020, arXiv 1912.09729). Took effect: its gradient is 0.
    - `cispo`: -sg(clip(r)) A pi (MiniMax-M1, 2025, arXiv 2506.13585): a clipped token keeps its gradient. Took effect:
      r lay outside.
    - `reinforce`: -A pi (Williams, 1992), r is not used.

    r = 1 with A = 0, as at masked positions, never counts as clipped.
    """
    if settings.surrogate == "reinforce":
        return -advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    clipped = ratio.clamp(low, high)
    above, below = ratio > high, ratio < low
    if settings.surrogate == "cispo":
        return -clipped.detach() * advantages * logprobs, above | below
    negative = advantages < 0
    terms = -torch.minimum(ratio * advantages, clipped * advantages)
    held = (above & (advantages > 0)) | (below & negative)
    if settings.dual_clip is not None:
        bounded = negative & (ratio > settings.dual_clip)
        terms = torch.where(bounded, -settings.dual_clip * advantages, terms)
        held = held | bounded
    return terms, held


def policy_loss(inputs: LossInputs, settings: ObjectiveSettings) -> LossOutputs:
    """loss = sum of coefficient * (weight * surrogate + kl_coef * KL term - entropy_coef * entropy).

    The KL term is weighted by the importance weight times the token's ratio (`tasks.numerics.kl`), whichever ratio
    the surrogate has. Log-probabilities and entropies at valid tokens have to be finite; NaN there makes the
    loss NaN. Without a valid token everything is 0.

    Raises `ValueError` for a coefficient without its input.
    """
    if settings.kl_coef and inputs.reference_logprobs is None:
        raise ValueError(f"kl_coef = {settings.kl_coef} needs reference_logprobs")
    if settings.entropy_coef and inputs.entropy is None:
        raise ValueError(f"entropy_coef = {settings.entropy_coef} needs entropy")
    mask, coefficients = inputs.mask, _fixed(inputs, inputs.coefficients)
    logprobs = torch.where(mask, inputs.logprobs, 0.0)
    log_ratio = logprobs - _fixed(inputs, inputs.old_logprobs)
    ratio = policy_ratio(log_ratio, mask, settings.ratio)
    terms, clipped = surrogate_terms(logprobs, ratio, _fixed(inputs, inputs.advantages), settings)
    policy = _fixed(inputs, inputs.weights) * terms
    loss = (coefficients * policy).sum()
    parts = {"loss/policy": policy, "loss/kl": torch.zeros_like(policy), "loss/entropy": torch.zeros_like(policy)}
    if inputs.reference_logprobs is not None:
        parts["loss/kl"] = kl = _kl(inputs, inputs.reference_logprobs, log_ratio, settings)
        if settings.kl_coef:
            loss = loss + settings.kl_coef * (coefficients * kl).sum()
    if inputs.entropy is not None:
        parts["loss/entropy"] = entropy = torch.where(mask, inputs.entropy, 0.0)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * (coefficients * entropy).sum()
    return _outputs(loss, parts, coefficients, clipped, log_ratio.detach(), ratio.detach(), mask)


def _fixed(inputs: LossInputs, values: Tensor) -> Tensor:
    """`values` without gradient and in the dtype of the log-probabilities, 0 off the mask."""
    return torch.where(inputs.mask, values.detach(), 0.0).to(inputs.logprobs.dtype)


def _kl(inputs: LossInputs, reference: Tensor, log_ratio: Tensor, settings: ObjectiveSettings) -> Tensor:
    sampling_weight = _fixed(inputs, inputs.weights) * policy_ratio(log_ratio.detach(), inputs.mask, "token")
    return kl_term(
        inputs.logprobs, reference, inputs.mask, settings.kl_estimator, settings.kl_gradient, sampling_weight
    )


def _outputs(
    loss: Tensor,
    parts: dict[str, Tensor],
    coefficients: Tensor,
    clipped: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    mask: Tensor,
) -> LossOutputs:
    """Reduce in fp64 on the device and fetch all figures at once."""
    wide = coefficients.to(torch.float64)
    raw = torch.where(mask, ratio, 0.0).to(torch.float64)
    to_old = k3(-log_ratio.to(torch.float64).clamp(-CLAMP, CLAMP))
    sums = {name: (wide * part.detach().to(torch.float64)).sum() for name, part in parts.items()}
    counts = {
        "policy/clipped_fraction": clipped.sum(dtype=torch.float64),
        "policy/kl_to_old": torch.where(mask, to_old, 0.0).sum(),
        "policy/ratio_mean": raw.sum(),
    }
    maxima = {"policy/ratio_max": raw.max() if raw.numel() else raw.sum()}
    scalars = sums | counts | maxima
    fetched = dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))
    return LossOutputs(loss, *({name: fetched[name] for name in group} for group in (sums, counts, maxima)))
