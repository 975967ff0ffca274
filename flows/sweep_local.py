"""Runs of a sweep on this machine, one after another, within the sweep's allocation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conf.schema import RunConfig
from flows.allocation import Allocation
from flows.sweep_children import ChildLateError, run_here
from flows.sweep_plan import Child
from flows.sweep_report import sweep_folder
from flows.sweep_shared import SharedRuns


class LocalRuns:
    """Each in a process of its own, or all in one (`sweep.children`). A plain class: Prefect walks through dataclasses.

    `used`: what this call has used of its allocation before (seconds).
    """

    def __init__(self, config: RunConfig, sweep_id: str, shared: SharedRuns | None, api_url: str | None, used: float):
        self.sweep_id = sweep_id
        self._config = config
        self._logs = sweep_folder(config, sweep_id) / "logs"
        self._shared = shared
        self._api_url = api_url
        self._allocation = Allocation(config.sweep.allocation_s, used)

    def begins(self) -> bool:
        """Whether there is time for another run to do anything useful."""
        return self._allocation.begins()

    def run(self, child: Child) -> bool:
        """Whether the run is finished; not, where the allocation was used up. `ChildError` when it failed."""
        limit, log, began = self._config.sweep.child_timeout_s, self._logs / f"{child.name}.log", time.time()
        seconds, most = self._allocation.for_a_run, min(limit, self._allocation.until_ended)
        if math.isfinite(seconds):
            child = _within(child, max(seconds, 0.001))
        try:
            if self._shared is not None:
                return self._shared.run(child, log, most)
            return run_here(child, log, most, self._api_url)
        except ChildLateError:
            if most < limit:
                # It did not stop by itself, and goes on from its last checkpoint like one that did.
                return False
            raise
        finally:
            self._allocation.learn(Path(self._config.runs_dir) / child.name / "journal.jsonl", began)


def _within(child: Child, seconds: float) -> Child:
    """The run with so much of an allocation."""
    text = f"{seconds:.3f}"
    config = child.config.model_copy(update={"allocation_s": float(text)})
    return replace(child, overrides=(*child.overrides, f"allocation_s={text}"), config=config)


@contextmanager
def local_runs(
    config: RunConfig, sweep_id: str, flow_run_id: str, api_url: str | None, used: float
) -> Iterator[LocalRuns]:
    """For the runs of a sweep; at the end the process ends that several had in common."""
    if config.sweep.children != "shared":
        yield LocalRuns(config, sweep_id, None, api_url, used)
        return
    log = sweep_folder(config, sweep_id) / "logs" / "shared.log"
    shared = SharedRuns(flow_run_id, config.sweep.kept_engines, log, api_url)
    try:
        yield LocalRuns(config, sweep_id, shared, api_url, used)
    except BaseException:
        shared.close(0.0)
        raise
    shared.close()
