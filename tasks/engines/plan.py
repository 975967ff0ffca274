"""What a configuration will build, worked out from shapes alone: no weights, no engine, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from conf.schema import LinearPrecision, RunConfig
from tasks.engines.precision_plan import LinearPlan, block_spec, plan_linears
from tasks.engines.tiny_model import tiny_config


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its linear layers by format, and the bytes of its weights."""

    linears: LinearPlan
    weight_bytes: int


@dataclass(frozen=True)
class RunPlan:
    """`kv_bytes_per_token`: cache of one token over all layers; `optimizer_bytes`: fp32 masters and two moments."""

    parameters: int
    layers: int
    rollout: EnginePlan
    training: EnginePlan
    kv_bytes_per_token: int
    optimizer_bytes: int
    optimizer_updates: int


def shape_model(config: RunConfig, model_dir: Path | None = None) -> nn.Module:
    """The model on the meta device: shapes without storage. `model_dir` stands before the configuration's own."""
    folder = model_dir or (Path(config.model.path) if config.model.path else None)
    if folder is not None:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    else:
        assert config.model.architecture is not None
        hf_config = tiny_config(config.model.architecture, eos_token_id=1)
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
    for name, p in model.named_parameters():
        if name in quantized:
            rows, columns = p.shape
            size += p.numel() + 4 * (-(-rows // spec.weight[0])) * (-(-columns // spec.weight[1]))
        else:
            size += 2 * p.numel()
    return EnginePlan(linears, size)


def plan_run(config: RunConfig) -> RunPlan:
    """The plan that `--dry-run` prints; raises `EngineError` for a recipe that does not fit the model."""
    model = shape_model(config)
    hf = model.config
    layers, recipe = int(hf.num_hidden_layers), config.recipe  # type: ignore[union-attr, arg-type]
    heads = int(hf.num_key_value_heads)  # type: ignore[union-attr, arg-type]
    head_dim = int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)  # type: ignore[union-attr, operator]
    parameters = sum(p.numel() for p in model.parameters())
    training = plan_linears(model, recipe.training_linears)
    return RunPlan(
        parameters=parameters,
        layers=layers,
        rollout=_engine_plan(model, recipe.rollout_linears),
        # The trainer keeps a BF16 compute copy whatever its products run in.
        training=EnginePlan(training, 2 * parameters),
        kv_bytes_per_token=2 * layers * heads * head_dim * (1 if recipe.kv.quantized else 2),
        optimizer_bytes=12 * parameters,
        optimizer_updates=config.steps * config.algorithm.updates_per_step,
    )
