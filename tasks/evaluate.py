"""Evaluation: greedy answers to fixed prompts on the rollout engine."""

from __future__ import annotations

import ray
from prefect import task

from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait
from tasks.data.examples import Example
from tasks.data.grading import Grader
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, Prompt, RolloutBatch


@task(name="evaluate", **TASK_OPTIONS)
def evaluate(
    engines: Engines,
    examples: tuple[Example, ...],
    codec: TextCodec,
    grader: Grader,
    version: int,
    max_new_tokens: int,
    metric: str,
) -> dict[str, float]:
    """Share of `examples` solved, under `metric`, and `time/eval_s`. The engine must hold `version`."""
    with stopwatch() as watch:
        prompts = tuple(Prompt(e.id, codec.encode(e.prompt), (0,)) for e in examples)
        request = GenerateRequest(version, prompts, max_new_tokens, 1.0, codec.eos_token_ids, greedy=True)
        metrics_ref, batch_ref = engines.rollout.generate.options(num_returns=2).remote(request)
        wait("evaluate", metrics_ref)
        batch: RolloutBatch = ray.get(batch_ref)
        grades = grader.grade([(e, codec.decode(batch.response(i))) for i, e in enumerate(examples)])
    return {metric: sum(g.solved for g in grades) / len(grades), "time/eval_s": watch.seconds}
