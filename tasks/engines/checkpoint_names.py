"""A model's weights under the names of its Hugging Face checkpoint.

transformers 5 keeps all experts of a layer in two tensors. Checkpoints, a sync and the engines that read either have
one matrix for each projection of each expert: `model.layers.0.mlp.experts.7.up_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from tasks.engines.protocols import EngineError

MIXTURES = ("qwen3_moe",)
"""Model types with fused experts whose checkpoint names and layout are known here."""

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(?:gate_proj|up_proj|down_proj)")


def experts_layer(name: str) -> str | None:
    """Of the module name of one expert's projection, the part that all experts of its layer share; else None."""
    match = _EXPERT.fullmatch(name)
    return match.group(1) if match else None


def fused_experts(model: nn.Module) -> tuple[str, ...]:
    """Module names of fused experts; `EngineError` for a model type whose layout nobody has looked at."""
    modules = (name.rpartition(".")[0] for name, p in model.named_parameters() if p.ndim == 3)
    found = tuple(dict.fromkeys(name for name in modules if name.rpartition(".")[2] == "experts"))
    kind = _model_type(model)
    if found and kind not in MIXTURES:
        raise EngineError(
            f"model.path: model type {kind} keeps fused experts ({found[0]}) in a layout that is not known; allowed: "
            f"a dense model, or {', '.join(MIXTURES)} with rollout=vllm"
        )
    return found


def check_dense(model: nn.Module, folder: Path | None) -> None:
    """`EngineError` for a mixture of experts, which the PyTorch engines neither train nor sample from."""
    found = fused_experts(model)
    if found:
        source = "model.architecture.experts" if folder is None else f"model.path = {folder}"
        raise EngineError(
            f"{source}: model type {_model_type(model)} is a mixture of experts ({found[0]}), which the "
            "PyTorch engines do not run; allowed: a dense model, or rollout=vllm with trainer=megatron"
        )


def checkpoint_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by checkpoint name, in the model's order; experts are views of the fused tensors.

    On a model of shapes alone the views have shapes alone, too.
    """
    fused, found = set(fused_experts(model)), {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module not in fused:
            found[name] = parameter.detach()
        elif kind == "gate_up_proj":
            down = model.get_parameter(f"{module}.down_proj")
            found |= {f"{part}.weight": matrix for part, matrix in _matrices(module, parameter, down)}
    return found


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear layer by checkpoint name, routers and single experts among them."""
    fused = set(fused_experts(model))
    routers = {f"{name.rpartition('.')[0]}.gate" for name in fused}
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name in routers:
            rows, columns = module.get_parameter("weight").shape
            shapes[name] = (rows, columns)
        elif name in fused:
            parts = _matrices(name, module.get_parameter("gate_up_proj"), module.get_parameter("down_proj"))
            shapes |= {part: (matrix.shape[0], matrix.shape[1]) for part, matrix in parts}
    return shapes


def _matrices(module: str, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    """From `gate_up` `[experts, 2 * rows, columns]`, gate above up, and `down` `[experts, columns, rows]`."""
    gate, up = gate_up.detach().chunk(2, dim=1)
    for expert in range(gate_up.shape[0]):
        yield f"{module}.{expert}.gate_proj", gate[expert]
        yield f"{module}.{expert}.up_proj", up[expert]
        yield f"{module}.{expert}.down_proj", down.detach()[expert]


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", "unknown"))
