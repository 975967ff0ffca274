"""Scale-sync: weights and Q/K/V scales go from the trainer to the rollout engine, and are read back."""

from __future__ import annotations

from prefect import task

from conf.schema import Recipe
from tasks.audit import audit
from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait


@task(name="scale-sync", **TASK_OPTIONS)
def sync(engines: Engines, recipe: Recipe, expected_linears: tuple[str, ...]) -> dict[str, float]:
    """Export once, install, read back and audit. The payload passes between the actors by reference.

    Returns `time/sync_s`, the version that the rollout engine now holds, and its memory figures.
    """
    with stopwatch() as watch:
        sent_ref, payload_ref = engines.trainer.export_weights.options(num_returns=2).remote(recipe)
        sent = wait("sync (export)", sent_ref)
        wait("sync (install)", engines.rollout.load_weights.remote(payload_ref))
        report = wait("sync (read-back)", engines.rollout.report.remote())
        audit(report, sent, recipe, expected_linears)
    return {"time/sync_s": watch.seconds, "version": sent["version"]} | report.memory
