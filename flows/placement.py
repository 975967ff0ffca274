"""What a run asks of Ray: its actors, their CPU slots and GPUs; and whether a cluster can ever have that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conf.schema import RunConfig, VllmRollout
from conf.schema.base import counted
from conf.schema.sharing import shares_gpus
from conf.schema.trainers import trains_on_gpus
from infra.device import Node
from tasks.engines.plan import RunPlan

SHARED_ROLLOUT: Final = 0.4
SHARED_TRAINER: Final = 0.6
"""Shares of a GPU that the rollout engine and a rank of the trainer have in common: never two ranks on one."""
_EPSILON: Final = 1e-9
_GB: Final = 1e9


@dataclass(frozen=True)
class Placement:
    """Actors of a run: one for the rollout engine, one for each of the trainer's `ranks`.

    GPUs are those of the rollout engine and of each rank (a fraction shares one), CPU slots likewise; 0 on a local Ray,
    which serves the run alone. `on_cpu`: overrides with which no engine needs a GPU, in words.
    """

    ranks: int
    rollout_gpus: float
    trainer_gpus: float
    rollout_cpus: int
    trainer_cpus: int
    on_cpu: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Whole GPUs that it takes, when every shared one is shared as far as it can be."""
        return _gpus_for(self.rollout_gpus, self.trainer_gpus, self.ranks)

    @property
    def share_gpu(self) -> bool:
        """Whether Ray may put the rollout engine and a rank on one GPU, which it does where it can."""
        return self.rollout_gpus > 0 and self.trainer_gpus > 0 and _fits_beside(self.rollout_gpus, self.trainer_gpus)

    @property
    def cpus(self) -> int:
        return self.rollout_cpus + self.ranks * self.trainer_cpus

    def describe(self) -> str:
        """In a line."""
        ranks = "trainer" if self.ranks == 1 else f"trainer ranks 0 to {self.ranks - 1}"
        each = "" if self.ranks == 1 else " each"
        gpus = f"{counted(self.gpus, 'GPU')} (rollout {self.rollout_gpus:g}, trainer {self.trainer_gpus:g}{each})"
        cpus = f"{counted(self.cpus, 'CPU slot')} (rollout {self.rollout_cpus}, trainer {self.trainer_cpus}{each})"
        shared = (
            "" if not self.share_gpu else ", which they share" if self.ranks == 1 else ", one of which rollout shares"
        )
        return (
            f"{1 + self.ranks} Ray actors (rollout, {ranks}); {gpus if self.gpus else 'no GPU'}{shared}; "
            f"{cpus if self.cpus else 'no CPU slots'}"
        )


def trains_on_gpu(config: RunConfig) -> bool:
    """Whether the trainer's engine computes on GPUs; the PyTorch one never does."""
    return trains_on_gpus(config.trainer)


def placement(config: RunConfig, gpus: float) -> Placement:
    """What a run asks for on a cluster of `gpus` GPUs.

    Where its keys leave it open, each engine has whole GPUs; with fewer than that takes, or with cluster.share_gpus,
    the rollout engine shares one with a rank.
    """
    cluster, trainer = config.cluster, config.trainer
    slots = cluster.kind == "existing"
    rollout_wants = 1.0 if config.rollout.engine == "vllm" and gpus else 0.0
    trainer_wants = 1.0 if trains_on_gpu(config) else 0.0
    rollout_gpus, trainer_gpus = _shares(
        (cluster.rollout_gpus, rollout_wants),
        (cluster.trainer_gpus, trainer_wants),
        trainer.ranks,
        0 if shares_gpus(cluster, config.rollout, trainer) else gpus,
    )
    return Placement(
        trainer.ranks,
        rollout_gpus,
        trainer_gpus,
        config.rollout.threads if slots else 0,
        trainer.threads if slots else 0,
        _on_cpu(config),
    )


def _on_cpu(config: RunConfig) -> tuple[str, ...]:
    """vLLM needs none: it runs on the CPU of a machine that has no GPU."""
    cluster = config.cluster
    keys = (("rollout_gpus", cluster.rollout_gpus), ("trainer_gpus", cluster.trainer_gpus))
    found = [f"cluster.{name}=null" for name, value in keys if value]
    if trains_on_gpu(config):
        training = "" if not config.recipe.training_linears.quantized else " and a recipe that trains in BF16"
        found.append(f"trainer.device=cpu{training}")
    return tuple(found)


