"""Checkpoints by run and step, as people name them."""

from __future__ import annotations

from conf.problems import ConfigError
from infra.store import CheckpointStore, Manifest


def find_checkpoint(store: CheckpointStore, run: str, step: int | None) -> Manifest:
    """The complete checkpoint of a run at `step`, None for the newest; `ConfigError` where there is none."""
    steps = []
    for manifest in store.complete(run):
        if step is None or manifest.step == step:
            return manifest
        steps.append(manifest.step)
    if not steps:
        known = ", ".join(store.runs()) or "none"
        raise ConfigError([f"run = {run}: no complete checkpoint at {store.url}; runs there: {known}"])
    allowed = ", ".join(map(str, dict.fromkeys(reversed(steps))))
    raise ConfigError([f"step = {step}: run {run} has no complete checkpoint of it at {store.url}; allowed: {allowed}"])
