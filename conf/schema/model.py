"""The policy model: a small one built from scratch, or a local Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

TINY_NAME: Final = "tiny_qwen3"
LOCAL_NAME: Final = "local"
PREPARED_NAMES: Final = ("smollm2_135m",)
"""Models whose folder `fp8-grpo prepare` writes."""

_LATER: Final = frozenset({"norm_eps", "qk_norm", "rope_scaling", "experts", "latent_attention"})
_MODEL_CHOICES: Final = "a folder with config.json, a tokenizer and *.safetensors, or model=tiny_qwen3"


class RopeScaling(Section):
    """Rotary frequencies stretched for longer contexts, as Llama 3.1 does (type llama3)."""

    factor: float = Field(ge=1.0)
    """By how much low frequencies are divided (>= 1)."""

    low_freq_factor: float = Field(gt=0.0)
    """Wavelengths above original_max_position_embeddings / this are divided by factor (> 0)."""

    high_freq_factor: float = Field(gt=0.0)
    """Wavelengths below original_max_position_embeddings / this stay (> low_freq_factor); between, a ramp."""

    original_max_position_embeddings: int = Field(ge=2)
    """Context of the pre-training (tokens, >= 2)."""

    @field_validator("high_freq_factor")
    @classmethod
    def _high_is_above_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low_freq_factor")
        if low is not None and value <= low:
            wrong = f"is not above low_freq_factor {low:g}"
            raise Refusal(Problem("high_freq_factor", value, wrong, f"a number > {low:g}"))
        return value


class Experts(Section):
    """A mixture of experts in place of the MLP."""

    count: int = Field(ge=2)
    """Routed experts of a layer (>= 2)."""

    per_token: int = Field(ge=1)
    """Routed experts that each token goes through (>= 1, at most count)."""

    intermediate_size: int = Field(ge=128, multiple_of=128)
    """Width of one expert (channels, a multiple of 128)."""

    shared: int = Field(default=0, ge=0)
    """Experts that every token goes through besides (>= 0)."""

    first_dense_layers: int = Field(default=0, ge=0)
    """Layers at the input side that keep an MLP (>= 0)."""

    @field_validator("per_token")
    @classmethod
    def _no_more_than_there_are(cls, value: int, info: ValidationInfo) -> int:
        count = info.data.get("count")
        if count is not None and value > count:
            raise Refusal(Problem("per_token", value, f"exceeds count {count}", f"an integer from 1 to {count}"))
        return value


class LatentAttention(Section):
    """Multi-head latent attention: keys and values of all heads come from one low-rank vector a token."""

    kv_lora_rank: int = Field(ge=1)
    """Width of that vector (channels, >= 1)."""

    qk_rope_head_dim: int = Field(ge=2)
    """Channels of a head that carry the position (>= 2); head_dim carry none."""


class TinyArchitecture(Section):
    """Dimensions of a decoder; weight dimensions fill whole FP8 blocks. The defaults are a small Qwen3."""

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

    norm_eps: float = Field(default=1e-6, gt=0.0)
    """Added to the mean square in RMS norms (> 0)."""

    qk_norm: bool = True
    """Whether queries and keys have norms of their own, as in Qwen3; Llama has none."""

    rope_scaling: RopeScaling | None = None
    """Rotary frequencies for long contexts; null leaves them."""

    experts: Experts | None = None
    """Mixture of experts; null is an MLP in every layer."""

    latent_attention: LatentAttention | None = None
    """Multi-head latent attention (no engine here runs it yet); null is attention with keys and values of each head."""

    @property
    def family(self) -> str:
        """The Hugging Face model type of these dimensions."""
        if self.latent_attention is not None:
            return "deepseek_v3"
        if self.experts is not None:
            return "qwen3_moe"
        return "qwen3" if self.qk_norm else "llama"

    @model_serializer(mode="wrap")
    def _without_later_keys_at_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keys that runs of earlier versions did not record stay out of dumps, hence of digests, at their default."""
        dumped: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {k: v for k, v in dumped.items() if k not in _LATER or getattr(self, k) != fields[k].default}

    @field_validator("latent_attention")
    @classmethod
    def _experts_of_a_known_family(cls, value: LatentAttention | None, info: ValidationInfo) -> LatentAttention | None:
        experts = info.data.get("experts")
        if value is not None or not isinstance(experts, Experts):
            return value
        problems = [
            Problem(f"experts.{key}", getattr(experts, key), "a Qwen3 mixture of experts has none", "0")
            for key in ("shared", "first_dense_layers")
            if getattr(experts, key)
        ]
        if info.data.get("qk_norm") is False:
            problems.append(Problem("qk_norm", False, "no mixture of experts without it is known here", "true"))
        if problems:
            raise Refusal(*problems)
        return value

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
