"""Where recipe, model, batch and the Megatron trainer contradict each other; keys are relative to the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conf.schema.algorithm import Algorithm
from conf.schema.base import Problem
from conf.schema.model import TinyArchitecture
from conf.schema.recipe import LinearPrecision
from conf.schema.trainers import MegatronTrainer

FP8_RECIPES: Final[Mapping[str, str]] = {
    "block": "blockwise",
    "tensor": "tensorwise",
    "tensor_delayed": "delayed",
    "mxfp8": "mxfp8",
}
"""Megatron's name of each of our scalings that it has."""

_ALIGNMENT: Final[Mapping[str, int]] = {"block": 128, "tensor": 16, "tensor_delayed": 16, "mxfp8": 32}
"""What both sides of an FP8 product are a multiple of, on every rank."""

_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class SplitSizes:
    """What parallel sizes must divide: attention heads, key/value heads, layers, width of an MLP and experts of a layer
    (0: none), each `expert_width` wide. `hidden` and `head_dim` are never split."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    width: int
    experts: int = 0
    expert_width: int = 0


def architecture_sizes(architecture: TinyArchitecture) -> SplitSizes:
    """Those of a model that is built from its dimensions."""
    experts = architecture.experts
    return SplitSizes(
        architecture.hidden_size,
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.head_dim,
        architecture.num_hidden_layers,
        architecture.intermediate_size,
        0 if experts is None else experts.count,
        0 if experts is None else experts.intermediate_size,
    )


def folder_sizes(config: Mapping[str, Any]) -> SplitSizes | None:
    """Those of a Hugging Face config.json; None where it does not say them as Qwen and Llama do."""
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    found: list[Any] = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in found):
        return None
    hidden, heads, layers, width = found
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    experts, expert_width = config.get("num_experts") or 0, config.get("moe_intermediate_size") or 0
    return SplitSizes(hidden, heads, kv_heads, head_dim, layers, width, experts, expert_width)


def row_multiple(trainer: MegatronTrainer) -> int:
    """What each row in a micro-batch is padded to: a context rank holds two equal parts of it."""
    return 2 * trainer.context_parallel_size if trainer.context_parallel_size > 1 else 1


def micro_batch_multiple(trainer: MegatronTrainer, linears: LinearPrecision) -> int:
    """What the packed tokens of a micro-batch are padded to, so that every rank's products have whole FP8 blocks."""
    fp8 = _ALIGNMENT.get(linears.scaling, 1) if linears.quantized else 1
    context = row_multiple(trainer)
    whole = fp8 * trainer.tensor_parallel_size * trainer.context_parallel_size
    return whole if whole % context == 0 else 2 * whole


def megatron_problems(trainer: MegatronTrainer, linears: LinearPrecision, algorithm: Algorithm) -> tuple[Problem, ...]:
    """What does not fit together whatever the model."""
    return (
        *_rank_problems(trainer, algorithm),
        *_device_problems(trainer, linears),
        *_schedule_problems(trainer),
        *_precision_problems(linears),
        *_delayed_problems(trainer, linears, algorithm),
        *_batch_problems(trainer, linears),
    )


def split_problems(
    trainer: MegatronTrainer, linears: LinearPrecision, sizes: SplitSizes, source: str
) -> tuple[Problem, ...]:
    """Parallel sizes that do not divide the model's; `source` names where those stand."""
    tensor = trainer.tensor_parallel_size
    parts = [
        ("tensor_parallel_size", sizes.heads, "attention heads"),
        ("pipeline_parallel_size", sizes.layers, "layers"),
    ]
    if sizes.experts:
        parts.append(("expert_parallel_size", sizes.experts, "experts"))
    else:
        parts.append(("tensor_parallel_size", sizes.width, "channels of the MLP"))
    problems = []
    for key, whole, what in parts:
        size = getattr(trainer, key)
        if whole % size:
            wrong = f"does not divide the {whole} {what} of {source}"
            problems.append(Problem(f"trainer.{key}", size, wrong, f"a divisor of {whole}"))
    if sizes.kv_heads % tensor and tensor % sizes.kv_heads:
        wrong = f"neither divides the {sizes.kv_heads} key/value heads of {source} nor is a multiple of them"
        allowed = f"a divisor or a multiple of {sizes.kv_heads}"
        problems.append(Problem("trainer.tensor_parallel_size", tensor, wrong, allowed))
    if trainer.expert_parallel_size > 1 and not sizes.experts:
        wrong = f"{source} has no experts"
        problems.append(Problem("trainer.expert_parallel_size", trainer.expert_parallel_size, wrong, "1"))
    if not problems:
        problems += _block_problems(tensor, linears, sizes, source)
    if sizes.experts and tensor > 1 and trainer.device == "cpu":
        wrong = "experts over tensor ranks need sequence parallelism, which the CPU does not have"
        problems.append(Problem("trainer.tensor_parallel_size", tensor, wrong, "1"))
    problems += _kept_problems(trainer, linears, sizes)
    return tuple(problems)


