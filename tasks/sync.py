"""Scale-sync: weights and Q/K/V scales go from the trainer to the rollout engine, and are read back."""

from __future__ import annotations

from typing import Any

from conf.schema import Cluster, Recipe
from tasks.audit import audit
from tasks.calls import Engines, stopwatch
from tasks.phase_task import phase_task


@phase_task("scale-sync")
def sync(engines: Engines, recipe: Recipe, expected_linears: tuple[str, ...], cluster: Cluster) -> dict[str, Any]:
    """Export once, install, read back and audit. Weights go from actor to actor, never through this process.

    Each half ends within twice `deadlines.sync_s`, whatever hangs. Returns `time/sync_s`, its parts, the
    version that the rollout engine now holds, its memory figures, and `scales`, those of Q, K and V that were sent.
    """
    with stopwatch() as watch:
        call = engines.trainer.send_weights
        # The trainer's own limit holds for each answer of the rollout engine; this one is for the trainer itself.
        clock = engines.clock("sync_s", times=2)
        ref = call.remote(recipe, engines.rollout, cluster.sync_buffer_mb, engines.deadlines)
        sent = engines.answer("sync (transfer)", "trainer", ref, clock)
        clock = engines.clock("sync_s", times=2)
        report = engines.answer("sync (read-back)", "rollout", engines.rollout.report.remote(), clock)
        audit(report, sent, recipe, expected_linears)
    held = {"version": sent["version"], "scales": sent["scales"]}
    return {"time/sync_s": watch.seconds} | held | sent["metrics"] | report.memory
