"""Scale-sync: weights and Q/K/V scales go from the trainer to the rollout engine, and are read back."""

from __future__ import annotations

from prefect import task

from conf.schema import Cluster, Recipe
from tasks.audit import audit
from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait


@task(name="scale-sync", **TASK_OPTIONS)
def sync(engines: Engines, recipe: Recipe, expected_linears: tuple[str, ...], cluster: Cluster) -> dict[str, float]:
    """Export once, install, read back and audit. Weights go from actor to actor, never through this process.

    Each half ends within twice `cluster.sync_timeout_s`, whatever hangs. Returns `time/sync_s`, its parts, the
    version that the rollout engine now holds, and its memory figures.
    """
    # The trainer's own limit holds for each answer of the rollout engine; this one is for the trainer itself.
    limit = 2 * cluster.sync_timeout_s
    with stopwatch() as watch:
        call = engines.trainer.send_weights
        ref = call.remote(recipe, engines.rollout, cluster.sync_buffer_mb, cluster.sync_timeout_s)
        sent = wait("sync (transfer)", ref, limit)
        report = wait("sync (read-back)", engines.rollout.report.remote(), limit)
        audit(report, sent, recipe, expected_linears)
    return {"time/sync_s": watch.seconds, "version": sent["version"]} | sent["metrics"] | report.memory