def _block_problems(tensor: int, linears: LinearPrecision, sizes: SplitSizes, source: str) -> Iterator[Problem]:
    """Sides of weights, on a tensor rank, that FP8 products cannot have."""
    alignment = _ALIGNMENT.get(linears.scaling, 1) if linears.quantized else 1
    queries, keys = sizes.heads // tensor * sizes.head_dim, max(1, sizes.kv_heads // tensor) * sizes.head_dim
    width = sizes.expert_width if sizes.experts else sizes.width // tensor
    sides = {"hidden": sizes.hidden, "query": queries, "query, key and value": queries + 2 * keys, "MLP": width}
    for what, side in sides.items():
        if side % alignment:
            wrong = f"needs multiples of {alignment}, and each of {tensor} tensor ranks has {side} {what} channels of "
            allowed = f"a scaling (or a trainer.tensor_parallel_size) whose multiple divides {side}"
            yield Problem("recipe.training_linears.scaling", linears.scaling, wrong + source, allowed)


def _kept_problems(trainer: MegatronTrainer, linears: LinearPrecision, sizes: SplitSizes) -> Iterator[Problem]:
    stage = sizes.layers // trainer.pipeline_parallel_size
    for key in ("keep_first_layers", "keep_last_layers"):
        kept = getattr(linears, key)
        if linears.quantized and kept > stage:
            wrong = f"exceeds the {stage} layers of a pipeline stage (trainer.pipeline_parallel_size "
            wrong += f"{trainer.pipeline_parallel_size})"
            yield Problem(f"recipe.training_linears.{key}", kept, wrong, f"an integer from 0 to {stage}")


def _rank_problems(trainer: MegatronTrainer, algorithm: Algorithm) -> Iterator[Problem]:
    if trainer.ranks % trainer.model_parallel_size:
        product = " * ".join(f"{key} {getattr(trainer, key)}" for key in _SIZES)
        wrong = f"is no multiple of {product}"
        yield Problem("trainer.ranks", trainer.ranks, wrong, f"a multiple of {trainer.model_parallel_size}")
        return
    others, expert = trainer.ranks // trainer.pipeline_parallel_size, trainer.expert_parallel_size
    if others % expert:
        wrong = f"does not divide the {others} tensor, context and data ranks of a pipeline stage"
        yield Problem("trainer.expert_parallel_size", expert, wrong, f"a divisor of {others}")
    samples, data = algorithm.samples_per_update, trainer.data_parallel_size
    if data > samples:
        wrong = f"makes {data} data-parallel ranks for the {samples} samples of an update"
        yield Problem("trainer.ranks", trainer.ranks, wrong, f"at most {samples * trainer.model_parallel_size}")


def _device_problems(trainer: MegatronTrainer, linears: LinearPrecision) -> Iterator[Problem]:
    if trainer.device == "gpu":
        return
    context = trainer.context_parallel_size
    if context > 1:
        yield Problem("trainer.context_parallel_size", context, "needs Transformer Engine, hence a GPU", "1")
    if linears.quantized:
        wrong = "trainer=megatron computes FP8 with Transformer Engine, and trainer.device is cpu"
        yield Problem("recipe.training_linears.format", linears.format, wrong, "bf16, or trainer.device=gpu")
    if trainer.offload:
        yield Problem("trainer.offload", True, "on CPU there is no other memory to move to", "false")


