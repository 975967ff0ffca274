"""The run's record: journal first, MLflow from the journal."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from infra.journal import Entry, Journal
from infra.mlflow_writer import MlflowWriter

log = logging.getLogger(__name__)

PHASES = ("sync", "rollout", "reward", "score", "train", "calibrate")
"""Phases of a step in their order; `time/<phase>_s` add up to `time/step_s`."""

MEASURED = ("time/", "throughput/", "memory/")
"""Prefixes of metrics that are measured on the machine; all others are a function of configuration and seed."""


class Record:
    """Appends results to the journal once; a step that is computed again after a resume is compared instead.

    `replay_differences` names each value that came out otherwise.
    """

    def __init__(self, journal: Journal, writer: MlflowWriter) -> None:
        self.journal = journal
        self.writer = writer
        self.replay_differences: list[str] = []

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Make the values durable, then let MLflow know."""
        before = self.journal.find(kind, step)
        if before is None:
            self.journal.append(kind, step, values)
            self.writer.notify()
        else:
            self._compare(before, values)

    def _compare(self, before: Entry, values: Mapping[str, float]) -> None:
        for key in sorted(before.values.keys() | values.keys()):
            if key.startswith(MEASURED):
                continue
            old, new = before.values.get(key), values.get(key)
            if old != new and not (_is_nan(old) and _is_nan(new)):
                self.replay_differences.append(f"{key} of step {before.step}")
                log.warning("%s of step %d computed again: %s was %s, is %s", before.kind, before.step, key, old, new)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
