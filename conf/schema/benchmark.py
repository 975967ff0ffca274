"""What `fp8-grpo benchmark` measures; the engine's settings are those of `rollout`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

Mode = Literal["bf16", "fp8_linear", "fp8_linear_kv"]
Count = Annotated[int, Field(ge=1)]


class Point(Section):
    """One load: `concurrency` requests at once, each of `prompt_tokens` in and `response_tokens` out."""

    prompt_tokens: Count
    """Random tokens of each prompt (tokens, >= 1)."""

    response_tokens: Count
    """Tokens generated for each request; the end token is ignored (tokens, >= 1)."""

    concurrency: Count
    """Requests handed to the engine at once (requests, >= 1)."""


class Benchmark(Section):
    """The ladder of precisions over one load, and further loads."""

    modes: Annotated[tuple[Mode, ...], ListAsTuple] = ("bf16", "fp8_linear", "fp8_linear_kv")
    """Rungs, each in a process of its own; bf16 must be among them, for it is what speedups are over."""

    prompt_tokens: int = Field(default=512, ge=1)
    """Random tokens of each prompt of the headline load (tokens, >= 1)."""

    response_tokens: int = Field(default=4096, ge=1)
    """Tokens generated for each request of the headline load (tokens, >= 1)."""

    concurrency: int = Field(default=128, ge=1)
    """Requests of the headline load, handed over at once (requests, >= 1)."""

    repeats: int = Field(default=3, ge=1)
    """Measurements of each load after a warm-up; the median counts (>= 1)."""

    points: Annotated[tuple[Point, ...], ListAsTuple] = ()
    """Further loads, of which each is measured once."""

    slope_contexts: Annotated[tuple[Count, ...], ListAsTuple] = ()
    """Contexts (tokens, each >= 1) after whose prefill the time of a decode step is measured."""

    slope_tokens: int = Field(default=256, ge=2)
    """Tokens decoded for each slope (tokens, >= 2)."""

    mode_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Longest time for one rung, start-up included (seconds, > 0)."""

    @field_validator("modes")
    @classmethod
    def _bf16_is_the_measure(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "bf16" not in value or len(set(value)) != len(value):
            wrong = "speedups are over bf16" if "bf16" not in value else "a rung twice"
            raise Refusal(Problem("modes", list(value), wrong, "a list with bf16, each rung once"))
        return value

    @property
    def headline(self) -> Point:
        """The load of the keys above."""
        return Point(
            prompt_tokens=self.prompt_tokens, response_tokens=self.response_tokens, concurrency=self.concurrency
        )
