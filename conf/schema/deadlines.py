"""How long a run waits for its engines before it takes them for stuck."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from conf.schema.base import Section

Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
"""At most four months: clocks of the operating system take no arbitrary number."""


class Deadlines(Section):
    """Longest waits for the engines, phase by phase, in seconds.

    An engine that is later ends the run with an error that names the phase, the engine and the key. The defaults are
    for stuck engines, not for slow ones: far above what 8 billion parameters on few GPUs take. Starting the actors has
    `cluster.startup_timeout_s`; an answer that is graded `data.answer_time_limit_s`.
    """

    warm_start_s: Seconds = 14400.0
    """The supervised phase of a model that is built from scratch (> 0, <= 1e7)."""

    build_s: Seconds = 3600.0
    """Building an engine, kernels that it compiles included (> 0, <= 1e7)."""

    restore_s: Seconds = 3600.0
    """Fetching, verifying and loading a checkpoint (> 0, <= 1e7)."""

    sync_s: Seconds = 600.0
    """Each answer of the rollout engine in a sync (> 0, <= 1e7); its halves, transfer and read-back, have it twice."""

    generate_s: Seconds = 7200.0
    """A generation batch of a step, and the discarded one of the bootstrap (> 0, <= 1e7)."""

    score_s: Seconds = 3600.0
    """Scoring a step's samples (> 0, <= 1e7)."""

    train_s: Seconds = 7200.0
    """The updates of a step (> 0, <= 1e7)."""

    calibrate_s: Seconds = 1800.0
    """A calibration (> 0, <= 1e7)."""

    evaluate_s: Seconds = 7200.0
    """The samples of an evaluation (> 0, <= 1e7)."""

    preflight_s: Seconds = 3600.0
    """Each half of the pre-flight: sampling and scoring with a BF16 KV cache, scoring with an FP8 one (> 0, <= 1e7)."""

    checkpoint_s: Seconds = 3600.0
    """Saving all ranks' state to the store (> 0, <= 1e7)."""

    sleep_s: Seconds = 600.0
    """Giving a device's memory back, on either side (> 0, <= 1e7)."""

    @property
    def ranks_s(self) -> float:
        """What no collective of the trainer's ranks may exceed: the longest of the phases that have any."""
        return max(
            self.build_s,
            self.restore_s,
            self.sync_s,
            self.score_s,
            self.train_s,
            self.calibrate_s,
            self.checkpoint_s,
            self.sleep_s,
        )