def _schedule_problems(trainer: MegatronTrainer) -> Iterator[Problem]:
    optimizer, schedule, key = trainer.optimizer, trainer.lr_schedule, "trainer.optimizer"
    if schedule.shape == "constant":
        return
    if schedule.min_lr > optimizer.learning_rate:
        wrong = f"exceeds {key}.learning_rate {optimizer.learning_rate:g}"
        allowed = f"a number from 0 to {optimizer.learning_rate:g}"
        yield Problem("trainer.lr_schedule.min_lr", schedule.min_lr, wrong, allowed)
    if schedule.decay_updates is not None and schedule.decay_updates <= optimizer.warmup_steps:
        wrong = f"ends before the warm-up does ({key}.warmup_steps {optimizer.warmup_steps})"
        allowed = f"an integer from {optimizer.warmup_steps + 1}"
        yield Problem("trainer.lr_schedule.decay_updates", schedule.decay_updates, wrong, allowed)


def _precision_problems(linears: LinearPrecision) -> Iterator[Problem]:
    """What Transformer Engine cannot run of an FP8 recipe."""
    if not linears.quantized:
        return
    side, scaling = "recipe.training_linears", linears.scaling
    if scaling not in FP8_RECIPES:
        yield Problem(f"{side}.scaling", scaling, "trainer=megatron does not have it", ", ".join(FP8_RECIPES))
    if scaling == "block" and (linears.weight_block != (128, 128) or linears.activation_group != 128):
        wrong = f"Transformer Engine has 128 x 128 alone, with activation_group 128 (here {linears.activation_group})"
        yield Problem(f"{side}.weight_block", list(linears.weight_block), wrong, "[128, 128] with activation_group 128")
    if scaling in ("tensor", "tensor_delayed") and linears.scale != "fp32":
        wrong = f"trainer=megatron has it with scaling block alone, and this is {scaling}"
        yield Problem(f"{side}.scale", linears.scale, wrong, "fp32")
    kept = {"keep_first_layers": linears.keep_first_layers, "keep_last_layers": linears.keep_last_layers}
    for key, count in kept.items():
        if scaling == "tensor_delayed" and count:
            yield Problem(f"{side}.{key}", count, "Megatron keeps no layer in BF16 under delayed scaling", "0")
    if linears.exclude:
        wrong = "trainer=megatron keeps whole layers only"
        allowed = "[], with keep_first_layers and keep_last_layers"
        yield Problem(f"{side}.exclude", list(linears.exclude), wrong, allowed)


def _delayed_problems(trainer: MegatronTrainer, linears: LinearPrecision, algorithm: Algorithm) -> Iterator[Problem]:
    """What scales that live on from pass to pass do not go with."""
    if not linears.quantized or linears.scaling != "tensor_delayed":
        return
    if trainer.recompute == "full":
        # Transformer Engine notes the scales of every pass for its backward pass. A score has none, and a backward pass
        # would compute its layers again with those of the score.
        wrong = "under scaling tensor_delayed layers would be computed again with the scales of an earlier pass"
        yield Problem("trainer.recompute", trainer.recompute, wrong, "selective")
    if algorithm.kl_coef > 0:
        # Transformer Engine moves all scales of the process together, and a checkpoint has those of the policy alone.
        wrong = "under scaling tensor_delayed the reference policy's scales move with each update of the policy"
        yield Problem("algorithm.kl_coef", algorithm.kl_coef, wrong, "0, or another recipe.training_linears.scaling")


def _batch_problems(trainer: MegatronTrainer, linears: LinearPrecision) -> Iterator[Problem]:
    multiple = micro_batch_multiple(trainer, linears)
    if trainer.tokens_per_micro_batch < multiple:
        wrong = f"is less than the {multiple} tokens that a micro-batch is padded to in this precision and layout"
        budget = trainer.tokens_per_micro_batch
        yield Problem("trainer.tokens_per_micro_batch", budget, wrong, f"an integer >= {multiple}")
