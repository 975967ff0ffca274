"""From the installed YAML groups and a list of overrides to one validated, immutable configuration."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from conf import overrides as command_line
from conf.problems import ConfigError, describe_errors
from conf.schema.base import MISSING, Problem
from conf.schema.run import RunConfig

__all__ = ["CONFIG_DIR", "ConfigError", "compose", "digest", "flatten", "resolved", "shapes_results"]

CONFIG_DIR: Final = Path(__file__).resolve().parent
RESULT_NEUTRAL: Final = frozenset(
    {
        "steps",
        "checkpoint_every",
        "resume",
        "run_name",
        "allocation_s",
        "runs_dir",
        "cluster",
        "deadlines",
        "breakers",
        "tracking",
        "storage",
        "benchmark",
        "sweep",
        "rollout.kv_preflight",
        "rollout.sleep_level",
        "trainer.ranks",
        "trainer.tensor_parallel_size",
        "trainer.pipeline_parallel_size",
        "trainer.context_parallel_size",
        "trainer.expert_parallel_size",
        "trainer.tokens_per_micro_batch",
        "trainer.recompute",
        "trainer.distributed_optimizer",
        "trainer.offload",
    }
)
"""Keys, and all below them, that change nothing that a run computes.

Breakers judge what was computed; that one had the rollout go on in BF16 is a fact of the checkpoint. Keys of the
trainer say where and in what order the same sums are computed: a run that goes on in another layout is the same run up
to rounding. Threads are not among them, since with equal ones a run on one CPU rank repeats to the bit; nor is the
device, which decides what is quantised.
"""
_MISSING_MARK: Final = "???"
_REPLACED_BY_PATH: Final = ("model.architecture", "model.warm_start")
# Hydra keeps its state in a process-wide singleton.
_HYDRA_LOCK: Final = threading.Lock()


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the groups with `overrides` (`group=option`, `key=value`) and validate the result.

    Safe from several threads. null stays null.

    Raises:
        ConfigError: with one line for every problem found.
    """
    with _HYDRA_LOCK:
        checked = command_line.check(overrides, CONFIG_DIR)
        try:
            raw = _compose_with_hydra(checked.accepted)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError((*checked.refused, _in_a_line(error, checked.values))) from error
    refused = [*checked.refused, *(str(problem) for problem in _without_effect(checked.values, raw))]
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError((*refused, *(str(problem) for problem in describe_errors(error)))) from error
    if refused:
        raise ConfigError(refused)
    return config


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain JSON values; `RunConfig.model_validate` takes it back."""
    return config.model_dump(mode="json")


def flatten(config: RunConfig) -> dict[str, str | int | float | bool | None]:
    """Dotted keys and scalar values, in the order of the schema; lists and empty maps are JSON text."""
    return dict(_flat(resolved(config)))


def digest(config: RunConfig) -> str:
    """SHA-256 (hex) over the canonical JSON of what shapes a run's results.

    RESULT_NEUTRAL is left out: how far the run goes, its name and place, saves, surroundings, checks at its start, and
    how Megatron's ranks share the work.
    """
    text = json.dumps(
        _shaping(resolved(config)), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def shapes_results(key: str) -> bool:
    """Whether a dotted key can change what a run computes."""
    return not any(key == neutral or key.startswith(f"{neutral}.") for neutral in RESULT_NEUTRAL)


def _shaping(value: Any, key: str = "") -> Any:
    """The map without what is neutral at any depth."""
    if not isinstance(value, dict):
        return value
    dotted = {name: f"{key}.{name}" if key else name for name in value}
    return {name: _shaping(item, dotted[name]) for name, item in value.items() if shapes_results(dotted[name])}


def _compose_with_hydra(overrides: Sequence[str]) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIG_DIR), job_name="fp8-grpo", version_base="1.3"):
        composed = hydra.compose("config", list(overrides))
    plain = OmegaConf.to_container(composed, resolve=True)
    return dict(_without_missing(plain))


def _without_missing(value: Any) -> Any:
    """Drop what is still `???`, so that the schema reports it as required."""
    if isinstance(value, dict):
        return {key: _without_missing(item) for key, item in value.items() if item != _MISSING_MARK}
    return value


def _without_effect(values: Mapping[str, object], raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Overrides of a model built from scratch beside `model.path`, which replaces it."""
    model = raw.get("model")
    if not isinstance(model, Mapping) or model.get("path") is None:
        return
    for key, value in values.items():
        if value is not None and key.startswith(_REPLACED_BY_PATH):
            yield Problem(key, value, f"has no effect beside model.path {model['path']}", "leaving one of them out")


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str | int | float | bool | None]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else name)
    elif isinstance(value, dict | list):
        yield key, json.dumps(value, ensure_ascii=False)
    else:
        yield key, value


def _in_a_line(error: Exception, values: Mapping[str, object]) -> str:
    """What Hydra or OmegaConf says of an override that parses and yet cannot be applied."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return str(error).splitlines()[0]
    key, reason = str(cause.full_key), str(cause).splitlines()[0]
    value = values.get(key.replace("[", ".").replace("]", ""), MISSING)
    return str(Problem(key, value, reason, "a plain value, or ${key} of an existing key"))
