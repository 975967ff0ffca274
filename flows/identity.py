"""Which run is this: a new one, or one to continue?"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from conf.compose import digest, flatten, shapes_results
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.inputs import input_digests
from infra.store import CheckpointStore, Manifest


@dataclass(frozen=True)
class RunIdentity:
    """Name of the run, and the newest complete checkpoint when it is continued."""

    name: str
    manifest: Manifest | None

    @property
    def start_step(self) -> int:
        """Steps that are done already."""
        return 0 if self.manifest is None else self.manifest.step


def identify(config: RunConfig, store: CheckpointStore) -> RunIdentity:
    """Apply `resume` and `run_name`; `ConfigError` where they cannot be followed."""
    identity = _identify(config, store)
    if identity.start_step > config.steps:
        raise ConfigError(
            [f"steps = {config.steps}: run {identity.name} is at step {identity.start_step}; allowed: no fewer steps"]
        )
    return identity


def _identify(config: RunConfig, store: CheckpointStore) -> RunIdentity:
    if config.resume == "never":
        return RunIdentity(_new_name(config, store), None)
    if config.resume == "auto":
        names = store.runs() if config.run_name is None else (config.run_name,)
        found = [m for m in (store.latest(name) for name in names) if m is not None]
        # A run that was named is the one that is meant, and must fit; otherwise others are none of our business.
        meant = [m for m in found if config.run_name is not None or m.meta["config_digest"] == digest(config)]
        if not meant:
            return RunIdentity(_new_name(config, store), None)
        newest = max(meant, key=lambda m: m.created_at)
        _check_same_config(config, newest)
        return RunIdentity(newest.run, newest)
    named = store.latest(config.resume)
    if named is None:
        known = ", ".join(store.runs()) or "none"
        raise ConfigError([f"resume = {config.resume}: no complete checkpoint at {store.url}; runs there: {known}"])
    _check_same_config(config, named)
    return RunIdentity(named.run, named)


def _new_name(config: RunConfig, store: CheckpointStore) -> str:
    if config.run_name is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        return f"{config.recipe.name}-s{config.seed}-{stamp}-{secrets.token_hex(2)}"
    folder = Path(config.runs_dir) / config.run_name
    if store.latest(config.run_name) is not None:
        raise ConfigError(
            [f"run_name = {config.run_name}: this run exists; allowed: a new name, or resume={config.run_name}"]
        )
    if folder.exists() and not (folder / "journal.jsonl").is_file():
        raise ConfigError([f"run_name = {config.run_name}: {folder} exists and is no run; allowed: another name"])
    return config.run_name


def _check_same_config(config: RunConfig, manifest: Manifest) -> None:
    """A continued run keeps every key that shapes its results."""
    before = _shaping(manifest.meta["config"]) | manifest.meta["inputs"]
    now = _shaping(flatten(config)) | input_digests(config)
    changed = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(
            [f"resume = {manifest.run}: inputs changed ({'; '.join(changed)}); allowed: the run's own values"]
        )


def _shaping(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that shape results, as the digest takes them."""
    return {key: value for key, value in flat.items() if shapes_results(key)}


BF16_SINCE = "bf16_rollout_since"
"""Key of a checkpoint's meta, and tag of an MLflow run."""


def checkpoint_meta(
    config: RunConfig,
    mlflow_run_id: str | None,
    model_dir: str,
    inputs: Mapping[str, str],
    drawn: int,
    bf16_since: int | None = None,
) -> dict[str, Any]:
    """What a resume must know beside the engine's state; `inputs` as `input_digests` gave them at the start.

    `drawn`: prompts that were drawn up to here, the data cursor; `bf16_since`: the step after which a breaker had the
    rollout go on in BF16.
    """
    return {
        "config_digest": digest(config),
        "config": flatten(config),
        "inputs": dict(inputs),
        "mlflow_run_id": mlflow_run_id,
        "prompts_drawn": drawn,
        "model_dir": model_dir,
        BF16_SINCE: bf16_since,
    }
