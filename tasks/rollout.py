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
    """Generate. Returns `counts`, `seconds` and `batch`, a reference to the samples that stay in the object store."""
    with stopwatch() as watch:
        counts_ref, batch_ref = engines.rollout.generate.options(num_returns=2).remote(request)
        counts = wait("rollout", counts_ref)
    return {"counts": counts, "seconds": watch.seconds, "batch": batch_ref}


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
