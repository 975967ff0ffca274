"""Log-probabilities of tokens, and sampling that no engine state can influence."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, in fp32.

    `logits` `[..., vocabulary]` in any float dtype, `tokens` `[...]` int64; returns `[...]`, fp32, nats.
    """
    logp = torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature), nats. `[..., vocabulary]` to `[...]`, fp32."""
    logp = torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def sample_seed(run_seed: int, step: int, prompt_id: str, sample: int) -> int:
    """64-bit seed of one sample: SHA-256 of the four values, so that nothing else decides a sample."""
    key = f"{run_seed}/{step}/{prompt_id}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little")


def uniforms(seeds: list[int], count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) for each seed, fp64 `[len(seeds), count]` (Philox counters).

    Row i depends on `seeds[i]` alone, and a longer `count` extends the same sequence.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`.

    `logits` `[batch, vocabulary]`, `uniform` `[batch]` fp64 in [0, 1). Returns tokens `[batch]` int64 and
    their log-probabilities `[batch]` fp32 under exactly the distribution that was sampled.
    """
    probabilities = torch.softmax(logits.to(torch.float64) / temperature, dim=-1)
    cumulative = probabilities.cumsum(-1)
    # Scaling by the total, not assuming 1, keeps the last token reachable under rounding.
    point = uniform.to(cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, token_logprobs(logits, tokens, temperature)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token a row (lowest id on a tie) and its log-probability at temperature 1."""
    tokens = logits.argmax(-1)
    return tokens, token_logprobs(logits, tokens, 1.0)
