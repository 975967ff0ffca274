"""What is allowed and may not be meant: warnings before a run, and of `--dry-run`."""

from __future__ import annotations

import os

from conf.schema import MegatronTrainer, RunConfig
from conf.schema.sharing import shares_gpus
from flows.placement import trains_on_gpu


def cautions(config: RunConfig, cores: int | None = None) -> tuple[str, ...]:
    """Warnings of a new run's configuration, each in a line. `cores`: of this machine."""
    found = []
    if config.model.path is None and config.model.warm_start is None:
        found.append("model.path is null and model.warm_start is null: the weights are random")
    if config.checkpoint_every is None:
        found.append("checkpoint_every is null: there are no checkpoints, and nothing of this run can be resumed")
    trainer, cores = config.trainer, cores or os.cpu_count() or 1
    threads = trainer.ranks * trainer.threads
    # Ranks on GPUs are bounded by those; on an existing cluster each reserves its threads.
    if config.cluster.kind == "local" and trainer.ranks > 1 and not trains_on_gpu(config) and threads > cores:
        found.append(
            f"trainer.ranks = {trainer.ranks} with trainer.threads = {trainer.threads}: {threads} threads on a machine "
            f"of {cores} cores, which wait for each other"
        )
    if config.cluster.share_gpus and not shares_gpus(config.cluster, config.rollout, trainer):
        device = f" trainer.device={trainer.device}" if isinstance(trainer, MegatronTrainer) else ""
        found.append(
            f"cluster.share_gpus with rollout={config.rollout.engine} trainer={trainer.engine}{device}: these engines "
            "share no GPU, and are built at the same time"
        )
    return tuple(f"warning: {caution}" for caution in found)
