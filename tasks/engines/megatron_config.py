"""What a Hugging Face configuration and a recipe mean for Megatron: dimensions, arguments, and what is refused.

Pure: neither Megatron nor a GPU is needed to ask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from conf.schema import LinearPrecision, MegatronTrainer, Recipe
from tasks.engines.megatron_names import ModelShape, Part
from tasks.engines.protocols import EngineError

KINDS: Final = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
"""Model types of config.json whose layers are mapped."""

VOCABULARY_MULTIPLE: Final = 128
"""Rows of the embedding on each tensor-parallel rank are a multiple of this."""

FP32_SCALES: Final = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Transformer Engine's environment variable: 1 for fp32 block scales, 0 for powers of two. Read when it is imported."""


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, one device each; and which of them this is.

    `tensor * pipeline * context * data` ranks. `expert` spreads the experts of a layer over ranks that share a
    pipeline stage; an expert is never cut.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert", "data"):
            if getattr(self, name) < 1:
                raise EngineError(f"layout: {name} = {getattr(self, name)}: not a size; allowed: 1 and more")
        if not 0 <= self.rank < self.world:
            raise EngineError(f"layout: rank = {self.rank}: no such rank; allowed: 0 to {self.world - 1}")
        stage = self.world // self.pipeline
        if stage % self.expert:
            raise EngineError(f"layout: expert = {self.expert}: does not divide the {stage} ranks of a pipeline stage")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True)
class RotaryPlan:
    """Rotary position embedding: the base, and the scaling of Llama 3 where the model has it."""

    base: float
    llama3: Mapping[str, float] | None = None

    def frequencies(self, head_dim: int) -> Tensor:
        """Inverse frequencies `[head_dim / 2]`, radians a position, fp32."""
        channel = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
        plain = 1.0 / (self.base ** (channel / head_dim))
        return plain if self.llama3 is None else _llama3(plain, **self.llama3)


def _llama3(plain: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original: float) -> Tensor:
    """Long waves stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    waves = 2 * math.pi / plain
    smooth = (original / waves - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * plain / factor + smooth * plain
    between = torch.where(waves > original / low_freq_factor, plain / factor, blended)
    return torch.where(waves < original / high_freq_factor, plain, between)


@dataclass(frozen=True)
class ModelPlan:
    """A model as Megatron is to build it.

    `chosen_experts` of each token, 0 in a dense model; `normalized_choice`: their shares add up to 1.
    """

    kind: str
    shape: ModelShape
    rotary: RotaryPlan
    norm_eps: float
    positions: int
    chosen_experts: int = 0
    normalized_choice: bool = True


@dataclass(frozen=True)
class Precision:
    """Arguments of Megatron's configuration, and environment variables that hold before Transformer Engine loads."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_model(folder: Path, layout: Layout) -> ModelPlan:
    """From a folder's config.json; `EngineError` for what is not mapped, and for a layout that does not fit."""
    try:
        hf: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, StrictDataclassError) as error:
        raise EngineError(f"{folder}/config.json: transformers cannot read this model: {error}") from error
    where = f"{folder}/config.json"
    _check_kind(hf, where)
    shape = read_shape(hf, VOCABULARY_MULTIPLE * layout.tensor)
    check_layout(shape, layout)
    return ModelPlan(
        hf.model_type,
        shape,
        _rotary(hf, where),
        norm_eps=hf.rms_norm_eps,
        positions=hf.max_position_embeddings,
        chosen_experts=int(hf.num_experts_per_tok) if shape.experts else 0,
        normalized_choice=bool(hf.norm_topk_prob) if shape.experts else True,
    )


