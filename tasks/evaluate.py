"""Evaluation: greedy answers to fixed prompts on the rollout engine."""

from __future__ import annotations

from prefect import task

from tasks.background_grading import BackgroundGrading
from tasks.calls import TASK_OPTIONS, Engines, stopwatch
from tasks.data.examples import Example
from tasks.data.grading import Grader
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, Prompt
from tasks.rollout import generate


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
    with stopwatch() as watch, BackgroundGrading(grader, codec, examples) as grading:
        prompts = tuple(Prompt(e.id, codec.encode(e.prompt), (0,)) for e in examples)
        request = GenerateRequest(version, prompts, max_new_tokens, 1.0, codec.eos_token_ids, greedy=True)
        generate("evaluate", engines, request, grading.submit)
        grades, _ = grading.results()
    return {metric: sum(g.solved for g in grades) / len(grades), "time/eval_s": watch.seconds}
