"""What it takes of a run that rollout engine and trainer share GPUs; keys are relative to the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from conf.schema.base import Problem
from conf.schema.engines import Rollout, VllmRollout
from conf.schema.environment import Cluster
from conf.schema.trainers import MegatronTrainer, Trainer, trains_on_gpus

MOST_MEMORY: Final = 0.9
"""Largest share of a GPU's memory for the rollout engine beside a trainer: contexts, graphs, and in a sync the
trainer's weights come on top."""

_SLEEP: Final = 2
"""A sync follows every sleep, and brings all weights."""


def with_what_sharing_decides(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A run's raw configuration with null replaced in `rollout.sleep_level` and `trainer.offload`.

    Both are on where the engines share GPUs and the trainer computes on them, and off elsewhere.
    """
    rollout, trainer, cluster = (raw.get(key) for key in ("rollout", "trainer", "cluster"))
    if not all(isinstance(section, Mapping) for section in (rollout, trainer, cluster)):
        return dict(raw)
    assert rollout is not None and trainer is not None and cluster is not None
    shares = cluster.get("share_gpus") is True and rollout.get("engine") == "vllm"
    shares = shares and trainer.get("engine") == "megatron" and trainer.get("device", "gpu") == "gpu"
    filled = dict(raw)
    if rollout.get("sleep_level", 0) is None:
        filled["rollout"] = {**rollout, "sleep_level": _SLEEP if shares else 0}
    if trainer.get("offload", False) is None:
        filled["trainer"] = {**trainer, "offload": shares}
    return filled


def shares_gpus(cluster: Cluster, rollout: Rollout, trainer: Trainer) -> bool:
    """Whether both engines compute on a GPU that they were told to share."""
    return cluster.share_gpus and trains_on_gpus(trainer) and isinstance(rollout, VllmRollout)


def sharing_problems(cluster: Cluster, rollout: Rollout, trainer: Trainer) -> Iterator[Problem]:
    """Settings that leave one engine no room beside the other; nothing where they share no GPU."""
    if not shares_gpus(cluster, rollout, trainer):
        return
    assert isinstance(rollout, VllmRollout) and isinstance(trainer, MegatronTrainer)
    yield from _reservations(cluster)
    share = rollout.gpu_memory_utilization
    if share is not None and share > MOST_MEMORY:
        wrong = "with cluster.share_gpus it leaves the trainer nothing to hold its weights in"
        yield Problem("rollout.gpu_memory_utilization", share, wrong, f"a number > 0 and <= {MOST_MEMORY}")
    if not rollout.sleep_level:
        wrong = "with cluster.share_gpus the trainer computes where the engine's weights and KV cache are"
        yield Problem("rollout.sleep_level", rollout.sleep_level, wrong, "1, 2, or null (2)")
    if not trainer.offload:
        wrong = "with cluster.share_gpus the rollout engine samples where masters, moments and parameters are"
        yield Problem("trainer.offload", trainer.offload, wrong, "true, or null (true)")


def _reservations(cluster: Cluster) -> Iterator[Problem]:
    """What Ray can put on one GPU."""
    rollout, trainer = cluster.rollout_gpus, cluster.trainer_gpus
    allowed = "a share above 0 and below 1, or null"
    for key, value in (("rollout_gpus", rollout), ("trainer_gpus", trainer)):
        if value is not None and not 0 < value < 1:
            yield Problem(f"cluster.{key}", value, "with cluster.share_gpus it is no share of a GPU", allowed)
            return
    if rollout is not None and trainer is not None and rollout + trainer > 1 + 1e-9:
        wrong = f"with cluster.trainer_gpus {trainer:g} it is more than one GPU"
        yield Problem("cluster.rollout_gpus", rollout, wrong, f"a share above 0 up to {1 - trainer:g}, or null")
