"""Where a recipe and the vLLM engine contradict each other; keys are relative to the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from conf.schema.base import Problem
from conf.schema.engines import VllmRollout
from conf.schema.recipe import Recipe

STALE_SCALES: Final = frozenset({"FLASHINFER"})
"""Backends that take K/V scales as numbers of the host, once."""

KV_NAMES: Final[Mapping[str, tuple[str, ...]]] = {"bf16": ("auto", "bfloat16"), "e4m3": ("fp8", "fp8_e4m3")}
"""vLLM's names of a cache type; the first is the one that we use."""


def vllm_problems(rollout: VllmRollout, recipe: Recipe) -> tuple[Problem, ...]:
    """What vLLM cannot run of `recipe`, and engine arguments that contradict it."""
    return (*_linear_problems(recipe), *_scale_problems(recipe), *_argument_problems(rollout, recipe))


def stale_scale_problems(rollout: VllmRollout, recipe: Recipe) -> tuple[Problem, ...]:
    """An attention backend that does not follow the scales of a sync; a benchmark never syncs and may measure it."""
    if not recipe.kv.quantized or (rollout.attention_backend or "").upper() not in STALE_SCALES:
        return ()
    wrong = "keeps the K/V scales of its start, so that those of a sync never reach decode steps"
    return (Problem("rollout.attention_backend", rollout.attention_backend, wrong, "FLASH_ATTN, TRITON_ATTN or null"),)


def _linear_problems(recipe: Recipe) -> Iterator[Problem]:
    linears = recipe.rollout_linears
    if not linears.quantized:
        return
    side = "recipe.rollout_linears"
    if linears.scaling != "block":
        yield Problem(f"{side}.scaling", linears.scaling, "rollout=vllm runs FP8 linears in blocks only", "block")
    elif linears.weight_block[0] != linears.weight_block[1] or linears.weight_block[0] != linears.activation_group:
        wrong = f"vLLM takes one size for both sides of a block and the activation group ({linears.activation_group})"
        yield Problem(f"{side}.weight_block", list(linears.weight_block), wrong, "[128, 128] with activation_group 128")


def _scale_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.kv.quantized and recipe.calibration.granularity != "layer":
        key, value = "recipe.calibration.granularity", recipe.calibration.granularity
        yield Problem(key, value, "rollout=vllm takes one scale a layer", "layer, or rollout=torch")


def _argument_problems(rollout: VllmRollout, recipe: Recipe) -> Iterator[Problem]:
    if rollout.tensor_parallel_size > 1:
        wrong = "the engine runs in the one process that receives the weights"
        yield Problem("rollout.tensor_parallel_size", rollout.tensor_parallel_size, wrong, "1")
    given: Mapping[str, Any] = rollout.engine_args
    names = KV_NAMES[recipe.kv.dtype]
    if given.get("kv_cache_dtype", names[0]) not in names:
        wrong = f"contradicts recipe.kv.dtype {recipe.kv.dtype}"
        yield Problem("rollout.engine_args.kv_cache_dtype", given["kv_cache_dtype"], wrong, " or ".join(names))
    overrides = given.get("hf_overrides", {})
    if not isinstance(overrides, Mapping):
        yield Problem("rollout.engine_args.hf_overrides", overrides, "not a map", "a map of the model's config keys")
    elif "quantization_config" in overrides:
        key = "rollout.engine_args.hf_overrides.quantization_config"
        yield Problem(key, overrides["quantization_config"], "is not free: the recipe", "leaving it out")
