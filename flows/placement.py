"""What a run asks of Ray: its actors, their CPU slots and GPUs; and whether a cluster can ever have that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conf.schema import MegatronTrainer, RunConfig
from infra.device import Node

SHARED_ROLLOUT: Final = 0.4
SHARED_TRAINER: Final = 0.6
"""Shares of a GPU that the rollout engine and a rank of the trainer have in common: never two ranks on one."""
_EPSILON: Final = 1e-9


@dataclass(frozen=True)
class Placement:
    """Actors of a run: one for the rollout engine, one for each of the trainer's `ranks`.

    GPUs are those of the rollout engine and of each rank (a fraction shares one), CPU slots likewise; 0 on a local Ray,
    which serves the run alone.
    """

    ranks: int
    rollout_gpus: float
    trainer_gpus: float
    rollout_cpus: int
    trainer_cpus: int

    @property
    def gpus(self) -> int:
        """Whole GPUs that it takes, when every shared one is shared as far as it can be."""
        return _gpus_for(self.rollout_gpus, self.trainer_gpus, self.ranks)

    @property
    def cpus(self) -> int:
        return self.rollout_cpus + self.ranks * self.trainer_cpus

    def describe(self) -> str:
        """In a line."""
        ranks = "trainer" if self.ranks == 1 else f"trainer ranks 0 to {self.ranks - 1}"
        each = "" if self.ranks == 1 else " each"
        gpus = f"{self.gpus} GPUs (rollout {self.rollout_gpus:g}, trainer {self.trainer_gpus:g}{each})"
        cpus = f"{self.cpus} CPU slots (rollout {self.rollout_cpus}, trainer {self.trainer_cpus}{each})"
        return (
            f"{1 + self.ranks} Ray actors (rollout, {ranks}); {gpus if self.gpus else 'no GPU'}; "
            f"{cpus if self.cpus else 'no CPU slots'}"
        )


def placement(config: RunConfig, gpus: float) -> Placement:
    """What a run asks for on a cluster of `gpus` GPUs.

    Where its keys leave it open, each engine has whole GPUs; with fewer than that takes, the rollout engine shares one
    with a rank.
    """
    cluster, trainer = config.cluster, config.trainer
    slots = cluster.kind == "existing"
    rollout_wants = 1.0 if config.rollout.engine == "vllm" and gpus else 0.0
    trainer_wants = 1.0 if isinstance(trainer, MegatronTrainer) and trainer.device == "gpu" else 0.0
    rollout_gpus, trainer_gpus = _shares(
        (cluster.rollout_gpus, rollout_wants), (cluster.trainer_gpus, trainer_wants), trainer.ranks, gpus
    )
    return Placement(
        trainer.ranks,
        rollout_gpus,
        trainer_gpus,
        config.rollout.threads if slots else 0,
        trainer.threads if slots else 0,
    )


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
    beside = rollout <= 1 - trainer + _EPSILON
    return ranks * math.ceil(trainer) + (0 if beside else math.ceil(rollout))


def own_nodes(config: RunConfig, gpus: int) -> tuple[Node, ...] | None:
    """What a local Ray would hand out on a machine with so many GPUs; None for an existing cluster."""
    if config.cluster.kind == "existing":
        return None
    return (Node(float(config.cluster.num_cpus), float(gpus)),)


def shortage(wanted: Placement, nodes: Sequence[Node], where: str) -> str | None:
    """Why `nodes`, were they all free, could never hold the actors; None when they could."""
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    if wanted.gpus > gpus:
        return f"the run asks for {wanted.describe()}; {where} has {gpus:g} GPUs in all"
    if wanted.ranks > 1 and 0 < wanted.trainer_gpus <= 0.5:
        return (
            f"each of the trainer's {wanted.ranks} ranks reserves {wanted.trainer_gpus:g} GPUs: two could share one; "
            "allowed: cluster.rollout_gpus below 0.5, or cluster.trainer_gpus above 0.5"
        )
    if wanted.cpus > cpus:
        return f"the run asks for {wanted.describe()}; {where} has {cpus:g} CPU slots in all"
    largest = max((node.cpus for node in nodes), default=0)
    for key, slots in (("rollout.threads", wanted.rollout_cpus), ("trainer.threads", wanted.trainer_cpus)):
        if slots > largest:
            return f"{key} = {slots}: no node of {where} has as many CPU slots; allowed: up to {largest:g}"
    return None
