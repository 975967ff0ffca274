"""Checkpoint: the trainer's state, the journal and what a resume must know, published as one whole."""

from __future__ import annotations

from typing import Any

from infra.store import CheckpointStore
from tasks.calls import Engines, stopwatch
from tasks.phase_task import phase_task


@phase_task("checkpoint")
def checkpoint(
    engines: Engines,
    target: tuple[str, dict[str, Any]],
    run: str,
    step: int,
    files: dict[str, bytes],
    meta: dict[str, Any],
    keep_last: int,
) -> dict[str, float]:
    """Publish the engine's state and `files` to `target` (url, options) from the trainer's own process, then prune.

    Returns `time/checkpoint_s`.
    """
    with stopwatch() as watch:
        ref = engines.trainer.save.remote(target, run, step, files, meta)
        engines.answer("checkpoint", "trainer", ref, engines.clock("checkpoint_s"))
        CheckpointStore(*target).prune(run, keep_last)
    return {"time/checkpoint_s": watch.seconds}
