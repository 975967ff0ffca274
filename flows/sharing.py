"""Whether the memory of a GPU holds the rollout engine and a rank of the trainer that share it, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import MegatronTrainer, RunConfig, VllmRollout
from conf.schema.sharing import MOST_MEMORY, shares_gpus
from tasks.engines.plan import RunPlan
from tasks.engines.registry import high_precision_rollout, rollout_settings

_GB = 1e9
_MIB = 2**20
_BUFFERS = 2
"""Chunks of a sync that are under way at once."""


def sync_bytes(config: RunConfig, plan: RunPlan) -> int:
    """What a rank holds in a sync, while the rollout engine has its weights and its cache.

    Its BF16 weights, those of a KL term's reference, the weights that it sends, and their buffers; masters and moments
    are in host memory.
    """
    assert plan.rank_memory is not None
    own = plan.rank_memory.weights + plan.rank_memory.reference
    return own + _weight_bytes(plan) + _BUFFERS * config.cluster.sync_buffer_mb * _MIB


def _weight_bytes(plan: RunPlan) -> int:
    """Weights of the largest of a run's rollout engines: that of the last evaluation has them in BF16."""
    return max(plan.rollout.weight_bytes, 2 * plan.parameters)


def rollout_bytes(config: RunConfig, plan: RunPlan, device: float) -> float:
    """What that engine takes of a device of so many bytes while it is awake."""
    assert isinstance(config.rollout, VllmRollout)
    share = config.rollout.gpu_memory_utilization
    return share * device if share is not None else _weight_bytes(plan) + _cache_bytes(config)


def _cache_bytes(config: RunConfig) -> int:
    """Of a cache of given size; of an FP8 run, too, the last evaluation has a BF16 cache."""
    settings = rollout_settings(config, high_precision_rollout(config.recipe))
    assert isinstance(settings, VllmRollout)
    return settings.kv_cache_memory_bytes or 0


def sharing_lines(config: RunConfig, plan: RunPlan, devices: tuple[int, ...]) -> list[str]:
    """For a plan: what each engine takes when it has the GPU, and on which sizes of it (GB) that is too much.

    Activations count here, as an upper bound; they refuse nothing.
    """
    if not shares_gpus(config.cluster, config.rollout, config.trainer) or plan.rank_memory is None:
        return []
    lines = [
        f"  shared GPU       sync: trainer {sync_bytes(config, plan) / _GB:,.2f} GB beside the rollout engine; then it "
        f"is away (trainer.offload). Training: {plan.rank_memory.total / _GB:,.2f} GB, while the rollout engine sleeps "
        f"(rollout.sleep_level {_level(config)})"
    ]
    for size in devices:
        lacks = list(sharing_shortages(config, plan, size * _GB))
        if not lacks and plan.rank_memory.total > size * _GB:
            lacks.append("training may take more than that, with activations as counted above")
        lines += [f"  {f'on {size} GB':<16} {lack}" for lack in lacks]
    return lines


def _level(config: RunConfig) -> int:
    assert isinstance(config.rollout, VllmRollout)
    return config.rollout.sleep_level


def offloaded_bytes(config: RunConfig, plan: RunPlan) -> int:
    """What lies in host memory while the rollout engine samples, of all ranks; or, asleep at level 1, its weights."""
    assert plan.rank_memory is not None
    rank = plan.rank_memory
    away = config.trainer.ranks * (rank.weights + rank.reference + rank.optimizer)
    return away + (_weight_bytes(plan) if _level(config) == 1 else 0)


def host_shortage(config: RunConfig, plan: RunPlan, host: int) -> str | None:
    """Why so many bytes of host memory do not hold what the engines on shared GPUs move there; of a local Ray alone."""
    shares = shares_gpus(config.cluster, config.rollout, config.trainer) and config.cluster.kind == "local"
    if not shares or plan.rank_memory is None or offloaded_bytes(config, plan) <= host:
        return None
    allowed = "a smaller model, trainer.optimizer.state=bf16 or fp8, or a GPU for each engine (cluster=local)"
    moved = f"the engines move {offloaded_bytes(config, plan) / _GB:,.1f} GB to host memory"
    return f"cluster.share_gpus = true: {moved}, and this machine has {host / _GB:,.1f} GB; allowed: {allowed}"


def sharing_shortages(config: RunConfig, plan: RunPlan, device: float) -> Iterator[str]:
    """Why a GPU of so many bytes does not hold both engines that were told to share it; nothing where it does.

    By arithmetic from shapes: contexts, graphs and fragmentation come on top.
    """
    if not shares_gpus(config.cluster, config.rollout, config.trainer) or plan.rank_memory is None:
        return
    assert isinstance(config.trainer, MegatronTrainer) and isinstance(config.rollout, VllmRollout)
    have = f"a GPU of {device / _GB:,.1f} GB"
    if plan.rank_memory.held > device:
        yield (
            f"trainer.ranks = {config.trainer.ranks}: a rank trains with {plan.rank_memory.held / _GB:,.1f} GB and its "
            f"activations, and shares {have}; allowed: more of them, or trainer.optimizer.state=bf16 or fp8"
        )
    yield from _rollout_shortage(config, plan, device, have)


def _rollout_shortage(config: RunConfig, plan: RunPlan, device: float, have: str) -> Iterator[str]:
    """Of the rollout engine, beside what the trainer holds in a sync."""
    assert isinstance(config.rollout, VllmRollout)
    share, cache = config.rollout.gpu_memory_utilization, config.rollout.kv_cache_memory_bytes
    sync, weights = sync_bytes(config, plan), _weight_bytes(plan)
    key, value = ("gpu_memory_utilization", share) if share is not None else ("kv_cache_memory_bytes", cache)
    told = f"rollout.{key} = {value}"
    if share is not None and share * device <= weights:
        wrong = f"of {have} it does not hold the engine's weights, {weights / _GB:,.1f} GB"
        yield f"{told}: {wrong}; allowed: a larger share"
    elif rollout_bytes(config, plan, device) + sync > device:
        room = device - sync
        # Rounded down: to hundredths, or to whole bytes, of which the last evaluation's cache may take twice as many.
        if cache is None:
            most = min(MOST_MEMORY, int(100 * room / device) / 100)
        else:
            most = int((room - weights) * cache / _cache_bytes(config))
        allowed = f"up to {most}" if most > 0 else "a larger GPU, or one for each engine"
        yield (
            f"{told}: in a sync the trainer holds {sync / _GB:,.1f} GB beside the rollout engine's "
            f"{rollout_bytes(config, plan, device) / _GB:,.1f} GB, and they share {have}; allowed: {allowed}"
        )
