"""The model registry: the best checkpoint of each recipe under the alias `champion`, pointing at its manifest."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conf.schema import RunConfig
from flows.comparison import Comparison, RunFigures
from infra.mlflow_read import open_client
from infra.store import CheckpointStore, Manifest
from infra.store_files import absolute_url

CHAMPION = "champion"
ACCURACY_TAG = "eval_accuracy"
_FOLDER = "checkpoint"


def register_champions(uri: str, config: RunConfig, comparison: Comparison) -> dict[str, str]:
    """Register each recipe's best run of the sweep where it beats the champion; returns version by model name.

    A version's source is the artifact folder `checkpoint` of its run, which holds `manifest.json`: the manifest itself
    with the url of the store. Runs without a checkpoint there are passed over.
    """
    if config.sweep.registry is None:
        return {}
    client, registered = open_client(uri), {}
    store = CheckpointStore(absolute_url(config.storage.url), dict(config.storage.options))
    for variant in comparison.variants:
        name = f"{config.sweep.registry}-{config.model.name}-{variant.recipe}"
        runs = [f for f in comparison.runs if f.variant == variant.variant and f.status == "FINISHED"]
        best = max((f for f in runs if f.accuracy_last is not None), key=_accuracy, default=None)
        manifest = None if best is None else store.latest(best.name)
        if best is not None and manifest is not None and _beats(client, name, _accuracy(best)):
            registered[name] = _register(client, name, best, manifest, store.manifest_url(manifest), comparison)
    return registered


def _accuracy(figures: RunFigures) -> float:
    assert figures.accuracy_last is not None
    return figures.accuracy_last


def _beats(client: Any, name: str, accuracy: float) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        champion = client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return True
        raise
    return accuracy > float(champion.tags[ACCURACY_TAG])


def _register(client: Any, name: str, best: RunFigures, manifest: Manifest, place: str, comparison: Comparison) -> str:
    from mlflow.exceptions import MlflowException

    with TemporaryDirectory(prefix="fp8-grpo-champion-") as folder:
        path = Path(folder) / "manifest.json"
        path.write_text(json.dumps({"url": place, "manifest": manifest.model_dump(mode="json")}, indent=1))
        client.log_artifact(best.run_id, str(path), _FOLDER)
    try:
        client.create_registered_model(name, description="Checkpoints of fp8-grpo; a version points at a manifest.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {
        ACCURACY_TAG: repr(_accuracy(best)),
        "manifest": place,
        "step": str(manifest.step),
        "recipe": best.variant,
        "sweep_id": comparison.sweep_id,
    }
    source = f"runs:/{best.run_id}/{_FOLDER}"
    version = client.create_model_version(name, source, best.run_id, tags=tags)
    client.set_registered_model_alias(name, CHAMPION, version.version)
    return str(version.version)
