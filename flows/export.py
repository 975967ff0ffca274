"""The command `fp8-grpo export`: a checkpoint of a run's store as a plain Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from conf.problems import ConfigError
from flows.checkpoints import find_checkpoint
from flows.new_folder import check_free, new_folder
from infra.store import CheckpointStore
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
    check_free(destination)
    manifest = find_checkpoint(store, run, step)
    source = model_dir or Path(manifest.meta["model_dir"])
    if not source.is_dir():
        allowed = "--model FOLDER with the model that the run began with"
        raise ConfigError([f"model folder = {source}: not on this machine; allowed: {allowed}"])
    _check_same_model(source, manifest.meta.get("inputs", {}))
    with new_folder(destination) as staging:
        fetched = staging / "checkpoint"
        files = tuple(entry for entry in manifest.files if entry.path.startswith(WEIGHTS))
        store.fetch(manifest.model_copy(update={"files": files}), fetched)
        written = write_folder(rank_files(fetched, WEIGHTS), source, staging / "folder", shard_bytes)
    return manifest.step, written


def _check_same_model(folder: Path, inputs: Mapping[str, str]) -> None:
    """Files that go with the weights are those that the run was given, where it took note of them."""
    for path in companions(folder):
        noted = inputs.get(f"file {path.name}")
        if noted is not None and noted != hashlib.sha256(path.read_bytes()).hexdigest():
            raise ConfigError(
                [f"model folder = {folder}: {path.name} has changed since the run; allowed: --model FOLDER"]
            )