def read_shape(hf: Any, vocabulary_multiple: int = 1) -> ModelShape:
    """Dimensions of a transformers configuration of one of `KINDS`; rows of the vocabulary padded to a multiple."""
    experts = int(hf.num_experts) if hf.model_type == "qwen3_moe" else 0
    return ModelShape(
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        groups=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        mlp=hf.moe_intermediate_size if experts else hf.intermediate_size,
        vocabulary=hf.vocab_size,
        padded_vocabulary=-(-hf.vocab_size // vocabulary_multiple) * vocabulary_multiple,
        tied=bool(hf.tie_word_embeddings),
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type in ("qwen3", "qwen3_moe"),
        experts=experts,
    )


def _check_kind(hf: Any, where: str) -> None:
    if hf.model_type not in KINDS:
        hint = " (multi-head latent attention has no map yet)" if hasattr(hf, "kv_lora_rank") else ""
        raise EngineError(
            f"{where}: model_type = {hf.model_type}: trainer=megatron has no map of its names{hint}; "
            f"allowed: {', '.join(KINDS)}"
        )
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    for key, allowed in wanted.items():
        value = getattr(hf, key, allowed)
        if value != allowed:
            raise EngineError(f"{where}: {key} = {value}: trainer=megatron does not compute it; allowed: {allowed}")


def _rotary(hf: Any, where: str) -> RotaryPlan:
    rope: dict[str, Any] = dict(hf.rope_parameters)
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        value = rope["partial_rotary_factor"]
        raise EngineError(f"{where}: rope_parameters.partial_rotary_factor = {value}: not computed; allowed: 1.0")
    if kind == "default":
        return RotaryPlan(float(rope["rope_theta"]))
    if kind != "llama3":
        raise EngineError(f"{where}: rope_parameters.rope_type = {kind}: not computed; allowed: default, llama3")
    scaling = {key: float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return RotaryPlan(
        float(rope["rope_theta"]), scaling | {"original": float(rope["original_max_position_embeddings"])}
    )


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """`EngineError` for a layout that cuts through what is never cut."""
    divided = [
        ("pipeline", "layers", shape.layers),
        ("tensor", "query heads", shape.heads),
        ("tensor", "MLP channels", layout.tensor if shape.experts else shape.mlp),
        ("expert", "experts", shape.experts or layout.expert),
    ]
    for key, what, count in divided:
        size = getattr(layout, key)
        if count % size:
            raise EngineError(f"layout: {key} = {size}: does not divide {count} {what}; allowed: a divisor of {count}")
    if shape.groups % layout.tensor and layout.tensor % shape.groups:
        raise EngineError(
            f"layout: tensor = {layout.tensor}: neither divides {shape.groups} key and value heads nor is a multiple"
        )
    if layout.expert > 1 and not shape.experts:
        raise EngineError(f"layout: expert = {layout.expert}: this model has no experts; allowed: 1")


def part_at(shape: ModelShape, layout: Layout, stage: int, expert: int, tensor: int) -> Part:
    """What a rank holds that stands at pipeline stage `stage`, expert rank `expert` and tensor rank `tensor`."""
    layers, experts = shape.layers // layout.pipeline, shape.experts // layout.expert
    return Part(
        range(stage * layers, (stage + 1) * layers),
        range(expert * experts, (expert + 1) * experts),
        first=stage == 0,
        last=stage == layout.pipeline - 1,
        tensor_rank=tensor,
        tensor_size=layout.tensor,
    )


def check_machine(shape: ModelShape, layout: Layout, on_gpu: bool) -> None:
    """`EngineError` for layouts that Megatron's modules for CPU do not compute."""
    if on_gpu:
        return
    if layout.context > 1:
        raise EngineError(f"layout: context = {layout.context}: needs a GPU; allowed on CPU: 1")
    if layout.tensor > 1 and shape.experts:
        raise EngineError(
            f"layout: tensor = {layout.tensor}: with experts it needs sequence parallelism, and that a GPU; "
            "allowed on CPU: 1"
        )


def check_kept_layers(shape: ModelShape, layout: Layout, recipe: Recipe) -> None:
    """`EngineError` for more BF16 layers at one end than a pipeline stage has."""
    linears, limit = recipe.training_linears, shape.layers // layout.pipeline
    for key in ("keep_first_layers", "keep_last_layers"):
        kept = getattr(linears, key)
        if linears.quantized and kept > limit:
            raise EngineError(
                f"recipe.training_linears.{key} = {kept}: a pipeline stage has {limit} of the {shape.layers} layers; "
                f"allowed: 0 to {limit}"
            )


def execution_arguments(trainer: MegatronTrainer) -> dict[str, Any]:
    """Megatron's arguments for how passes run.

    The attention of Transformer Engine recomputes its inside in any case, so that selective needs nothing more.
    """
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return (whole if trainer.recompute == "full" else {}) | {"deterministic_mode": trainer.deterministic}


_RECIPES: Final = {"block": "blockwise", "tensor": "tensorwise", "tensor_delayed": "delayed", "mxfp8": "mxfp8"}
"""Megatron's names of Transformer Engine's recipes, by `scaling`."""


def precision_arguments(recipe: Recipe, on_gpu: bool) -> Precision:
    """Megatron's arguments for the recipe's training side; `EngineError` for what it does not compute."""
    linears = recipe.training_linears
    if not linears.quantized:
        return Precision()
    _refuse_what_is_not_computed(linears, on_gpu)
    arguments: dict[str, Any] = {
        "fp8": "e4m3" if linears.gradient_format == "e4m3" else "hybrid",
        "fp8_recipe": _RECIPES[linears.scaling],
        "fp8_param": False,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }
    kept = linears.keep_first_layers, linears.keep_last_layers
    if any(kept):
        arguments |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": kept[0],
            "num_layers_at_end_in_bf16": kept[1],
        }
    if linears.scaling == "tensor_delayed":
        arguments |= {"fp8_amax_history_len": linears.amax_history, "fp8_amax_compute_algo": linears.amax_compute}
    fp32 = "1" if linears.scale == "fp32" else "0"
    return Precision(arguments, {FP32_SCALES: fp32} if linears.scaling == "block" else {})


def _refuse_what_is_not_computed(linears: LinearPrecision, on_gpu: bool) -> None:
    key = "recipe.training_linears"
    if not on_gpu:
        raise EngineError(
            f"{key}.format = {linears.format}: trainer=megatron computes FP8 on GPUs only; allowed on CPU: bf16"
        )
    if linears.scaling not in _RECIPES:
        raise EngineError(
            f"{key}.scaling = {linears.scaling}: not in Transformer Engine; allowed: {', '.join(_RECIPES)}"
        )
    for name, value, allowed in (
        ("weight_block", list(linears.weight_block), [128, 128]),
        ("activation_group", linears.activation_group, 128),
    ):
        if linears.scaling == "block" and value != allowed:
            raise EngineError(f"{key}.{name} = {value}: not in Transformer Engine; allowed: {allowed}")
    if linears.exclude:
        raise EngineError(
            f"{key}.exclude = {list(linears.exclude)}: Megatron keeps whole layers in BF16; allowed: [] "
            "with keep_first_layers and keep_last_layers"
        )
    if linears.scaling != "block" and linears.scale != "fp32":
        raise EngineError(f"{key}.scale = {linears.scale}: for scaling block alone; allowed: fp32")
    kept = linears.keep_first_layers, linears.keep_last_layers
    if any(kept) and linears.scaling == "tensor_delayed":
        raise EngineError(
            f"{key}.keep_first_layers, keep_last_layers = {kept[0]}, {kept[1]}: Megatron has no BF16 layers under "
            "scaling tensor_delayed; allowed: 0, 0"
        )
