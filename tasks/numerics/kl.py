"""KL divergence of the policy to a frozen reference, estimated from the sampled tokens.

x = log ref - log pi of a sampled token, clamped to +-20. The estimators of KL(pi || ref) are k1 = -x,
k2 = x^2 / 2 and k3 = e^x - 1 - x (Schulman, 2020, http://joschu.net/blog/kl-approx.html). Over tokens drawn from pi
the means of k1 and k3 are the KL exactly, that of k2 is not.

An estimator of the KL is not yet an estimator of its gradient: differentiating it as it stands leaves out that
the distribution of the samples moves too. Over tokens drawn from pi, the expected gradient is

            pathwise                      unbiased
    k1      0                             that of KL(pi || ref)
    k2      that of KL(pi || ref)         that of E[x^2] / 2
    k3      that of KL(ref || pi)         that of KL(pi || ref)

Both are gradients at the visited prefixes: how a token changes which prefixes come later is left out, as in the
objectives that use these terms.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tasks.numerics.mismatch import CLAMP, k3

KlEstimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["unbiased", "pathwise"]


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate of each token, nats, shape and dtype of `logprobs`; 0 where `mask` is false.

    `logprobs` (pi), `reference` and `mask` (bool) share one shape. Differentiable in pi; the clamp stops the
    gradient where |x| > 20.
    """
    return _estimate(_log_ratio(logprobs, reference, mask), estimator)


def kl_term(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    estimator: KlEstimator,
    gradient: KlGradient,
    sampling_weight: Tensor,
) -> Tensor:
    """The KL's term of each token in a loss, shape and dtype of `logprobs`; 0 where `mask` is false.

    `pathwise`: `kl_estimate` with its own gradient (k3: DeepSeekMath, Shao et al., 2024, arXiv 2402.03300);
    `sampling_weight` is not used.

    `unbiased`: value v k, gradient v (k grad log pi + grad k), with v = `sampling_weight` detached, the ratio of
    pi to the distribution that drew the tokens (importance weight of the rollout times pi / p). This is the
    gradient of v k e^(log pi - sg(log pi)) (DeepSeek-V3.2, 2025, arXiv 2512.02556, has k3 so). Truncated
    weights leave a bias of their own.
    """
    if gradient == "pathwise":
        return kl_estimate(logprobs, reference, mask, estimator)
    x = _log_ratio(logprobs.detach(), reference, mask)
    visible = torch.where(mask, logprobs, 0.0)
    surplus = visible - visible.detach()
    weight = torch.where(mask, sampling_weight.detach(), 0.0).to(logprobs.dtype)
    return weight * (_estimate(x, estimator) + _slope(x, estimator) * surplus)


def _log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    visible = torch.where(mask, logprobs, 0.0)
    return (torch.where(mask, reference.detach(), 0.0).to(visible.dtype) - visible).clamp(-CLAMP, CLAMP)


def _estimate(x: Tensor, estimator: KlEstimator) -> Tensor:
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x * x / 2
    return k3(x)


def _slope(x: Tensor, estimator: KlEstimator) -> Tensor:
    """k + dk / d(log pi), with dx = -d(log pi), in closed form.

    For k3 the exponentials of the two parts cancel. Left to autograd they would cancel in floating point only,
    and not at all where the clamp holds: there e^20 would push pi away from a reference far above it.
    """
    if estimator == "k1":
        return 1 - x
    if estimator == "k2":
        return x * x / 2 - x
    return -x
