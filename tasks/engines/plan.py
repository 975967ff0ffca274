"""What a configuration will build, worked out from shapes alone: no weights, no engine, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from conf.schema import LinearPrecision, MegatronTrainer, RunConfig
from tasks.engines.checkpoint_names import check_dense, checkpoint_parameters
from tasks.engines.memory_plan import RankMemory, stage_ranks
from tasks.engines.optimizer_memory import optimizer_bytes
from tasks.engines.precision_plan import LinearPlan, block_spec, plan_linears
from tasks.engines.protocols import EngineError
from tasks.engines.tiny_model import tiny_config


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its linear layers by format, and the bytes of its weights."""

    linears: LinearPlan
    weight_bytes: int


@dataclass(frozen=True)
class RunPlan:
    """`kv_bytes_per_token`: cache of one token over all layers.

    `optimizer_bytes`: fp32 masters (if any), moments and Kahan compensation; `gradient_bytes`: fp32 accumulators;
    `reference_bytes`: the frozen BF16 policy of a KL term. `rank_memory`: the fullest rank of a Megatron trainer.
    `trainer_bytes`: what all ranks of the trainer together hold throughout, activations apart.
    """

    parameters: int
    layers: int
    rollout: EnginePlan
    training: EnginePlan
    kv_bytes_per_token: int
    optimizer_bytes: int
    gradient_bytes: int
    reference_bytes: int
    optimizer_updates: int
    rank_memory: RankMemory | None
    trainer_bytes: int


def shape_model(config: RunConfig, model_dir: Path | None = None) -> nn.Module:
    """The model on the meta device: shapes without storage. `model_dir` stands before the configuration's own."""
    folder = model_dir or (Path(config.model.path) if config.model.path else None)
    if folder is not None:
        return folder_shape(folder)
    assert config.model.architecture is not None
    return _on_meta(tiny_config(config.model.architecture, eos_token_id=1))


def folder_shape(folder: Path) -> nn.Module:
    """The model of a Hugging Face folder on the meta device; `EngineError` for one that cannot be built."""
    try:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise EngineError(f"{folder}/config.json: transformers cannot build this model: {error}") from error
    return _on_meta(hf_config)


def _on_meta(hf_config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    return model


def rollout_linears(config: RunConfig, model_dir: Path) -> tuple[str, ...]:
    """Names that the recipe quantises in the rollout engine; what the audit holds the engine to."""
    return plan_linears(shape_model(config, model_dir), config.recipe.rollout_linears).quantized


def _engine_plan(model: nn.Module, precision: LinearPrecision) -> EnginePlan:
    linears, spec = plan_linears(model, precision), block_spec(precision)
    quantized = {f"{name}.weight" for name in linears.quantized}
    size = 0
    for name, p in checkpoint_parameters(model).items():
        if name in quantized:
            size += spec.weight_format.nbytes(tuple(p.shape))
        else:
            size += 2 * p.numel()
    return EnginePlan(linears, size)


@dataclass(frozen=True)
class _AttentionShape:
    layers: int
    kv_heads: int
    head_dim: int


def _attention_shape(model: nn.Module) -> _AttentionShape:
    """Read from the model's own modules; `EngineError` for attention that the torch engines do not know."""
    hf: Any = model.config
    kind = getattr(hf, "model_type", "unknown")
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]
    layers, heads = getattr(hf, "num_hidden_layers", None), getattr(hf, "num_attention_heads", None)
    if layers is None or heads is None or len(found) != layers:
        raise EngineError(
            f"model type {kind} is not supported: every decoder layer needs attention with q_proj, k_proj and v_proj "
            "(Qwen, Llama, Mistral and their like)"
        )
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    return _AttentionShape(int(layers), int(kv_heads), int(head_dim))


def _stage_ranks(config: RunConfig, model: nn.Module, quantized: tuple[str, ...]) -> tuple[RankMemory, ...]:
    """None for a trainer without ranks."""
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainer):
        return ()
    return stage_ranks(model, trainer, frozenset(quantized), reference=config.algorithm.kl_coef > 0)


def plan_run(config: RunConfig) -> RunPlan:
    """The plan that `--dry-run` prints; raises `EngineError` for a recipe that does not fit the model."""
    model = shape_model(config)
    if "torch" in (config.rollout.engine, config.trainer.engine):
        check_dense(model, Path(config.model.path) if config.model.path else None)
    recipe, shape = config.recipe, _attention_shape(model)
    parameters = sum(p.numel() for p in model.parameters())
    training = plan_linears(model, recipe.training_linears)
    optimizer = optimizer_bytes([p.shape for p in model.parameters()], config.trainer.optimizer)
    reference = 2 * parameters if config.algorithm.kl_coef > 0 else 0
    stages = _stage_ranks(config, model, training.quantized)
    held = 2 * parameters + optimizer.master + optimizer.state + optimizer.gradients + reference
    return RunPlan(
        parameters=parameters,
        layers=shape.layers,
        rollout=_engine_plan(model, recipe.rollout_linears),
        # The trainer keeps a BF16 compute copy whatever its products run in.
        training=EnginePlan(training, 2 * parameters),
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * (1 if recipe.kv.quantized else 2),
        optimizer_bytes=optimizer.master + optimizer.state,
        gradient_bytes=optimizer.gradients,
        reference_bytes=reference,
        optimizer_updates=config.steps * config.algorithm.updates_per_step,
        rank_memory=max(stages, key=lambda rank: rank.total, default=None),
        trainer_bytes=sum(rank.held for rank in stages) * config.trainer.ranks // len(stages) if stages else held,
    )
