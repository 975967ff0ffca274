"""From recipe and settings to the arguments of vLLM's engine. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from conf.schema import LinearPrecision, Recipe, VllmRollout
from conf.schema.vllm import KV_NAMES, vllm_problems
from tasks.engines.checkpoint_names import experts_layer, linear_shapes
from tasks.engines.precision_plan import LinearPlan, plan_linears
from tasks.engines.protocols import EngineError

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that vLLM keeps in one matrix, which has one precision."""

_FREE_AT_START = 0.01
"""Share of the GPU's memory that vLLM wants free at its start where the cache's size is given: by default it wants
0.92 of all, whoever else is there."""


@dataclass(frozen=True)
class Model:
    """What the arguments depend on: folder, plan, and the output rows of each linear layer by its name."""

    folder: Path
    plan: LinearPlan
    rows: Mapping[str, int]

    @property
    def mixture(self) -> bool:
        """Whether it has experts."""
        return any(experts_layer(name) for name in self.rows)


def model_of(folder: Path, shapes: nn.Module, precision: LinearPrecision) -> Model:
    """What `engine_arguments` needs of a model, from its shapes (`tasks.engines.plan.folder_shape`)."""
    rows = {name: rows for name, (rows, _) in linear_shapes(shapes).items()}
    return Model(folder, plan_linears(shapes, precision), rows)


def engine_arguments(
    model: Model, recipe: Recipe, settings: VllmRollout, transfer: str, on_cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; `transfer` names the weight-transfer backend.

    Raises `EngineError` for a recipe that vLLM cannot run with this model.
    """
    plan = model.plan
    problems = [str(problem) for problem in vllm_problems(settings, recipe)]
    problems += [*_split_fusions(plan), *_split_experts(plan)]
    problems += _split_blocks(model, recipe.rollout_linears.weight_block[0])
    if on_cpu and settings.sleep_level:
        problems.append(f"rollout.sleep_level = {settings.sleep_level}: vLLM on CPU does not sleep; allowed: 0")
    if problems:
        raise EngineError("rollout=vllm cannot run this configuration:\n" + "\n".join(problems))
    given: dict[str, Any] = dict(settings.engine_args)
    overrides = dict(given.pop("hf_overrides", {}))
    quantization = _quantization(recipe, plan)
    if quantization is not None:
        overrides["quantization_config"] = quantization
    arguments: dict[str, Any] = {
        "seed": 0,
        "disable_log_stats": True,
        "kv_cache_dtype": KV_NAMES[recipe.kv.dtype][0],
        **_placement(settings, on_cpu),
        **_experts(model, on_cpu),
        **given,
        # From here on what no argument of the user can change (the configuration refuses to try).
        "model": str(model.folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "hf_overrides": overrides,
        "weight_transfer_config": {"backend": transfer},
        "worker_extension_cls": "tasks.engines.vllm_worker.ReadBackExtension",
        "additional_config": {
            "fp8_grpo": {
                "power_of_two": recipe.rollout_linears.scale == "power_of_two",
                "quantize_query": recipe.kv.quantize_query,
            }
        },
    }
    return arguments


def engine_environment(recipe: Recipe) -> dict[str, str]:
    """Variables of vLLM that the engine sets before it is built."""
    return {
        # The sender's tensors reach the worker without a copy only within one process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Left to itself, vLLM rounds the block scales of FP8 weights to powers of two where DeepGEMM multiplies.
        "VLLM_USE_DEEP_GEMM_E8M0": "1" if recipe.rollout_linears.scale == "power_of_two" else "0",
        # FlashInfer's sampler has no seed for each request, and its block product quantises in its own way.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }


def _placement(settings: VllmRollout, on_cpu: bool) -> dict[str, Any]:
    """Memory, devices, graphs; keys that are null are left to vLLM."""
    eager = on_cpu if settings.enforce_eager is None else settings.enforce_eager
    chosen = {
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "attention_backend": settings.attention_backend,
        "max_model_len": settings.max_model_len,
        "cudagraph_capture_sizes": list(settings.cudagraph_capture_sizes) if settings.cudagraph_capture_sizes else None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_num_seqs": settings.batch_size,
        "enforce_eager": eager,
        "enable_sleep_mode": True if settings.sleep_level else None,
        "distributed_executor_backend": "uni",
    }
    if settings.gpu_memory_utilization is None and not on_cpu:
        chosen["gpu_memory_utilization"] = _FREE_AT_START
    return {name: value for name, value in chosen.items() if value is not None}


def _experts(model: Model, on_cpu: bool) -> dict[str, Any]:
    """Triton's kernels keep experts as they were sent, so that they can be read back; others order them anew."""
    return {"moe_backend": "triton"} if model.mixture and not on_cpu else {}


def _quantization(recipe: Recipe, plan: LinearPlan) -> dict[str, Any] | None:
    """As a checkpoint on the Hub would say it; also with BF16 linears, whose FP8 cache needs scales to be loaded."""
    if not plan.quantized and not recipe.kv.quantized:
        return None
    block = recipe.rollout_linears.weight_block
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(plan.kept),
    }


def _split_fusions(plan: LinearPlan) -> list[str]:
    """Fused layers of which the recipe quantises some parts only."""
    problems, quantized = [], set(plan.quantized)
    for name in plan.kept:
        prefix, _, kind = name.rpartition(".")
        for group in _FUSED if experts_layer(name) is None else ():
            others = [f"{prefix}.{part}" for part in group if f"{prefix}.{part}" in quantized]
            if kind in group and others:
                problems.append(
                    f"{name} stays BF16 while {', '.join(others)} is FP8; vLLM keeps them in one matrix; "
                    "allowed: recipe.rollout_linears.exclude with all of them or none"
                )
    return problems


def _split_experts(plan: LinearPlan) -> list[str]:
    """Layers of which the recipe quantises some experts only."""
    kept = {layer: name for name in reversed(plan.kept) if (layer := experts_layer(name))}
    mixed = dict.fromkeys(layer for name in plan.quantized if (layer := experts_layer(name)) in kept)
    return [
        f"{kept[layer]} stays BF16 while others of {layer} are FP8; vLLM keeps experts of a layer in one precision; "
        "allowed: recipe.rollout_linears.exclude with all of them or none"
        for layer in mixed
    ]


def _split_blocks(model: Model, block: int) -> list[str]:
    """Fused layers whose parts would meet inside a block of scales; of a layer's experts, all alike, the first."""
    problems, seen = [], set()
    for name in model.plan.quantized:
        kind, layer = name.rpartition(".")[2], experts_layer(name)
        if layer is not None and layer in seen:
            continue
        seen.add(layer)
        if any(kind in group[:-1] for group in _FUSED) and model.rows[name] % block:
            problems.append(
                f"{name}: {model.rows[name]} rows, and vLLM needs a multiple of {block} (recipe.rollout_linears."
                "weight_block) where it keeps several layers in one matrix; allowed: a BF16 recipe, or rollout=torch"
            )
    return problems
