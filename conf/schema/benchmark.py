"""What `fp8-grpo benchmark` measures; the engine's settings are those of `rollout`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section
from conf.schema.engines import refuse_decided

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


class RungSettings(Section):
    """What one rung sets beside `rollout`, which all share."""

    attention_backend: str | None = Field(default=None, min_length=1)
    """vLLM's name of an attention backend; null takes rollout.attention_backend."""

    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of vLLM's engine, over those of rollout.engine_args."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the rung's process, such as VLLM_KV_CACHE_LAYOUT."""

    @field_validator("engine_args")
    @classmethod
    def _leave_what_is_decided(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refuse_decided(value)
        return value


class Rungs(Section):
    """Settings of each rung: the best that is known for it, so that a ratio is one of best against best."""

    bf16: RungSettings = RungSettings()
    """BF16 throughout."""

    fp8_linear: RungSettings = RungSettings()
    """FP8 linear layers."""

    fp8_linear_kv: RungSettings = RungSettings()
    """FP8 linear layers, KV cache and attention."""


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

    slope_concurrency: int = Field(default=16, ge=1)
    """Sequences decoded together for each slope (>= 1); their contexts have to fit the KV cache of every rung."""

    rungs: Rungs = Rungs()
    """Settings of each rung."""

    warm_up: bool = True
    """Whether each rung is started once before it is measured: a cold compile cache costs KV capacity and time."""

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
