"""Score: the trainer's log-probabilities of the samples at the weights that generated them, and the mismatch."""

from __future__ import annotations

from typing import Any

from prefect import task
from ray import ObjectRef

from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait


@task(name="score", **TASK_OPTIONS)
def score(engines: Engines, batch_ref: ObjectRef) -> dict[str, Any]:
    """Returns `metrics` (mismatch, importance, entropy), `tokens` scored and `logprobs`, a reference."""
    with stopwatch() as watch:
        metrics_ref, logprobs_ref = engines.trainer.score.options(num_returns=2).remote(batch_ref)
        metrics = wait("score", metrics_ref)
    tokens = metrics.pop("tokens")
    return {"metrics": metrics | {"time/score_s": watch.seconds}, "tokens": tokens, "logprobs": logprobs_ref}
