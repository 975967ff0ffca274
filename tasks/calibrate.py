"""Calibration: new Q/K/V scales from the updated weights on this step's prompts and responses."""

from __future__ import annotations

from prefect import task
from ray import ObjectRef

from conf.schema import Calibration
from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait


@task(name="calibrate", **TASK_OPTIONS)
def calibrate(engines: Engines, batch_ref: ObjectRef, policy: Calibration) -> dict[str, float]:
    """Returns `calibration/*` and `time/calibrate_s`; without calibration only a time of 0."""
    if not policy.enabled:
        return {"time/calibrate_s": 0.0}
    with stopwatch() as watch:
        ref = engines.trainer.calibrate_on_batch.remote(batch_ref, policy.max_sequences)
        metrics: dict[str, float] = wait("calibrate", ref)
    return metrics | {"time/calibrate_s": watch.seconds}
