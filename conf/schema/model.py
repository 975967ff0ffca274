"""The policy model: a small one built from scratch, or a local Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationInfo, field_validator, model_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

TINY_NAME: Final = "tiny_qwen3"
LOCAL_NAME: Final = "local"
_MODEL_CHOICES: Final = "a folder with config.json, a tokenizer and *.safetensors, or model=tiny_qwen3"


class TinyArchitecture(Section):
    """Dimensions of a model of the Qwen3 architecture; weight dimensions fill whole FP8 blocks."""

    hidden_size: int = Field(default=256, ge=128, multiple_of=128)
    """Width of the residual stream (channels, a multiple of 128)."""

    intermediate_size: int = Field(default=512, ge=128, multiple_of=128)
    """Width of the MLP (channels, a multiple of 128)."""

    num_hidden_layers: int = Field(default=2, ge=1)
    """Decoder layers (>= 1)."""

    num_attention_heads: int = Field(default=4, ge=1)
    """Query heads (>= 1)."""

    num_key_value_heads: int = Field(default=1, ge=1)
    """Key and value heads (>= 1, a divisor of num_attention_heads)."""

    head_dim: int = Field(default=128, ge=128, multiple_of=128)
    """Width of one head (channels, a multiple of 128)."""

    vocab_size: int = Field(default=256, ge=128, multiple_of=128)
    """Rows of the embedding (tokens, a multiple of 128)."""

    max_position_embeddings: int = Field(default=512, ge=2)
    """Longest sequence of prompt and answer (tokens, >= 2)."""

    rope_theta: float = Field(default=10000.0, gt=0.0)
    """Base of the rotary position embedding (> 0)."""

    tie_word_embeddings: bool = True
    """Whether lm_head shares the embedding's weights."""

    @field_validator("num_key_value_heads")
    @classmethod
    def _heads_share_evenly(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads")
        if heads is not None and heads % value:
            raise Refusal(
                Problem(
                    "num_key_value_heads",
                    value,
                    f"does not divide num_attention_heads {heads}",
                    f"a divisor of {heads}",
                )
            )
        return value


class WarmStart(Section):
    """The supervised phase on the run's own task that gives a model built from scratch its first skill."""

    steps: int = Field(ge=1)
    """Optimiser updates (>= 1)."""

    batch_size: int = Field(ge=1)
    """Examples per update (>= 1)."""

    learning_rate: float = Field(gt=0.0)
    """Peak learning rate (> 0)."""

    seed: int = Field(ge=0, le=2**32 - 1)
    """Seed of weights and data order (0 to 2^32 - 1), not the run's: runs share a warm start."""

    answer_styles: Annotated[tuple[str, ...], ListAsTuple] = Field(default=("{answer}",), min_length=1)
    """How demonstrations write an answer, in equal shares: texts with {answer}. A verifier may accept one only."""

    @field_validator("answer_styles")
    @classmethod
    def _styles_hold_the_answer(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for style in value:
            if style.count("{answer}") != 1:
                allowed = "texts such as '= {answer}'"
                raise Refusal(Problem("answer_styles", style, "does not hold {answer} once", allowed))
        return value


class Model(Section):
    """The policy model. `path` alone replaces whatever architecture and warm start the group brought."""

    name: str = Field(min_length=1)
    """Name of the model, shown in tables and as the MLflow tag `model`."""

    path: str | None = None
    """Folder of a Hugging Face causal LM with its tokenizer, or null for a model built from scratch."""

    architecture: TinyArchitecture | None = None
    """Dimensions of the model built from scratch; null when path is set."""

    warm_start: WarmStart | None = None
    """Supervised phase before the run; only for a model built from scratch, null skips it."""

    @model_validator(mode="before")
    @classmethod
    def _path_replaces_tiny(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not data.get("path") or data.get("architecture") is None:
            return data
        name = data.get("name")
        local = {
            "architecture": None,
            "warm_start": None,
            "name": LOCAL_NAME if name in (None, TINY_NAME) else name,
        }
        return {**data, **local}

    @field_validator("path")
    @classmethod
    def _path_is_not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise Refusal(Problem("path", value, "empty", _MODEL_CHOICES))
        return value

    @field_validator("architecture")
    @classmethod
    def _some_model_is_named(cls, value: TinyArchitecture | None, info: ValidationInfo) -> TinyArchitecture | None:
        if value is None and info.data.get("path", "") is None:
            raise Refusal(Problem("path", None, "no model: architecture is null too", _MODEL_CHOICES))
        return value

    @field_validator("warm_start")
    @classmethod
    def _only_tiny_warms_up(cls, value: WarmStart | None, info: ValidationInfo) -> WarmStart | None:
        if value is not None and info.data.get("path") is not None:
            raise Refusal(
                Problem(
                    "warm_start",
                    value.model_dump(),
                    "a model loaded from model.path is not warm-started",
                    "null",
                )
            )
        return value
