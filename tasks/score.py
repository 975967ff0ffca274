"""Score: the trainer's log-probabilities of the samples at the weights that generated them, and the mismatch."""

from __future__ import annotations

from typing import Any

from ray import ObjectRef

from tasks.calls import Engines, stopwatch
from tasks.phase_task import phase_task


@phase_task("score")
def score(engines: Engines, batch_ref: ObjectRef, offenders: int) -> dict[str, Any]:
    """Returns `metrics` (mismatch, importance, entropy), `tokens` scored, `logprobs`, a reference, and `offenders`,
    the tokens on which the engines disagree most (`TokenOffence`), at most as many as asked for.
    """
    with stopwatch() as watch:
        refs = engines.trainer.score.options(num_returns=3).remote(batch_ref, offenders)
        metrics_ref, offenders_ref, logprobs_ref = refs
        clock = engines.clock("score_s")
        metrics = engines.answer("score", "trainer", metrics_ref, clock)
        found = engines.answer("score", "trainer", offenders_ref, clock)
    tokens = metrics.pop("tokens")
    return {
        "metrics": metrics | {"time/score_s": watch.seconds},
        "tokens": tokens,
        "logprobs": logprobs_ref,
        "offenders": found,
    }
