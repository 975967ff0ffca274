"""What an evaluation of a checkpoint computes with: the run's own configuration, with another recipe or keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.compose import CONFIG_DIR, compose, resolved
from conf.overrides import groups, override_key
from conf.problems import ConfigError, describe_errors
from conf.schema import Recipe, RunConfig
from flows.checkpoints import find_checkpoint
from infra.store import CheckpointStore, Manifest
from infra.store_files import absolute_url

_FROM_HERE = ("cluster", "deadlines", "tracking", "storage", "runs_dir", "benchmark", "sweep")
"""Where this evaluation runs, whatever the run had (it may have been on another machine), and what no run reads."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate: `config` is the run's own but for the rollout side of its recipe and its surroundings.

    `metric`: the name of the result. `calibrates`: the checkpoint has no Q/K/V scales for this recipe.
    """

    config: RunConfig
    manifest: Manifest
    metric: str
    calibrates: bool


def plan_evaluation(run: str, step: int | None, recipe: str, overrides: Sequence[str]) -> Evaluation:
    """Find the checkpoint, and put `recipe` and `overrides` upon the run's own configuration.

    `ConfigError` for an unknown run or step, a model folder that is not here, and what the configuration refuses.
    """
    given = list(overrides)
    here = compose(given if recipe == "own" else [t for t in given if override_key(t) != "recipe"])
    store = CheckpointStore(absolute_url(here.storage.url), dict(here.storage.options))
    manifest = find_checkpoint(store, run, step)
    stored = {k: v for k, v in manifest.meta["config"].items() if k.partition(".")[0] not in _FROM_HERE}
    own = _validated(resolved(here) | unflattened(stored))
    config = _merged(own, here, given)
    details = [text for text in given if override_key(text).startswith("recipe.")]
    chosen = config.recipe if recipe == "own" else compose([f"recipe={recipe}", *details]).recipe
    if not Path(manifest.meta["model_dir"]).is_dir():
        wrong = f"model folder = {manifest.meta['model_dir']}: not on this machine"
        raise ConfigError([f"{wrong}; allowed: the machine that trained, or the folder at the same place"])
    same = _rollout_side(chosen) == _rollout_side(own.recipe)
    merged = own.recipe.model_copy(
        update={key: getattr(chosen, key) for key in ("name", "rollout_linears", "kv", "calibration")}
    )
    config = _validated(resolved(config.model_copy(update={"recipe": own.recipe if same else merged})))
    return Evaluation(config, manifest, _metric(chosen, same), config.recipe.kv.quantized and not same)


def unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested map of a checkpoint's configuration; lists and empty maps, which are JSON text there, come back."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = _plain(value)
    return nested


def _plain(value: Any) -> Any:
    if not isinstance(value, str) or not (value.startswith("[") or value == "{}"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _merged(own: RunConfig, here: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with what `overrides` name."""
    nested, now, options = resolved(own), resolved(here), groups(CONFIG_DIR)
    for key in map(override_key, overrides):
        if key in options:
            nested[key] = now[key]
            continue
        target, source = nested, now
        *sections, name = key.split(".")
        for section in sections:
            target, source = target.setdefault(section, {}), source[section]
        target[name] = source[name]
    return _validated(nested)


def _validated(nested: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError([str(problem) for problem in describe_errors(error)]) from error


def _rollout_side(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.rollout_linears, recipe.kv


def _metric(recipe: Recipe, same: bool) -> str:
    if same:
        return "eval/accuracy"
    return "eval/accuracy" + ("_" + recipe.name if recipe.rollout_linears.quantized or recipe.kv.quantized else "_bf16")
