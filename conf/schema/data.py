"""Where prompts and their verifier come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from conf.schema.base import Problem, Refusal, Section


class _Split(Section):
    """Keys of every data source."""

    eval_prompts: int = Field(default=256, ge=1)
    """Fixed prompts of each evaluation (prompts, >= 1; fewer than 256 give too noisy a figure)."""

    eval_share: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of the prompt-hash space that belongs to evaluation (0 < x < 1)."""

    answer_time_limit_s: float = Field(default=5.0, gt=0.0, le=3600.0)
    """Time after which the verifier of one answer is stopped and the answer scores 0 (seconds, 0 < x <= 3600)."""


class ReasoningGymData(_Split):
    """A procedural task of the reasoning-gym library, scored by its own verifier."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Tells this source from the others."""

    eval_share: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Share of the prompt-hash space that belongs to evaluation (0 < x < 1); procedural spaces can be small."""

    task: str = Field(default="basic_arithmetic", min_length=1)
    """Name of the task in reasoning-gym's list."""

    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of the task by their names in reasoning-gym; those left out keep the library's value."""

    pool_size: int = Field(default=10000, ge=2)
    """Questions drawn from the generator before duplicates collapse (questions, >= 2)."""

    partial_credit: bool = False
    """Whether the verifier's scores between 0 and 1 count, or only full marks."""


class JsonlData(_Split):
    """A file of JSON rows with a question and a reference answer, graded as mathematics."""

    kind: Literal["jsonl"] = "jsonl"
    """Tells this source from the others."""

    path: str = Field(min_length=1)
    """The file, one JSON object a line."""

    question_key: str = Field(default="question", min_length=1)
    """Key of the question in a row."""

    answer_key: str = Field(default="answer", min_length=1)
    """Key of the reference in a row; what follows the last `####` counts where there is one."""

    prompt_template: str = "{question}\n"
    """The prompt; every `{question}` in it is replaced, other braces are plain text."""

    @field_validator("prompt_template")
    @classmethod
    def _template_asks(cls, value: str) -> str:
        if "{question}" not in value:
            raise Refusal(
                Problem(
                    "prompt_template",
                    value,
                    "the question has no place in it",
                    "text that contains {question}",
                )
            )
        return value


class SyntheticData(_Split):
    """Random prompts and rewards, to measure what a step costs; nothing can be learned from them."""

    kind: Literal["synthetic"] = "synthetic"
    """Tells this source from the others."""

    prompt_digits: int = Field(default=128, ge=4)
    """Digits of a prompt (>= 4); one token each in tokenizers that split numbers, as Qwen's does."""

    reward_share: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of completions that score 1, by a hash of prompt and completion (0 < x < 1); the others score 0."""

    pool_size: int = Field(default=4096, ge=2)
    """Prompts drawn before duplicates collapse (prompts, >= 2)."""


Data = Annotated[ReasoningGymData | JsonlData | SyntheticData, Field(discriminator="kind")]
