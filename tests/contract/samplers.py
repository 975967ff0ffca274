"""How each engine turns a seed and a distribution into a token: which tokens a draw allows, up to rounding.

Written from the description of the samplers, on an independent distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tasks.numerics.logprobs import uniforms

Sampler = Callable[[int, int, Tensor], Tensor]
"""From (seed, position in the response, log-probabilities fp64 `[vocabulary]`) to the tokens that a draw allows."""

CDF_EDGE = 0.01
"""Distance from a border of the cumulative distribution, within which BF16 sums in another order may fall
on the other side: the last bit of a BF16 logit near 2 is 2^-7, that is 0.8% of a token's probability."""

RACE_EDGE = 0.1
"""Distance in nats within which a race may be lost: a few last bits of BF16 logits near 4, 2^-6 each."""


def inverse_cdf(seed: int, position: int, logprobs: Tensor) -> Tensor:
    """The token in whose stretch of the cumulative distribution the uniform number of this position lies."""
    draw = float(uniforms([seed], position + 1)[0, position])
    above = logprobs.exp().cumsum(-1)
    below = above - logprobs.exp()
    return (below - CDF_EDGE < draw) & (draw < above + CDF_EDGE)


def exponential_race(seed: int, position: int, logprobs: Tensor) -> Tensor:
    """The token with the largest p / e, where e are exponential numbers of torch's generator, fp32, one a token."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(position + 1):
        noise = torch.empty(logprobs.shape[-1]).exponential_(generator=generator)
    score = logprobs - noise.double().log()
    return score > score.max() - RACE_EDGE
