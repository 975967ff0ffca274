"""Reward: grade every response with the data's own verifier, and shape what reaches the length limit."""

from __future__ import annotations

from typing import Any

import torch

from conf.schema import Algorithm
from tasks.background_grading import BackgroundGrading
from tasks.calls import stopwatch
from tasks.numerics.overlong import overlong_penalty
from tasks.phase_task import phase_task

_DEFAULT_BUFFER_SHARE = 5
"""Part of the length limit that is the default buffer: DAPO's 4,096 of 20,480 tokens."""


def overlong_buffer(algorithm: Algorithm, limit: int) -> int:
    """Tokens below `limit` in which the overlong penalty rises."""
    return algorithm.overlong.buffer or max(1, limit // _DEFAULT_BUFFER_SHARE)


@phase_task("reward")
def reward(grading: BackgroundGrading, algorithm: Algorithm, length_limit: int) -> dict[str, Any]:
    """Wait for the grades that the rollout did not leave time for; `GraderError` where the verifier cannot be run.

    Returns, all `[groups, group size]`: `rewards` (fp64, the verifier's), `shaped` (fp64, less the overlong
    penalty) and `lengths` (response tokens); counts `timed_out` and `verifier_errors`; `seconds`.
    """
    with stopwatch() as watch:
        grades, tokens = grading.results()
        size = algorithm.group_size
        rewards = torch.tensor([g.score for g in grades], dtype=torch.float64).view(-1, size)
        lengths = torch.tensor(tokens).view(-1, size)
        shaped = rewards
        if algorithm.overlong.penalty > 0:
            buffer = overlong_buffer(algorithm, length_limit)
            shaped = rewards + overlong_penalty(lengths, length_limit, buffer, algorithm.overlong.penalty)
    return {
        "rewards": rewards,
        "shaped": shaped,
        "lengths": lengths,
        "timed_out": sum(g.timed_out for g in grades),
        "verifier_errors": sum(g.error is not None for g in grades),
        "seconds": watch.seconds,
    }
