"""`fp8-grpo doctor`: what this machine can do, which recipes it can run, and how many tokens their caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from conf.compose import CONFIG_DIR, compose
from conf.overrides import groups, override_key
from conf.preflight import model_problems, works_here
from conf.problems import ConfigError
from conf.schema import LinearPrecision, MegatronTrainer, RunConfig, VllmRollout
from conf.schema.base import counted
from flows.placement import memory_shortage, own_nodes, placement, shortage
from flows.sharing import host_shortage, sharing_shortages
from infra.device import DeviceFacts, Node, cpu_flags, device_facts, gpu_count, host_memory, installed
from infra.provenance import versions
from infra.ray_cluster import ClusterError, cluster_nodes, ray_cluster
from infra.worker_python import problem_here
from tasks.engines.memory_plan import kv_capacity_tokens
from tasks.engines.plan import RunPlan, plan_run
from tasks.engines.protocols import EngineError

_FP8_GEMM = (8, 9)
_MXFP8 = (10, 0)
_HOPPER_ATTENTION = (9, 0)


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe can run here under the configured engines, and why not."""

    recipe: str
    problems: tuple[str, ...]
    kv_capacity_tokens: int | None


@dataclass(frozen=True)
class Places:
    """The machines that a run would have, and a name for them together."""

    name: str
    nodes: tuple[Node, ...]


def doctor(overrides: Sequence[str], console: RichConsole) -> bool:
    """Print the findings; True when the configured recipe can run here.

    A recipe whose configuration is refused is a row of the table; `ConfigError`, after it, if that is the configured
    one, and at once if no recipe would do.
    """
    chosen = _composed(overrides)
    choices = {name: _composed([*_without_recipe(overrides), f"recipe={name}"]) for name in _recipes()}
    configs = [config for config in (chosen, *choices.values()) if isinstance(config, RunConfig)]
    if not configs:
        assert isinstance(chosen, ConfigError)
        raise chosen
    facts = device_facts()
    console.print(_machine(facts))
    places, unknown = None, None
    try:
        places = nodes_of(configs[0])
    except ClusterError as error:
        unknown = str(error)
    verdicts = [_verdict(name, choice, facts, places) for name, choice in choices.items()]
    console.print(_recipes_table(configs[0], verdicts))
    if isinstance(chosen, ConfigError):
        raise chosen
    if places is not None:
        console.print(processes(chosen, places), markup=False)
    elsewhere = problem_here(chosen.cluster) if chosen.cluster.kind == "local" else None
    problems = judge(chosen, facts, places).problems + tuple(filter(None, (unknown, elsewhere)))
    for problem in problems:
        console.print(f"recipe {chosen.recipe.name} cannot run here: {problem}", markup=False)
    return not problems


def _composed(overrides: Sequence[str]) -> RunConfig | ConfigError:
    try:
        return compose(overrides)
    except ConfigError as error:
        return error


def nodes_of(config: RunConfig) -> Places:
    """What Ray would hand out: of this machine, or of an existing cluster, which is joined and asked.

    `ClusterError` where it does not answer.
    """
    own = own_nodes(config, gpu_count())
    if own is not None:
        return Places("this machine", own)
    with ray_cluster(config.cluster, "fp8-grpo-doctor"):
        return Places(f"the cluster {config.cluster.address}", cluster_nodes())


def processes(config: RunConfig, places: Places) -> str:
    """Actors that a run would have, and what its cluster has in all, in a line."""
    cpus, gpus = sum(node.cpus for node in places.nodes), sum(node.gpus for node in places.nodes)
    held = f"{counted(gpus, 'GPU')} and {counted(cpus, 'CPU slot')} in all"
    return f"a run asks for {placement(config, gpus).describe()}; {places.name} has {held}"


def _recipes() -> tuple[str, ...]:
    return groups(CONFIG_DIR)["recipe"]


def _without_recipe(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if override_key(text).partition(".")[0] != "recipe"]


def _verdict(name: str, choice: RunConfig | ConfigError, facts: DeviceFacts, places: Places | None) -> Verdict:
    return Verdict(name, choice.problems, None) if isinstance(choice, ConfigError) else judge(choice, facts, places)


def judge(config: RunConfig, facts: DeviceFacts, places: Places | None = None) -> Verdict:
    """What stands against this configuration's recipe on a machine with these facts, and on `places` if known."""
    problems, plan = [str(problem) for problem in model_problems(config)], None
    if not problems:
        try:
            plan = plan_run(config)
        except EngineError as error:
            problems.append(str(error))
    if isinstance(config.rollout, VllmRollout):
        problems += _vllm_problems(config, facts)
    # The PyTorch engines emulate FP8 products and run anywhere.
    if isinstance(config.trainer, MegatronTrainer) and works_here(config) and not installed("megatron.core"):
        problems.append("trainer=megatron: Megatron Core is not installed; the extras are engines-cpu (CPU) and gpu")
    if places is not None:
        gpus = sum(node.gpus for node in places.nodes)
        lacks = [shortage(placement(config, gpus), places.nodes, places.name)]
        if plan is not None:
            lacks += [memory_shortage(config, plan, gpus, host_memory()), host_shortage(config, plan, host_memory())]
        problems += [lack for lack in lacks if lack is not None]
    if plan is not None and facts.capability is not None and config.cluster.kind == "local":
        problems += sharing_shortages(config, plan, facts.total_gb * 1e9)
    capacity = None if plan is None else _capacity(config, plan, facts)
    return Verdict(config.recipe.name, tuple(problems), capacity)


def _vllm_problems(config: RunConfig, facts: DeviceFacts) -> list[str]:
    recipe = config.recipe
    if works_here(config) and not installed("vllm"):
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
        runs = f"no: {'; '.join(verdict.problems)}" if verdict.problems else "yes"
        # As plain text: brackets in a refusal are no markup.
        table.add_row(verdict.recipe, Text(runs), capacity)
    return table
