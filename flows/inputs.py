"""Everything about a run's inputs that can be refused before Ray, Prefect or an engine starts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from conf.preflight import preflight
from conf.problems import ConfigError
from conf.schema import JsonlData, Problem, RunConfig
from conf.schema.sharing import shares_gpus
from flows.environment import prefect_api_url
from flows.placement import memory_shortage, own_nodes, placement, shortage
from flows.sharing import host_shortage, sharing_shortages
from infra.device import gpu_count, gpu_memory, host_memory
from tasks.data.examples import DataError, Dataset
from tasks.data.loading import load_dataset
from tasks.data.tokens import TextCodec
from tasks.engines.plan import RunPlan, plan_run
from tasks.engines.protocols import EngineError


def input_digests(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the files that a configuration names by path: data rows, and the model folder file by file."""
    files: list[Path] = [Path(config.data.path)] if isinstance(config.data, JsonlData) else []
    if config.model.path is not None:
        folder = Path(config.model.path)
        files += [p for p in sorted(folder.iterdir()) if p.suffix in (".json", ".safetensors", ".model", ".txt")]
    return {f"file {path.name}": _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_inputs(config: RunConfig, starts: bool = True) -> RunPlan:
    """Files, tasks, rows, and whether the recipe fits the model; `ConfigError` with all that is wrong.

    `starts`: whether the run will start here, and on a local Ray needs this machine's GPUs and memory. Returns the plan
    that was worked out on the way.
    """
    preflight(config, trains=starts)
    problems: list[str] = []
    if Path(config.runs_dir).exists() and not Path(config.runs_dir).is_dir():
        problems.append(f"runs_dir = {config.runs_dir}: is a file; allowed: a folder, or a path that does not exist")
    if starts:
        problems += pausing_problems(config, prefect_api_url() is not None)
    if starts and config.cluster.kind == "local":
        problems += _worker_python(config.cluster.worker_python)
    nodes = own_nodes(config, gpu_count()) if starts else None
    if nodes is not None:
        lack = shortage(placement(config, sum(node.gpus for node in nodes)), nodes, "this machine")
        problems += [] if lack is None else [f"cluster.kind = {config.cluster.kind}: {lack}"]
    plan = None
    try:
        plan = plan_run(config)
    except EngineError as error:
        problems.append(str(error))
    else:
        lack = memory_shortage(config, plan, gpu_count(), host_memory()) if starts else None
        problems += [] if lack is None else [lack]
        problems += _sharing_problems(config, plan) if nodes is not None else []
    if isinstance(config.data, JsonlData):
        # Rows are cheap to read; a procedural task is generated once, when the run starts.
        try:
            load_dataset(config.data)
        except DataError as error:
            problems.append(str(error))
    if problems or plan is None:
        raise ConfigError(problems)
    return plan


def pausing_problems(config: RunConfig, server: bool, deployed: bool = False) -> list[str]:
    """A run that waits for a person needs a server on which one can find it, and is no run of a deployment.

    Of such a run that is Paused Prefect takes the slot away, lets the next one begin on its engines, and ends it.
    """
    pausing = [number for number, rule in enumerate(config.breakers.rules) if rule.action == "pause"]
    if not pausing or (server and not deployed):
        return []
    wrong = "nobody can resume the run: its Prefect server is its own and ends with it"
    allowed = "another action, or a server by PREFECT_API_URL or an active profile"
    if deployed:
        wrong = "a run of a deployment would lose its slot to the next one while it waits with its engines"
        allowed = "another action, or fp8-grpo train"
    return [str(Problem(f"breakers.rules[{number}].action", "pause", wrong, allowed)) for number in pausing]


def _worker_python(path: str | None) -> list[str]:
    """That it works and fits the driver is asked when Ray starts; here no library of Ray may be imported."""
    if path is None or (Path(path).is_file() and os.access(path, os.X_OK)):
        return []
    allowed = "the path of an executable on this machine, or null for the driver's own Python"
    return [str(Problem("cluster.worker_python", path, "no such executable", allowed))]


def _sharing_problems(config: RunConfig, plan: RunPlan) -> list[str]:
    """What this machine cannot hold of two engines that share a GPU."""
    if not shares_gpus(config.cluster, config.rollout, config.trainer):
        return []
    device, host = gpu_memory(), host_shortage(config, plan, host_memory())
    problems = [] if device is None else list(sharing_shortages(config, plan, device))
    return problems + ([] if host is None else [host])


def check_prompts(dataset: Dataset, codec: TextCodec, config: RunConfig) -> None:
    """`DataError` for a step that needs more prompts than there are, or a prompt that leaves no room to answer.

    All prompts are encoded here, so that none of them can end a run at the step that draws it.
    """
    wanted, have = config.algorithm.prompts_per_step, len(dataset.train)
    if wanted > have:
        raise DataError(f"algorithm.prompts_per_step = {wanted}: there are {have} train prompts; allowed: 1 to {have}")
    limit = config.rollout.positions(codec.max_positions)
    room = limit - config.rollout.max_new_tokens
    for example in (*dataset.train, *dataset.eval):
        count = len(codec.encode(example.prompt))
        if count > room:
            raise DataError(
                f"prompt {example.id} ({example.prompt[:60]!r}) has {count} tokens; at most {room} are allowed: "
                f"{limit} positions less rollout.max_new_tokens {config.rollout.max_new_tokens}"
            )
