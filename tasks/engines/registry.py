"""Engines by the name that `rollout.engine` and `trainer.engine` select."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from conf.schema import KvPrecision, LinearPrecision, MegatronTrainer, Recipe, Rollout, RunConfig, VllmRollout
from tasks.engines.protocols import EngineError, RolloutEngine, TrainerEngine

ROLLOUT_SIDE: Final[Any] = {"rollout_linears": True, "kv": True, "calibration": {"granularity"}}
"""Keys of a recipe by which its rollout engine is built, as pydantic's `include`."""


def high_precision_rollout(recipe: Recipe) -> Recipe:
    """The recipe with a BF16 rollout side and an unchanged training side."""
    return recipe.model_copy(update={"rollout_linears": LinearPrecision(), "kv": KvPrecision()})


def rollout_settings(config: RunConfig, recipe: Recipe) -> Rollout:
    """The run's settings for an engine of `recipe`, which may keep another KV cache than the run's.

    Without an argument that repeats the run's own cache type; and as many tokens fit a cache of fixed size.
    """
    settings = config.rollout
    if not isinstance(settings, VllmRollout) or recipe.kv == config.recipe.kv:
        return settings
    others = {name: value for name, value in settings.engine_args.items() if name != "kv_cache_dtype"}
    budget = settings.kv_cache_memory_bytes
    if budget is not None and config.recipe.kv.quantized and not recipe.kv.quantized:
        budget *= 2
    return settings.model_copy(update={"engine_args": others, "kv_cache_memory_bytes": budget})


def rollout_kind(config: RunConfig, recipe: Recipe, model_dir: Path) -> str:
    """Digest (hex) of all that `build_rollout` builds from: engines of one kind differ in what a sync brings, alone.

    The weights of the folder are not in it: none are loaded.
    """
    described = {
        "settings": rollout_settings(config, recipe).model_dump(mode="json", exclude={"kv_preflight"}),
        "recipe": recipe.model_dump(mode="json", include=ROLLOUT_SIDE),
        "model": str(model_dir.resolve()),
        "files": {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(model_dir.glob("*.json"))},
    }
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def build_rollout(config: RunConfig, recipe: Recipe, model_dir: Path) -> RolloutEngine:
    """The configured rollout engine for `recipe` (which may differ from the run's, as for a BF16 evaluation)."""
    settings = rollout_settings(config, recipe)
    if isinstance(settings, VllmRollout):
        # The environment is made for one of the two; importing vLLM takes seconds.
        try:
            from tasks.engines.vllm_rollout import VllmRolloutEngine
        except ModuleNotFoundError as error:
            raise EngineError(
                f"rollout=vllm needs vLLM in the worker's environment ({error}); it comes with the extra "
                "engines-cpu (CPU) or gpu"
            ) from error
        return VllmRolloutEngine(model_dir, recipe, settings)
    from tasks.engines.torch_rollout import TorchRolloutEngine

    return TorchRolloutEngine(model_dir, recipe, settings)


def build_trainer(config: RunConfig, model_dir: Path, rank: int = 0, rendezvous: str | None = None) -> TrainerEngine:
    """The configured trainer engine; of several ranks this one, which meets the others at `rendezvous` (tcp://...)."""
    if isinstance(config.trainer, MegatronTrainer):
        return _megatron_trainer(config, model_dir, rank, rendezvous)
    from tasks.engines.torch_trainer import TorchTrainerEngine, TrainerSpec

    spec = TrainerSpec(config.recipe, config.algorithm, config.correction, config.trainer, config.rollout)
    return TorchTrainerEngine(model_dir, spec)


def _megatron_trainer(config: RunConfig, model_dir: Path, rank: int, rendezvous: str | None) -> TrainerEngine:
    try:
        build = import_module("tasks.engines.megatron_trainer").build
        trainer: TrainerEngine = build(config, model_dir, rank, rendezvous)
    except ModuleNotFoundError as error:
        raise EngineError(
            f"trainer=megatron needs Megatron Core in the worker's environment ({error}); it comes with the extra "
            "engines-cpu (CPU) or gpu"
        ) from error
    return trainer
