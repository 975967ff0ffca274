"""Calibration: new Q/K/V scales from the updated weights on this step's prompts and responses."""

from __future__ import annotations

from ray import ObjectRef

from conf.schema import Calibration
from tasks.calls import Engines, stopwatch
from tasks.phase_task import phase_task


@phase_task("calibrate")
def calibrate(engines: Engines, batch_ref: ObjectRef, policy: Calibration) -> dict[str, float]:
    """Returns `calibration/*` and `time/calibrate_s`; only a time of 0 where no step calibrates."""
    if not policy.enabled or policy.refresh != "step":
        return {"time/calibrate_s": 0.0}
    with stopwatch() as watch:
        ref = engines.trainer.calibrate_on_batch.remote(batch_ref, policy.max_sequences)
        clock = engines.clock("calibrate_s")
        metrics: dict[str, float] = engines.answer("calibrate", "trainer", ref, clock)
    return metrics | {"time/calibrate_s": watch.seconds}
