"""Rollout: sample a group of responses for each prompt of a step."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait
from tasks.data.examples import Example
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, Prompt
from tasks.numerics.logprobs import sample_seed


def sampling_prompts(
    examples: tuple[Example, ...], codec: TextCodec, run_seed: int, step: int, group: int
) -> tuple[Prompt, ...]:
    """Token ids and one seed a sample; the seed depends on run seed, step, prompt and sample number alone."""
    return tuple(
        Prompt(e.id, codec.encode(e.prompt), tuple(sample_seed(run_seed, step, e.id, i) for i in range(group)))
        for e in examples
    )


@task(name="rollout", **TASK_OPTIONS)
def rollout(engines: Engines, request: GenerateRequest) -> dict[str, Any]:
    """Generate. Returns `metrics` and `batch`, a reference to the samples that stay in the object store."""
    with stopwatch() as watch:
        metrics_ref, batch_ref = engines.rollout.generate.options(num_returns=2).remote(request)
        metrics = wait("rollout", metrics_ref)
    tokens = metrics.pop("tokens")
    metrics |= {"time/rollout_s": watch.seconds, "throughput/rollout_tokens_per_s": tokens / watch.seconds}
    return {"metrics": metrics, "batch": batch_ref}
