"""Grading behind the sampling: finished groups are graded while the engine goes on with the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tasks.data.examples import Example
from tasks.data.grading import Grade, Grader, GraderError
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import FinishedGroup


class BackgroundGrading:
    """Grades the answers to one request, whose prompts are those of `examples`, in a thread of its own.

    Leaving the block drops the answers that nobody has begun to grade, and waits for the one in work.
    """

    def __init__(self, grader: Grader, codec: TextCodec, examples: Sequence[Example]) -> None:
        self.examples = examples
        self._grader = grader
        self._codec = codec
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grading")
        self._answers: dict[tuple[int, int], Future[tuple[Grade, int]]] = {}
        self._spans: list[tuple[float, float]] = []
        self._failure: GraderError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, group: FinishedGroup) -> None:
        """Have a group graded; returns at once, and raises nothing that grading it may raise."""
        example = self.examples[group.prompt]
        for place, response in enumerate(group.responses):
            self._answers[group.prompt, place] = self._pool.submit(self._grade, example, response)

    def results(self) -> tuple[list[Grade], list[int]]:
        """Wait for all; the grade and the tokens of each response, prompt by prompt and seed by seed.

        Raises the `GraderError` of the first answer that had one.
        """
        # In the order in which they are graded, so that the first error comes first.
        done = {key: answer.result() for key, answer in self._answers.items()}
        ordered = [done[key] for key in sorted(done)]
        return [grade for grade, _ in ordered], [tokens for _, tokens in ordered]

    def seconds_before(self, moment: float) -> float:
        """Seconds of grading before `moment`, on the clock of time.perf_counter(); call it after `results`."""
        return sum(max(0.0, min(end, moment) - start) for start, end in self._spans)

    def _grade(self, example: Example, response: list[int]) -> tuple[Grade, int]:
        if self._failure is not None:
            # A verifier that does not start would be waited for again with every answer.
            raise self._failure
        start = time.perf_counter()
        try:
            (grade,) = self._grader.grade([(example, self._codec.decode(response))])
        except GraderError as error:
            self._failure = error
            raise
        finally:
            self._spans.append((start, time.perf_counter()))
        return grade, len(response)
