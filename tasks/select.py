"""Selection: the groups of a step's generation batches that are trained on, and their advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import ObjectRef
from torch import Tensor

from conf.schema import Algorithm
from tasks.calls import PhaseError, stopwatch, wait
from tasks.deadlines import Clock
from tasks.engines.batches import gather_groups
from tasks.numerics.advantage import AdvantageSettings, advantages, zero_variance
from tasks.phase_task import phase_task


@dataclass(frozen=True)
class Choice:
    """Groups of each generation batch, in order; in `filled` of them the verifier's rewards are all equal."""

    groups: tuple[Tensor, ...]
    filled: int


def choose_groups(rewards: list[Tensor], wanted: int, only_informative: bool) -> Choice:
    """The first `wanted` groups whose rewards differ, made up with others where those do not suffice.

    `rewards`: `[groups, group size]` of each generation batch, before shaping: a length penalty would make
    any group look informative. Without `only_informative` the first `wanted` groups whatever their rewards.
    """
    flat = torch.cat([~zero_variance(r) for r in rewards])
    order = torch.arange(flat.numel())
    if only_informative:
        order = torch.cat([order[flat], order[~flat]])
    chosen = order[:wanted].sort().values
    sizes = [r.shape[0] for r in rewards]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    groups = tuple(
        chosen[(chosen >= start) & (chosen < start + size)] - start for start, size in zip(starts, sizes, strict=True)
    )
    return Choice(groups, int((~flat[chosen]).sum()) if only_informative else 0)


@phase_task("select")
def select(
    batch_refs: list[ObjectRef], graded: list[dict[str, Any]], algorithm: Algorithm, clock: Clock
) -> dict[str, Any]:
    """One batch of `algorithm.prompts_per_step` groups from all that was sampled.

    `graded`: what `tasks.reward` returned for each of `batch_refs`; `clock`: for their batches to come. Returns
    `batch` (a reference), `advantages`
    fp64 `[samples]`, `metrics` and `seconds`; errors as in `selection`.
    """
    with stopwatch() as watch:
        choice, values = selection(graded, algorithm)
        batch_ref = batch_refs[0]
        if len(batch_refs) > 1:
            batches = [wait("select", ref, clock) for ref in batch_refs]
            batch_ref = ray.put(gather_groups(batches, choice.groups, algorithm.group_size))
    metrics = selection_metrics(graded, choice, algorithm)
    return {"batch": batch_ref, "advantages": values, "metrics": metrics, "seconds": watch.seconds}


def selection(graded: list[dict[str, Any]], algorithm: Algorithm) -> tuple[Choice, Tensor]:
    """The groups to train on and the advantage of each of their samples, fp64 `[samples]`.

    `PhaseError` where too few groups have rewards that differ and `dynamic_sampling.when_exhausted` is fail.
    """
    settings, wanted = algorithm.dynamic_sampling, algorithm.prompts_per_step
    choice = choose_groups([g["rewards"] for g in graded], wanted, settings.enabled)
    if choice.filled and settings.when_exhausted == "fail":
        raise PhaseError(
            f"dynamic sampling: {wanted - choice.filled} of the {wanted} groups that a step needs have rewards that "
            f"differ after {len(graded)} generation batches (algorithm.dynamic_sampling.max_generation_batches = "
            f"{settings.max_generation_batches}); allowed: more batches, other data, or when_exhausted=fill"
        )
    shaped = torch.cat([g["shaped"][chosen] for g, chosen in zip(graded, choice.groups, strict=True)])
    lengths = torch.cat([g["lengths"][chosen] for g, chosen in zip(graded, choice.groups, strict=True)])
    how = AdvantageSettings(algorithm.advantage_baseline, algorithm.advantage_scale, algorithm.advantage_eps)
    return choice, advantages(shaped, lengths, how).flatten()


def selection_metrics(graded: list[dict[str, Any]], choice: Choice, algorithm: Algorithm) -> dict[str, float]:
    """`reward/*` over everything that was sampled, chosen or not, so that selection cannot flatter it."""
    rewards = torch.cat([g["rewards"] for g in graded])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/zero_variance_fraction": float(zero_variance(rewards).double().mean()),
        "reward/timed_out": float(sum(g["timed_out"] for g in graded)),
        "reward/verifier_errors": float(sum(g["verifier_errors"] for g in graded)),
    }
    if algorithm.overlong.penalty > 0:
        metrics["reward/shaped_mean"] = float(torch.cat([g["shaped"] for g in graded]).mean())
    if algorithm.dynamic_sampling.enabled:
        metrics |= {
            "dynamic_sampling/generation_batches": float(len(graded)),
            "dynamic_sampling/discarded_groups": float(rewards.shape[0] - algorithm.prompts_per_step),
            "dynamic_sampling/filled_groups": float(choice.filled),
        }
    return metrics
