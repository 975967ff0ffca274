"""`fp8-grpo doctor`: what this machine can do, which recipes it can run, and how many tokens their caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.table import Table

from conf.compose import CONFIG_DIR, compose
from conf.overrides import groups
from conf.schema import LinearPrecision, Recipe, RunConfig, VllmRollout
from flows.placement import own_nodes, placement, shortage
from infra.device import DeviceFacts, cpu_flags, device_facts, installed
from infra.provenance import versions
from infra.ray_cluster import ClusterError, cluster_nodes, ray_cluster
from tasks.engines.memory_plan import kv_capacity_tokens
from tasks.engines.plan import RunPlan, plan_run

_FP8_GEMM = (8, 9)
_MXFP8 = (10, 0)
_HOPPER_ATTENTION = (9, 0)


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe can run here under the configured engines, and why not."""

    recipe: str
    problems: tuple[str, ...]
    kv_capacity_tokens: int | None


def doctor(overrides: Sequence[str], console: RichConsole) -> bool:
    """Print the findings; True when the configured recipe can run here."""
    config, facts = compose(overrides), device_facts()
    console.print(_machine(facts))
    verdicts = [judge(compose([*_without_recipe(overrides), f"recipe={name}"]), facts) for name in _recipes()]
    console.print(_recipes_table(config, verdicts))
    problems = judge(config, facts).problems
    try:
        line, lack = processes(config, facts)
        console.print(line, markup=False)
    except ClusterError as error:
        lack = str(error)
    problems += () if lack is None else (lack,)
    for problem in problems:
        console.print(f"recipe {config.recipe.name} cannot run here: {problem}", markup=False)
    return not problems


def processes(config: RunConfig, facts: DeviceFacts) -> tuple[str, str | None]:
    """Actors that a run would have and what its cluster has in all, in a line; and why that could never hold them.

    An existing cluster is joined and asked; `ClusterError` where it does not answer.
    """
    where, nodes = "this machine", own_nodes(config, facts.count)
    if nodes is None:
        where = f"the cluster {config.cluster.address}"
        with ray_cluster(config.cluster, "fp8-grpo-doctor"):
            nodes = cluster_nodes()
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    wanted = placement(config, gpus)
    line = f"a run asks for {wanted.describe()}; {where} has {gpus:g} GPUs and {cpus:g} CPU slots in all"
    return line, shortage(wanted, nodes, where)


def _recipes() -> tuple[str, ...]:
    return groups(CONFIG_DIR)["recipe"]


def _without_recipe(overrides: Sequence[str]) -> list[str]:
    return [o for o in overrides if not o.lstrip("+").startswith(("recipe=", "recipe."))]


def judge(config: RunConfig, facts: DeviceFacts) -> Verdict:
    """What stands against this configuration's recipe on a machine with these facts."""
    recipe, problems = config.recipe, []
    if isinstance(config.rollout, VllmRollout):
        problems += _vllm_problems(recipe, facts)
    # The PyTorch engines emulate FP8 products and run anywhere.
    return Verdict(recipe.name, tuple(problems), _capacity(config, plan_run(config), facts))


def _vllm_problems(recipe: Recipe, facts: DeviceFacts) -> list[str]:
    if not installed("vllm"):
        return ["rollout=vllm: vLLM is not installed; the extras are engines-cpu (CPU) and gpu"]
    if facts.capability is None:
        lacks = {"avx512f", "avx512bw"} - cpu_flags()
        if recipe.kv.quantized and lacks:
            return [f"recipe.kv.dtype {recipe.kv.dtype}: vLLM's FP8 cache on CPU needs {', '.join(sorted(lacks))}"]
        return []
    problems = []
    have = ".".join(map(str, facts.capability))
    if recipe.rollout_linears.quantized and facts.capability < _linear_need(recipe.rollout_linears):
        need = ".".join(map(str, _linear_need(recipe.rollout_linears)))
        problems.append(
            f"recipe.rollout_linears.format {recipe.rollout_linears.format} ({recipe.rollout_linears.scaling}) needs "
            f"compute capability {need}, {facts.name} has {have}"
        )
    if recipe.kv.quantize_query and facts.capability < _HOPPER_ATTENTION:
        problems.append(
            f"recipe.kv.quantize_query: FP8 attention needs compute capability 9.0, {facts.name} has {have}"
        )
    elif recipe.kv.quantized and facts.capability < _FP8_GEMM:
        problems.append(f"recipe.kv.dtype {recipe.kv.dtype} needs compute capability 8.9, {facts.name} has {have}")
    return problems


def _linear_need(linears: LinearPrecision) -> tuple[int, int]:
    return _MXFP8 if linears.scaling == "mxfp8" else _FP8_GEMM


def _capacity(config: RunConfig, plan: RunPlan, facts: DeviceFacts) -> int | None:
    """Tokens of KV cache by arithmetic: the engine's memory less its weights, or the budget in bytes."""
    if not isinstance(config.rollout, VllmRollout):
        return None
    return kv_capacity_tokens(config.rollout, plan.rollout.weight_bytes, plan.kv_bytes_per_token, facts.total_gb * 1e9)


def _machine(facts: DeviceFacts) -> Table:
    table = Table(title="machine", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("device", facts.name if facts.count <= 1 else f"{facts.count} x {facts.name}")
    if facts.capability is not None:
        table.add_row("compute capability", ".".join(map(str, facts.capability)))
        table.add_row("CUDA of torch", str(facts.cuda))
    table.add_row("memory", f"{facts.free_gb:.1f} GB free of {facts.total_gb:.1f} GB")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))
    kernels = [m for m in ("vllm", "deep_gemm", "flashinfer", "transformer_engine", "megatron.core") if installed(m)]
    table.add_row("engines and kernels", ", ".join(kernels) or "PyTorch alone")
    return table


def _recipes_table(config: RunConfig, verdicts: Sequence[Verdict]) -> Table:
    table = Table(title=f"recipes, {config.model.name}, rollout {config.rollout.engine}", title_justify="left")
    for name in ("recipe", "runs here", "KV cache, tokens"):
        table.add_column(name)
    for verdict in verdicts:
        capacity = "-" if verdict.kv_capacity_tokens is None else f"{verdict.kv_capacity_tokens:,}"
        table.add_row(verdict.recipe, "; ".join(verdict.problems) or "yes", capacity)
    return table
