"""Checks of a valid configuration against the machine: folders, files, and the names that a library knows."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from conf.problems import ConfigError, nearest_word
from conf.schema.base import Problem
from conf.schema.data import JsonlData, ReasoningGymData
from conf.schema.megatron import folder_sizes, split_problems
from conf.schema.model import PREPARED_NAMES
from conf.schema.run import RunConfig, kept_layer_problems
from conf.schema.trainers import MegatronTrainer

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_INDEX: Final = "model.safetensors.index.json"
_MODEL_FOLDER: Final = f"a folder with config.json, a tokenizer ({', '.join(_TOKENIZER_FILES)}) and *.safetensors"
_TASK_LIST: Final = "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
_LATENT: Final = (
    "no engine here runs multi-head latent attention: it has no k_proj and v_proj that a sync could name, and its "
    "cache holds one latent vector where FP8 scales are for K and for V"
)
# What the data source itself decides.
_RESERVED: Final = {
    "size": "is data.pool_size here",
    "seed": "is fixed, so that all runs share one split",
}


def preflight(config: RunConfig, data: bool = True, trains: bool = True) -> None:
    """Check what only this machine can answer: reads small files, imports reasoning_gym if the data needs it.

    `data`: whether the prompts and their verifier are used at all; `trains`: whether the trainer will be built here (a
    plan is worked out without).

    Raises:
        ConfigError: with one line for every problem found.
    """
    problems = [*model_problems(config), *(_data_problems(config) if data else ()), *_engine_problems(config)]
    problems += _trainer_problems(config) if trains else ()
    if problems:
        raise ConfigError([str(problem) for problem in problems])


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """What stands against the model: attention that no engine runs, or a folder that is not there or not whole."""
    path, architecture = config.model.path, config.model.architecture
    if architecture is not None and architecture.latent_attention is not None:
        value = architecture.latent_attention.model_dump()
        yield Problem("model.architecture.latent_attention", value, _LATENT, "null: another model")
    if path is None:
        return
    folder = Path(path)
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "does not exist"
        made = f", as `fp8-grpo prepare model={config.model.name}` writes it"
        hint = made if config.model.name in PREPARED_NAMES else ""
        yield Problem("model.path", path, wrong, _MODEL_FOLDER + hint)
        return
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer file")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        yield Problem("model.path", path, f"lacks {', '.join(missing)}", _MODEL_FOLDER)
    try:
        yield from _content_problems(config, folder)
    except (OSError, ValueError) as error:
        yield Problem("model.path", path, f"cannot be read: {error}", _MODEL_FOLDER)


def _content_problems(config: RunConfig, folder: Path) -> Iterator[Problem]:
    """Shards that the index names, and layers that the recipe counts. JSON errors are ValueErrors."""
    index = folder / _INDEX
    if index.is_file():
        shards = sorted(set(_read_object(index).get("weight_map", {}).values()))
        absent = [name for name in shards if not (folder / name).is_file()]
        if absent:
            yield Problem("model.path", str(folder), f"lacks {', '.join(absent)}, named by {_INDEX}", _MODEL_FOLDER)
    if (folder / "config.json").is_file():
        model = _read_object(folder / "config.json")
        layers, sizes = model.get("num_hidden_layers"), folder_sizes(model)
        if isinstance(layers, int):
            yield from kept_layer_problems(config.recipe, layers)
        if model.get("kv_lora_rank"):
            yield Problem("model.path", str(folder), f"config.json has kv_lora_rank: {_LATENT}", "another model")
        elif isinstance(config.trainer, MegatronTrainer) and sizes is not None:
            yield from split_problems(config.trainer, config.recipe.training_linears, sizes, f"{folder}/config.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return content


def works_here(config: RunConfig) -> bool:
    """Whether the actors run in this very environment: on a local cluster without an executable of their own."""
    return config.cluster.kind == "local" and config.cluster.worker_python is None


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.engine == "vllm" and works_here(config) and find_spec("vllm") is None:
        allowed = (
            "torch here, or cluster.worker_python of an environment with vLLM, which comes with the extra gpu or "
            "engines-cpu (make setup-engines builds .venv-engines)"
        )
        yield Problem("rollout.engine", "vllm", "vLLM is not installed in this environment", allowed)


def _trainer_problems(config: RunConfig) -> Iterator[Problem]:
    """As `_engine_problems`, of the engine that trains."""
    if config.trainer.engine == "megatron" and works_here(config) and find_spec("megatron") is None:
        allowed = (
            "torch here, or cluster.worker_python of an environment with Megatron Core, which comes with the extra gpu "
            "or engines-cpu (make setup-engines builds .venv-engines)"
        )
        yield Problem("trainer.engine", "megatron", "Megatron Core is not installed in this environment", allowed)


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if isinstance(data, JsonlData):
        path = Path(data.path)
        if not path.is_file():
            wrong = "not a file" if path.exists() else "no such file"
            yield Problem("data.path", data.path, wrong, "a readable file with one JSON object a line")
    elif isinstance(data, ReasoningGymData):
        yield from _task_problems(data)


def _task_problems(data: ReasoningGymData) -> Iterator[Problem]:
    # Imported late: it takes a second, and JSONL data does not need it.
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    if data.task not in datasets:
        yield Problem(
            "data.task",
            data.task,
            "reasoning-gym has no such task",
            f"one of its {len(datasets)} tasks, listed at {_TASK_LIST}",
            nearest_word(data.task, list(datasets)),
        )
        return
    config_class = datasets[data.task][1]
    names = [field.name for field in dataclasses.fields(config_class) if field.init and field.name not in _RESERVED]
    unknown = [
        Problem(
            f"data.parameters.{name}",
            value,
            _RESERVED.get(name, f"the task {data.task} has no such parameter"),
            f"{', '.join(names) or 'none'} ('~data.parameters' drops those of another task)",
            nearest_word(name, names),
        )
        for name, value in data.parameters.items()
        if name not in names
    ]
    yield from unknown
    if unknown:
        return
    try:
        task_config = config_class(**data.parameters)
        if hasattr(task_config, "validate"):
            task_config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        yield Problem(
            "data.parameters",
            dict(data.parameters),
            f"refused by the task {data.task}: {error}",
            "see the task's own rules in reasoning-gym",
        )
