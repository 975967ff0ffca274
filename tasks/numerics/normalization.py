"""What a loss over tokens is divided by, as one coefficient for each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalization = Literal["token_mean", "sequence_mean", "fixed_length"]


def loss_coefficients(mask: Tensor, mode: Normalization, fixed_length: int | None = None) -> Tensor:
    """Coefficients c with loss = sum(c * loss of the token), fp32 like `mask`, exactly 0 where it is false.

    `mask` `[sequences, tokens]` bool: the tokens that count, of one whole optimiser update. Rows of the result
    then belong to the micro-batches, whose losses add up to the update's. L_i = tokens of sequence i,
    N = their sum, B = sequences with at least one.

    - `token_mean` 1 / N: every token weighs the same (DAPO: Yu et al., 2025, arXiv 2503.14476).
    - `sequence_mean` 1 / (B L_i): every sequence weighs the same (GRPO: Shao et al., 2024, arXiv 2402.03300;
      GSPO: Zheng et al., 2025, arXiv 2507.18071).
    - `fixed_length` 1 / (B `fixed_length`): a constant, so that no token's weight depends on the length of its
      answer (Dr. GRPO: Liu et al., 2025, arXiv 2503.20783). The other modes ignore `fixed_length`.

    An empty mask gives zeros. Raises `ValueError` for another shape or type of mask, an unknown mode, and
    `fixed_length` without a length of at least 1 token.
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"mask must be [sequences, tokens] bool, got {tuple(mask.shape)} {mask.dtype}")
    lengths = mask.sum(1, keepdim=True, dtype=torch.float64)
    sequences = (lengths > 0).sum()
    if mode == "token_mean":
        denominator = lengths.sum()
    elif mode == "sequence_mean":
        denominator = sequences * lengths
    elif mode == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(f"fixed_length = {fixed_length}: allowed are lengths of at least 1 token")
        denominator = sequences.to(torch.float64) * fixed_length
    else:
        raise ValueError(f"mode = {mode!r}: allowed are token_mean, sequence_mean, fixed_length")
    return torch.where(mask, 1 / denominator.clamp(min=1), 0.0).to(torch.float32)
