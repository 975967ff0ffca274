"""Engines by the name that `rollout.engine` and `trainer.engine` select."""

from __future__ import annotations

from pathlib import Path

from conf.schema import Recipe, RunConfig
from tasks.engines.protocols import RolloutEngine, TrainerEngine


def build_rollout(config: RunConfig, recipe: Recipe, model_dir: Path) -> RolloutEngine:
    """The configured rollout engine for `recipe` (which may differ from the run's, as for a BF16 evaluation)."""
    from tasks.engines.torch_rollout import TorchRolloutEngine

    builders = {"torch": TorchRolloutEngine}
    return builders[config.rollout.engine](model_dir, recipe, config.rollout)


def build_trainer(config: RunConfig, model_dir: Path) -> TrainerEngine:
    """The configured trainer engine."""
    from tasks.engines.torch_trainer import TorchTrainerEngine, TrainerSpec

    spec = TrainerSpec(config.recipe, config.algorithm, config.correction, config.trainer, config.rollout)
    builders = {"torch": TorchTrainerEngine}
    return builders[config.trainer.engine](model_dir, spec)
