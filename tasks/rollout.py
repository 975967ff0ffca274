"""Rollout: sample a group of responses for each prompt of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray import ObjectRef

from conf.schema import RunConfig, VllmRollout
from tasks.calls import Engines, stopwatch
from tasks.data.examples import Example
from tasks.data.tokens import TextCodec
from tasks.deadlines import Clock
from tasks.engines.protocols import FinishedGroup, GenerateRequest, Prompt
from tasks.numerics.logprobs import sample_seed
from tasks.phase_task import phase_task


def sampling_prompts(
    examples: tuple[Example, ...], codec: TextCodec, run_seed: int, step: int, group: int
) -> tuple[Prompt, ...]:
    """Token ids and one seed a sample; the seed depends on run seed, step, prompt and sample number alone."""
    return tuple(
        Prompt(e.id, codec.encode(e.prompt), tuple(sample_seed(run_seed, step, e.id, i) for i in range(group)))
        for e in examples
    )


def put_to_sleep(engines: Engines, config: RunConfig) -> dict[str, float]:
    """Where `rollout.sleep_level` says so, the device's memory is the trainer's from here on until the next sync.

    Nothing can be asked of the rollout engine in between. Returns `time/sleep_s`, or nothing without such a level.
    """
    if not isinstance(config.rollout, VllmRollout) or not config.rollout.sleep_level:
        return {}
    with stopwatch() as slept:
        engines.answer("sleep", "rollout", engines.rollout.sleep.remote(), engines.clock("sleep_s"))
    return {"time/sleep_s": slept.seconds}


def generate(
    phase: str,
    engines: Engines,
    request: GenerateRequest,
    clock: Clock,
    finished: Callable[[FinishedGroup], None] | None = None,
) -> tuple[dict[str, float], ObjectRef]:
    """Sample, and hand each group to `finished` as it ends; any failure is a `PhaseError` that names the phase.

    `clock`: for all of it. Returns counts, and a reference to the batch, which stays in the object store.
    """
    stream, missing = engines.rollout.generate.remote(request), len(request.prompts)
    while missing:
        ref = engines.following(phase, "rollout", stream, clock)
        groups: tuple[FinishedGroup, ...] = engines.answer(phase, "rollout", ref, clock)
        missing -= len(groups)
        if finished is not None:
            for group in groups:
                finished(group)
    # Batch and counts; after a failure its error is the last.
    rest = []
    while (ref := engines.following(phase, "rollout", stream, clock)) is not None:
        rest.append(ref)
    return engines.answer(phase, "rollout", rest[-1], clock), rest[0]


@phase_task("rollout")
def rollout(engines: Engines, request: GenerateRequest, finished: Callable[[FinishedGroup], None]) -> dict[str, Any]:
    """Sample, and hand each group to `finished` as it ends.

    Returns `counts`, `seconds`, `ended` on the clock of time.perf_counter(), and `batch`, a reference to the samples,
    which stay in the object store.
    """
    with stopwatch() as watch:
        counts, batch_ref = generate("rollout", engines, request, engines.clock("generate_s"), finished)
    return {"counts": counts, "seconds": watch.seconds, "ended": time.perf_counter(), "batch": batch_ref}


def combined_metrics(rollouts: list[dict[str, Any]]) -> dict[str, float]:
    """`rollout/*`, time and throughput over all generation batches of a step, as `rollout` returned them."""
    counts = [r["counts"] for r in rollouts]
    tokens, samples = sum(c["tokens"] for c in counts), sum(c["samples"] for c in counts)
    seconds = sum(r["seconds"] for r in rollouts)
    return {
        "rollout/mean_length": tokens / samples,
        "rollout/truncated_fraction": sum(c["truncated"] for c in counts) / samples,
        "time/rollout_s": seconds,
        "throughput/rollout_tokens_per_s": tokens / seconds,
        "memory/peak_gb": max(c["memory/peak_gb"] for c in counts),
    }
