"""The precision recipe: one object from which both engines are built and against which they are audited."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

Positive = Annotated[int, Field(ge=1)]
ModuleName = Annotated[str, Field(min_length=1)]


class LinearPrecision(Section):
    """How the linear layers of one engine compute. Embeddings, norms, router and lm_head stay BF16 always."""

    format: Literal["bf16", "e4m3"] = "bf16"
    """Format of weights and activations in the matrix product: bf16, or e4m3 (FP8, largest value 448)."""

    scaling: Literal["block", "tensor", "tensor_delayed", "channel", "mxfp8"] = "block"
    """What shares one scale.

    block: weight_block and activation_group. tensor: the whole tensor, by its own amax; a token's result then
    depends on the batch it is computed in. tensor_delayed: the whole tensor, by the amax of earlier updates
    (trainer only). channel: an output channel of a weight, a token of an activation. mxfp8: 32 elements along the
    product's sum, E8M0 scales.
    """

    weight_block: Annotated[tuple[Positive, Positive], ListAsTuple] = (128, 128)
    """Rows and columns (elements, >= 1) of a weight block that shares one scale; used by scaling block."""

    activation_group: int = Field(default=128, ge=1)
    """Neighbouring channels of one token (elements, >= 1) that share one scale; used by scaling block."""

    scale: Literal["fp32", "power_of_two"] = "fp32"
    """Kind of scale: any fp32 value, or rounded up to a power of two; scaling mxfp8 has its own kind."""

    gradient_format: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of output gradients in the backward products: e4m3, or e5m2 (largest value 57344); trainer only."""

    amax_history: int = Field(default=1024, ge=1)
    """Updates whose amax scaling tensor_delayed remembers (updates, >= 1)."""

    amax_compute: Literal["max", "most_recent"] = "max"
    """The amax that scaling tensor_delayed takes from its history: the largest, or the newest."""

    keep_first_layers: int = Field(default=0, ge=0)
    """Decoder layers at the input side that stay BF16 (layers, >= 0)."""

    keep_last_layers: int = Field(default=0, ge=0)
    """Decoder layers at the output side that stay BF16 (layers, >= 0)."""

    exclude: Annotated[tuple[ModuleName, ...], ListAsTuple] = ()
    """Linear layers that stay BF16 besides, by their exact Hugging Face module name."""

    @property
    def quantized(self) -> bool:
        """True when any linear layer may compute in FP8."""
        return self.format != "bf16"


class KvPrecision(Section):
    """Precision of the rollout's KV cache and attention. The trainer's attention is never quantised."""

    dtype: Literal["bf16", "e4m3"] = "bf16"
    """Type of cached keys and values: bf16, or e4m3 codes with a static scale per layer for K and for V."""

    quantize_query: bool = False
    """Whether queries are rounded to e4m3 for the attention product; needs dtype e4m3."""

    @property
    def quantized(self) -> bool:
        """True when the cache holds FP8 codes."""
        return self.dtype != "bf16"

    @field_validator("quantize_query")
    @classmethod
    def _query_follows_cache(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("dtype") == "bf16":
            raise Refusal(
                Problem(
                    "quantize_query",
                    value,
                    "an FP8 query needs an FP8 KV cache, and dtype is bf16",
                    "false, or true with dtype e4m3",
                )
            )
        return value


class Calibration(Section):
    """Policy for the static Q, K and V scales: margin * amax / 448, measured by the trainer."""

    enabled: bool = False
    """Whether there are scales, from the bootstrap on; an FP8 KV cache needs them."""

    refresh: Literal["step", "once", "never"] = "step"
    """When scales are measured: at the start and after every step; once, by the bootstrap, and kept; or never, which
    leaves each of Q, K and V at scale 1 (the last two to show what calibration is worth)."""

    margin: float = Field(default=1.05, ge=1.0)
    """Head room over the measured amax (factor, >= 1)."""

    percentile: float = Field(default=100.0, gt=0.0, le=100.0)
    """Percentile of the absolute values taken as amax (percent, 0 < p <= 100; 100 is the maximum)."""

    granularity: Literal["layer", "head"] = "layer"
    """What shares a scale of q, k or v: a whole layer, or one KV head with its query heads."""

    max_sequences: int = Field(default=64, ge=1)
    """Sequences of a step that are measured, at most (sequences, >= 1)."""

    max_tokens_per_sequence: int | None = Field(default=None, ge=1)
    """Tokens of a sequence that are measured, at most, spread over its length (tokens, >= 1; null is all)."""

    @model_serializer(mode="wrap")
    def _without_later_keys_at_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`refresh`, which runs of earlier versions did not record, stays out of dumps and digests at its default."""
        dumped: dict[str, Any] = handler(self)
        return {key: value for key, value in dumped.items() if key != "refresh" or value != "step"}


class Recipe(Section):
    """What is quantised, where and how."""

    name: str = Field(min_length=1)
    """Name of the recipe, shown in tables and as the MLflow tag `recipe`."""

    rollout_linears: LinearPrecision
    """Linear layers of the rollout engine."""

    training_linears: LinearPrecision
    """Linear layers of the trainer, forward and backward."""

    kv: KvPrecision
    """KV cache and attention of the rollout engine."""

    calibration: Calibration
    """How the Q, K and V scales are found."""

    @field_validator("rollout_linears")
    @classmethod
    def _rollout_has_no_history(cls, value: LinearPrecision) -> LinearPrecision:
        if value.scaling == "tensor_delayed":
            raise Refusal(
                Problem(
                    "rollout_linears.scaling",
                    value.scaling,
                    "its scales come from a history of amax values, which only the trainer has",
                    "block, tensor, channel or mxfp8",
                    "tensor",
                )
            )
        return value

    @field_validator("calibration")
    @classmethod
    def _fp8_cache_is_calibrated(cls, value: Calibration, info: ValidationInfo) -> Calibration:
        kv = info.data.get("kv")
        if isinstance(kv, KvPrecision) and kv.quantized and not value.enabled:
            raise Refusal(
                Problem(
                    "calibration.enabled",
                    value.enabled,
                    f"an FP8 KV cache (kv.dtype {kv.dtype}) has no scales without calibration",
                    "true, or false with kv.dtype bf16",
                )
            )
        return value