def _shares(
    rollout: tuple[float | None, float], trainer: tuple[float | None, float], ranks: int, gpus: float
) -> tuple[float, float]:
    """GPUs of the rollout engine and of a rank; each comes as (by its key, or None; what it wants without)."""
    (rollout_key, rollout_wants), (trainer_key, trainer_wants) = rollout, trainer
    ours = rollout_wants if rollout_key is None else rollout_key
    theirs = trainer_wants if trainer_key is None else trainer_key
    if not (ours and theirs) or _gpus_for(ours, theirs, ranks) <= gpus:
        return ours, theirs
    if rollout_key is None and trainer_key is None:
        return SHARED_ROLLOUT, SHARED_TRAINER
    if rollout_key is None and theirs < 1:
        return 1 - theirs, theirs
    if trainer_key is None and ours < 1:
        return ours, 1 - ours
    return ours, theirs


def _gpus_for(rollout: float, trainer: float, ranks: int) -> int:
    """Whole GPUs, a rank never with another on one."""
    if not trainer:
        return math.ceil(rollout)
    return ranks * math.ceil(trainer) + (0 if _fits_beside(rollout, trainer) else math.ceil(rollout))


def _fits_beside(rollout: float, trainer: float) -> bool:
    return rollout <= 1 - trainer + _EPSILON


def own_nodes(config: RunConfig, gpus: int) -> tuple[Node, ...] | None:
    """What a local Ray would hand out on a machine with so many GPUs; None for an existing cluster."""
    if config.cluster.kind == "existing":
        return None
    return (Node(float(config.cluster.num_cpus), float(gpus)),)


def shortage(wanted: Placement, nodes: Sequence[Node], where: str) -> str | None:
    """Why `nodes`, were they all free, could never hold the actors; None when they could."""
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    if wanted.gpus > gpus:
        return (
            f"the run asks for {wanted.describe()}; {where} has {counted(gpus, 'GPU')} in all{_instead(wanted, gpus)}"
        )
    if wanted.ranks > 1 and 0 < wanted.trainer_gpus <= 0.5:
        return (
            f"each of the trainer's {wanted.ranks} ranks reserves {wanted.trainer_gpus:g} GPUs: two could share one; "
            "allowed: cluster.rollout_gpus below 0.5, or cluster.trainer_gpus above 0.5"
        )
    if wanted.cpus > cpus:
        return f"the run asks for {wanted.describe()}; {where} has {counted(cpus, 'CPU slot')} in all"
    largest = max((node.cpus for node in nodes), default=0)
    for key, slots in (("rollout.threads", wanted.rollout_cpus), ("trainer.threads", wanted.trainer_cpus)):
        if slots > largest:
            return f"{key} = {slots}: no node of {where} has as many CPU slots; allowed: up to {largest:g}"
    return None


def _instead(wanted: Placement, gpus: float) -> str:
    """What a run that asks for too many GPUs could do on so many."""
    ranks = wanted.ranks
    while ranks and _gpus_for(wanted.rollout_gpus, wanted.trainer_gpus, ranks) > gpus:
        ranks -= 1
    allowed = [f"trainer.ranks up to {ranks}"] if ranks else []
    allowed += [" with ".join(wanted.on_cpu)] if wanted.on_cpu else []
    return f"; allowed: {', or '.join(allowed)}" if allowed else ""


def memory_shortage(config: RunConfig, plan: RunPlan, gpus: float, machine: int) -> str | None:
    """Why a machine of so many GPUs and bytes of memory could never hold the engines that compute on its CPU.

    Of what they hold throughout, activations apart; None for an existing cluster, whose machines are not known here.
    """
    if config.cluster.kind == "existing":
        return None
    parts = {}
    if config.rollout.engine == "torch" or not placement(config, gpus).rollout_gpus:
        parts["rollout weights"] = plan.rollout.weight_bytes
        if isinstance(config.rollout, VllmRollout):
            parts["rollout.kv_cache_memory_bytes"] = config.rollout.kv_cache_memory_bytes or 0
    if not trains_on_gpu(config):
        ranks = "" if config.trainer.ranks == 1 else f" of {config.trainer.ranks} trainer.ranks"
        parts[f"weights, gradients and optimiser{ranks}"] = plan.trainer_bytes
    if sum(parts.values()) <= machine:
        return None
    key, value = ("path", config.model.path) if config.model.path else ("name", config.model.name)
    told = ", ".join(f"{what} {size / _GB:,.1f} GB" for what, size in parts.items() if size)
    allowed = "a smaller model, or rollout=vllm trainer=megatron trainer.device=gpu on GPUs"
    return (
        f"model.{key} = {value}: the engines on this machine's CPU hold {sum(parts.values()) / _GB:,.1f} GB ({told}), "
        f"and it has {machine / _GB:,.1f} GB of memory; allowed: {allowed}"
    )
