"""Reward and advantage: grade every response with the data's own verifier, compare within groups."""

from __future__ import annotations

from typing import Any

import torch
from prefect import task
from ray import ObjectRef

from conf.schema import Algorithm
from tasks.calls import TASK_OPTIONS, stopwatch, wait
from tasks.data.examples import Example
from tasks.data.grading import Grader
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import RolloutBatch
from tasks.numerics.advantage import group_advantages, zero_variance


@task(name="reward", **TASK_OPTIONS)
def reward(
    batch_ref: ObjectRef,
    examples: tuple[Example, ...],
    algorithm: Algorithm,
    codec: TextCodec,
    grader: Grader,
) -> dict[str, Any]:
    """Returns `metrics` and `advantages` fp64 `[samples]`."""
    with stopwatch() as watch:
        batch: RolloutBatch = wait("reward", batch_ref)
        size = algorithm.group_size
        items = [(examples[i // size], codec.decode(batch.response(i))) for i in range(len(examples) * size)]
        grades = grader.grade(items)
        rewards = torch.tensor([g.score for g in grades], dtype=torch.float64).view(-1, size)
        advantages = group_advantages(rewards, algorithm.advantage_eps).flatten()
    metrics = {
        "time/reward_s": watch.seconds,
        "reward/mean": float(rewards.mean()),
        "reward/zero_variance_fraction": float(zero_variance(rewards).double().mean()),
        "reward/timed_out": float(sum(g.timed_out for g in grades)),
        "reward/verifier_errors": float(sum(g.error is not None for g in grades)),
    }
    return {"metrics": metrics, "advantages": advantages}
