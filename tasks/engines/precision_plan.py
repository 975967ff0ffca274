"""Which linear layers a recipe quantises in a given model, by exact module name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from conf.schema import LinearPrecision
from tasks.engines.checkpoint_names import linear_shapes
from tasks.engines.protocols import EngineError
from tasks.numerics.delayed_scaling import HistorySettings
from tasks.numerics.fp8_linear import BlockSpec, linear_spec

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ALWAYS_HIGH = ("lm_head",)
_ROUTER_SUFFIXES = (".mlp.gate", ".block_sparse_moe.gate", ".mlp.router")


@dataclass(frozen=True)
class LinearPlan:
    """`quantized` and `kept` partition the model's linear layers, in the model's order."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]


def block_spec(precision: LinearPrecision) -> BlockSpec:
    """The numerics' formats for a recipe's linear layers; keys that its scaling does not use leave no trace."""
    rows, columns = precision.weight_block
    return linear_spec(
        precision.scaling,
        precision.scale == "power_of_two",
        precision.gradient_format,
        (rows, columns),
        precision.activation_group,
        HistorySettings(precision.amax_history, precision.amax_compute),
    )


def layer_number(name: str) -> int | None:
    """Decoder layer of a module or tensor name, None outside the decoder stack."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def _stays_high(name: str, precision: LinearPrecision, layers: int) -> bool:
    layer = layer_number(name)
    if layer is None or name in _ALWAYS_HIGH or name.endswith(_ROUTER_SUFFIXES) or name in precision.exclude:
        return True
    return layer < precision.keep_first_layers or layer >= layers - precision.keep_last_layers


def plan_linears(model: nn.Module, precision: LinearPrecision) -> LinearPlan:
    """Split the model's linear layers by the recipe; each matrix of each expert is one.

    lm_head, everything outside the decoder layers and the MoE router always stay BF16. Raises
    `EngineError` for an excluded name that does not exist, and for fused experts of an unknown layout, which
    would be left out silently.
    """
    names = list(linear_shapes(model))
    if not precision.quantized:
        return LinearPlan((), tuple(names))
    unknown = sorted(set(precision.exclude) - set(names))
    if unknown:
        raise EngineError(f"exclude names no linear layer of this model: {', '.join(unknown)}")
    layers = 1 + max((n for n in map(layer_number, names) if n is not None), default=-1)
    quantized = tuple(n for n in names if not _stays_high(n, precision, layers))
    if not quantized:
        raise EngineError("the recipe asks for FP8 linears, and none of the model's layers is left to quantise")
    chosen = set(quantized)
    return LinearPlan(quantized, tuple(n for n in names if n not in chosen))


def scale_name(weight: str) -> str:
    """Name of the block scales beside a quantised weight, as FP8 checkpoints on the Hub spell it."""
    return weight + "_scale_inv"
