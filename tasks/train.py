"""Importance-weighted training on one step's samples."""

from __future__ import annotations

from ray import ObjectRef
from torch import Tensor

from tasks.calls import Engines, stopwatch
from tasks.phase_task import phase_task


@phase_task("train")
def train(engines: Engines, batch_ref: ObjectRef, logprobs_ref: ObjectRef, advantages: Tensor) -> dict[str, float]:
    """Update the policy. Never retried: a repeated optimiser step is another run."""
    with stopwatch() as watch:
        ref = engines.trainer.train.remote(batch_ref, logprobs_ref, advantages)
        metrics: dict[str, float] = engines.answer("train", "trainer", ref, engines.clock("train_s"))
    return metrics | {"time/train_s": watch.seconds}
