"""`--dry-run`: the resolved configuration and what it would build."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import yaml

from conf.compose import digest, resolved
from conf.schema import Algorithm, Correction, LinearPrecision, MegatronTrainer, Optimizer, RunConfig, VllmRollout
from flows.cautions import cautions
from flows.placement import memory_shortage, own_nodes, placement, shortage
from flows.sharing import sharing_lines
from infra.device import gpu_count, host_memory
from tasks.engines.memory_plan import kv_capacity_tokens
from tasks.engines.plan import EnginePlan, RunPlan
from tasks.engines.precision_plan import block_spec

_GB: Final = 1e9
_LAYER: Final = re.compile(r"^.*\.layers\.\d+\.")
_DEVICES: Final = (80, 141)
"""Memory of the GPUs for which a share is told in tokens (GB): H100, H200."""

_SCALES: Final = {"step": "calibrated each step", "once": "calibrated once", "never": "1"}


def describe(config: RunConfig, plan: RunPlan) -> str:
    """Resolved configuration (YAML) and plan, as text."""
    recipe, a, optimizer = config.recipe, config.algorithm, config.trainer.optimizer
    kv = f"{recipe.kv.dtype}, query {'e4m3' if recipe.kv.quantize_query else 'bf16'}"
    calibration = recipe.calibration
    scales = f"{_SCALES[calibration.refresh]}, a {calibration.granularity}" if calibration.enabled else "none"
    scales += f", margin {calibration.margin}" if calibration.enabled and calibration.refresh != "never" else ""
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
        *_rank_lines(config, plan),
        *_pool_lines(config, plan),
        *sharing_lines(config, plan, _DEVICES),
        f"  processes        {_processes(config)}",
        *_memory_lines(config, plan),
        f"  clipping         {_clipping(optimizer)}",
        f"  work             {config.steps} steps x {a.prompts_per_step} prompts x {a.group_size} samples, "
        f"{plan.optimizer_updates} optimiser updates",
        f"  config digest    {digest(config)}",
        "",
        *cautions(config),
        "Dry run: nothing was started.",
    ]
    return "\n".join(lines)


def _rank_lines(config: RunConfig, plan: RunPlan) -> list[str]:
    """A rank of the Megatron trainer."""
    trainer, memory = config.trainer, plan.rank_memory
    if memory is None or not isinstance(trainer, MegatronTrainer):
        return []
    layout = ", ".join(
        f"{name} {size}"
        for name, size in (
            ("tensor", trainer.tensor_parallel_size),
            ("pipeline", trainer.pipeline_parallel_size),
            ("context", trainer.context_parallel_size),
            ("expert", trainer.expert_parallel_size),
            ("data", trainer.data_parallel_size),
        )
    )
    parts = (
        f"weights {_gb(memory.weights)}",
        f"FP8 copies {_gb(memory.fp8_copies)}",
        f"fp32 gradients {_gb(memory.gradients)}",
        f"optimiser {_gb(memory.optimizer)}",
        f"activations of {trainer.tokens_per_micro_batch:,} tokens, {trainer.recompute} recomputation (counted as "
        f"Korthikanti et al. 2022) {_gb(memory.activations)}",
        f"output layer {_gb(memory.output)}",
        *((f"KL reference {_gb(memory.reference)}",) if memory.reference else ()),
    )
    return [
        f"  trainer ranks    {trainer.ranks} on {trainer.device}: {layout}",
        f"  memory a rank    {', '.join(parts)}; together {_gb(memory.total)}",
    ]


def _processes(config: RunConfig) -> str:
    """The actors, and for a local Ray whether this machine can hold them; another cluster is not asked here."""
    nodes = own_nodes(config, gpu_count())
    if nodes is None:
        whole = placement(config, math.inf).describe()
        return f"{whole}, on a cluster that has them: fp8-grpo doctor asks it"
    wanted = placement(config, sum(node.gpus for node in nodes))
    lack = shortage(wanted, nodes, "this machine")
    return wanted.describe() if lack is None else f"not on this machine: {lack}"


def _memory_lines(config: RunConfig, plan: RunPlan) -> list[str]:
    """What this machine's memory could not hold."""
    lack = memory_shortage(config, plan, gpu_count(), host_memory())
    return [] if lack is None else [f"  memory here      not on this machine: {lack}"]


def _pool_lines(config: RunConfig, plan: RunPlan) -> list[str]:
    """Tokens that fit into vLLM's cache."""
    rollout = config.rollout
    if not isinstance(rollout, VllmRollout):
        return []

    def tokens(device_bytes: float) -> str:
        return f"{kv_capacity_tokens(rollout, plan.rollout.weight_bytes, plan.kv_bytes_per_token, device_bytes):,}"

    if rollout.kv_cache_memory_bytes is not None:
        return [f"  KV pool          {tokens(0)} tokens in {_gb(rollout.kv_cache_memory_bytes)}"]
    fits = ", ".join(f"{tokens(size * _GB)} tokens of {size} GB" for size in _DEVICES)
    return [
        f"  KV pool          {fits}: share {rollout.gpu_memory_utilization:g} less weights; what vLLM computes with "
        "comes off"
    ]


def _linears(plan: EnginePlan, precision: LinearPrecision) -> str:
    """How many linears of each kind compute in which format, by the last part of their names."""
    if not plan.linears.quantized:
        return f"all {len(plan.linears.kept)} linears bf16"
    kinds = Counter(name.rpartition(".")[2] for name in plan.linears.quantized)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (
        f"{len(plan.linears.quantized)} linears {precision.format} ({named}; {block_spec(precision).describe()}); "
        f"bf16: {_by_kind(plan.linears.kept)}"
    )


def _by_kind(names: Sequence[str]) -> str:
    """Names of modules; those that layers have in common once, with how many layers have them."""
    kinds = Counter(_LAYER.sub("", name) for name in names)
    alone = {_LAYER.sub("", name): name for name in names}
    return ", ".join(f"{count} x {kind}" if count > 1 else alone[kind] for kind, count in kinds.items()) or "none"


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


def _gb(size: int) -> str:
    return f"{size / _GB:,.2f} GB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
