"""The command `fp8-grpo export`: a checkpoint of a run's store as a plain Hugging Face folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from conf.problems import ConfigError
from infra.durable import sync_folder, sync_tree
from infra.store import CheckpointStore, Manifest
from tasks.engines.hf_folder import SHARD_BYTES, WrittenFolder, companions, write_folder
from tasks.engines.tensor_files import rank_files
from tasks.engines.trainer_state import WEIGHTS


def export_run(
    store: CheckpointStore,
    run: str,
    destination: Path,
    step: int | None = None,
    model_dir: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, WrittenFolder]:
    """Write the weights of a run's checkpoint of `step` (None: the newest) to `destination`; returns the step.

    Only the weights are fetched, each file verified by its sha256 before anything reads it. `model_dir` stands before
    the folder that the run had its model from. `destination` is absent or empty and comes into being whole: on an error
    it stays as it was. `ConfigError` for an unknown run or step, a destination that is in use, and a model folder that
    is not there or no longer the run's; `StoreError` for a store that does not answer or damaged files; `EngineError`
    for a model that the weights are not of.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError([f"destination = {destination}: not empty; allowed: an empty folder, or a path that is free"])
    if destination.is_symlink() or destination.is_mount():
        # It comes into being by a rename, which can replace neither.
        what = "a link" if destination.is_symlink() else "a mount point"
        raise ConfigError([f"destination = {destination}: {what}; allowed: a folder below it, or a path that is free"])
    manifest = find_checkpoint(store, run, step)
    source = model_dir or Path(manifest.meta["model_dir"])
    if not source.is_dir():
        allowed = "--model FOLDER with the model that the run began with"
        raise ConfigError([f"model folder = {source}: not on this machine; allowed: {allowed}"])
    _check_same_model(source, manifest.meta.get("inputs", {}))
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.parent / f".{destination.name}-{uuid4().hex}.part"
    staging.mkdir()
    try:
        fetched, folder = staging / "checkpoint", staging / "folder"
        files = tuple(entry for entry in manifest.files if entry.path.startswith(WEIGHTS))
        store.fetch(manifest.model_copy(update={"files": files}), fetched)
        written = write_folder(rank_files(fetched, WEIGHTS), source, folder, shard_bytes)
        sync_tree(folder)
        os.replace(folder, destination)
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest.step, written


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


def _check_same_model(folder: Path, inputs: Mapping[str, str]) -> None:
    """Files that go with the weights are those that the run was given, where it took note of them."""
    for path in companions(folder):
        noted = inputs.get(f"file {path.name}")
        if noted is not None and noted != hashlib.sha256(path.read_bytes()).hexdigest():
            raise ConfigError(
                [f"model folder = {folder}: {path.name} has changed since the run; allowed: --model FOLDER"]
            )
