"""Reward shaping for answers that come close to the length limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, penalty: float) -> Tensor:
    """Soft overlong punishment, to be added to the reward (DAPO: Yu et al., 2025, arXiv 2503.14476, eq. 13).

    0 for up to `limit` - `buffer` tokens, from there linearly down to -`penalty` at `limit`, and -`penalty` for
    anything longer. `lengths`: response tokens, integers of any shape; returns fp64 of that shape, in
    reward units. The paper has limit 20480, buffer 4096, penalty 1.

    Raises `ValueError` unless 1 <= buffer <= limit and penalty is finite and >= 0.
    """
    if not 1 <= buffer <= limit:
        raise ValueError(f"buffer = {buffer}: allowed are 1 to limit = {limit} tokens")
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty = {penalty}: allowed are finite numbers >= 0")
    room = (limit - buffer - lengths).clamp(-buffer, 0)
    return room.to(torch.float64) / buffer * penalty
