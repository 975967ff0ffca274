"""Evaluation: greedy answers to fixed prompts on the rollout engine."""

from __future__ import annotations

from typing import Any

from tasks.background_grading import BackgroundGrading
from tasks.calls import Engines, stopwatch
from tasks.data.examples import Example
from tasks.data.grading import Grader
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, Prompt
from tasks.phase_task import phase_task
from tasks.rollout import generate


@phase_task("evaluate")
def evaluate(
    engines: Engines,
    examples: tuple[Example, ...],
    codec: TextCodec,
    grader: Grader,
    version: int,
    max_new_tokens: int,
    metric: str,
) -> dict[str, Any]:
    """`metrics`: the share of `examples` solved, under `metric`, and `time/eval_s`; `solved`: 0 or 1 by example id.

    The engine must hold `version`.
    """
    with stopwatch() as watch, BackgroundGrading(grader, codec, examples) as grading:
        prompts = tuple(Prompt(e.id, codec.encode(e.prompt), (0,)) for e in examples)
        request = GenerateRequest(version, prompts, max_new_tokens, 1.0, codec.eos_token_ids, greedy=True)
        generate("evaluate", engines, request, engines.clock("evaluate_s"), grading.submit)
        grades, _ = grading.results()
    share = sum(g.solved for g in grades) / len(grades)
    return {
        "metrics": {metric: share, "time/eval_s": watch.seconds},
        "solved": {example.id: int(grade.solved) for example, grade in zip(examples, grades, strict=True)},
    }
