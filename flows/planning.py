"""`--dry-run`: the resolved configuration and what it would build."""

from __future__ import annotations

from collections import Counter

import yaml

from conf.compose import digest, resolved
from conf.schema import LinearPrecision, RunConfig
from tasks.engines.plan import EnginePlan, RunPlan


def describe(config: RunConfig, plan: RunPlan) -> str:
    """Resolved configuration (YAML) and plan, as text."""
    recipe, a = config.recipe, config.algorithm
    kv = f"{recipe.kv.dtype}, query {'e4m3' if recipe.kv.quantize_query else 'bf16'}"
    scales = f"calibrated each step, margin {recipe.calibration.margin}" if recipe.calibration.enabled else "none"
    lines = [
        yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True).rstrip(),
        "",
        "Plan",
        f"  model            {config.model.name}: {plan.parameters:,} parameters, {plan.layers} layers",
        f"  rollout engine   {config.rollout.engine}: {_linears(plan.rollout, recipe.rollout_linears)}",
        f"  KV cache         {kv}; scales {scales}; {plan.kv_bytes_per_token:,} bytes a token",
        f"  trainer engine   {config.trainer.engine}: {_linears(plan.training, recipe.training_linears)}",
        f"  correction       {config.correction.name}, cap {config.correction.cap}",
        f"  memory           rollout weights {_mb(plan.rollout.weight_bytes)}, trainer compute copy "
        f"{_mb(plan.training.weight_bytes)}, fp32 masters and AdamW moments {_mb(plan.optimizer_bytes)}",
        f"  work             {config.steps} steps x {a.prompts_per_step} prompts x {a.group_size} samples, "
        f"{plan.optimizer_updates} optimiser updates",
        f"  config digest    {digest(config)}",
        "",
        "Dry run: nothing was started.",
    ]
    return "\n".join(lines)


def _linears(plan: EnginePlan, precision: LinearPrecision) -> str:
    """How many linears of each kind compute in which format, by the last part of their names."""
    if not plan.linears.quantized:
        return f"all {len(plan.linears.kept)} linears bf16"
    kinds = Counter(name.rpartition(".")[2] for name in plan.linears.quantized)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    rows, columns = precision.weight_block
    return (
        f"{len(plan.linears.quantized)} linears {precision.format} ({named}; weights {rows}x{columns}, activations "
        f"1x{precision.activation_group}, {precision.scale} scales); bf16: {', '.join(plan.linears.kept) or 'none'}"
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
