"""`--dry-run`: the resolved configuration and what it would build."""

from __future__ import annotations

from collections import Counter

import yaml

from conf.compose import digest, resolved
from conf.schema import Algorithm, Correction, LinearPrecision, Optimizer, RunConfig
from tasks.engines.plan import EnginePlan, RunPlan
from tasks.engines.precision_plan import block_spec


def describe(config: RunConfig, plan: RunPlan) -> str:
    """Resolved configuration (YAML) and plan, as text."""
    recipe, a, optimizer = config.recipe, config.algorithm, config.trainer.optimizer
    kv = f"{recipe.kv.dtype}, query {'e4m3' if recipe.kv.quantize_query else 'bf16'}"
    calibration = recipe.calibration
    scales = f"a {calibration.granularity}, calibrated each step, margin {calibration.margin}"
    scales = scales if calibration.enabled else "none"
    lines = [
        yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True).rstrip(),
        "",
        "Plan",
        f"  model            {config.model.name}: {plan.parameters:,} parameters, {plan.layers} layers",
        f"  rollout engine   {config.rollout.engine}: {_linears(plan.rollout, recipe.rollout_linears)}",
        f"  KV cache         {kv}; scales {scales}; {plan.kv_bytes_per_token:,} bytes a token",
        f"  trainer engine   {config.trainer.engine}: {_linears(plan.training, recipe.training_linears)}",
        f"  algorithm        {a.name}: {objective_line(a)}",
        f"  correction       {config.correction.name}: {correction_line(config.correction)}",
        f"  memory           rollout weights {_mb(plan.rollout.weight_bytes)}, trainer compute copy "
        f"{_mb(plan.training.weight_bytes)}, optimiser (weights {optimizer.weights}, state {optimizer.state}) "
        f"{_mb(plan.optimizer_bytes)}, fp32 gradients {_mb(plan.gradient_bytes)}, KL reference "
        f"{_mb(plan.reference_bytes)}",
        f"  clipping         {_clipping(optimizer)}",
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
    return (
        f"{len(plan.linears.quantized)} linears {precision.format} ({named}; {block_spec(precision).describe()}); "
        f"bf16: {', '.join(plan.linears.kept) or 'none'}"
    )


def objective_line(a: Algorithm) -> str:
    """The objective in a line, as its keys say it."""
    ratio = (
        "no ratio" if a.surrogate == "reinforce" else f"{a.ratio} ratio in [{1 - a.clip_low:g}, {1 + a.clip_high:g}]"
    )
    parts = [
        f"advantage {a.advantage_baseline}, {a.advantage_scale}",
        f"{a.surrogate} surrogate",
        ratio,
        a.normalization,
    ]
    parts += [f"dual clip {a.dual_clip:g}"] if a.dual_clip and a.surrogate == "clip" else []
    parts += [f"KL {a.kl_estimator} x {a.kl_coef:g}"] if a.kl_coef else []
    parts += [f"entropy x {a.entropy_coef:g}"] if a.entropy_coef else []
    if a.dynamic_sampling.enabled:
        parts.append(f"up to {a.dynamic_sampling.max_generation_batches} generation batches a step")
    parts += [f"overlong penalty {a.overlong.penalty:g}"] if a.overlong.penalty else []
    parts += ["truncated responses left out"] if a.overlong.filter else []
    return ", ".join(parts)


def correction_line(c: Correction) -> str:
    """The correction in a line: weight with its bounds on train / rollout, and each rule."""
    cap = "no bound" if c.cap is None else f"{c.cap:g}"
    bounded = c.cap is not None or c.lower > 0
    bounds = f", {c.outside} outside {c.lower:g} to {cap}" if bounded else ", not bounded"
    parts = ["no weight" if c.weight == "none" else f"{c.weight} weight{bounds}"]
    for rule in c.rejection:
        bounds = " and ".join(f"{sign} {b:g}" for sign, b in ((">=", rule.lower), ("<=", rule.upper)) if b is not None)
        scope = "" if rule.advantages == "any" else f" where the advantage is {rule.advantages}"
        parts.append(f"keep {rule.statistic} by {rule.level} {bounds}{scope}")
    parts += ["self-normalised"] if c.self_normalize else []
    return ", ".join([*parts, f"divided by {c.denominator}"])


def _clipping(o: Optimizer) -> str:
    limits = {"gradient norm": o.max_grad_norm, "gradient value": o.max_grad_value, "weight": o.max_weight}
    return ", ".join(f"{what} {limit:g}" for what, limit in limits.items() if limit is not None) or "none"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
