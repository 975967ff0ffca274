"""What delayed scaling remembers between steps, in a checkpoint: Transformer Engine's scales and histories of amax.

Every other scaling forgets: a product's scales are of its own operands. The reduction of amax makes histories equal on
all ranks of a pipeline stage, so that a rank takes its layers' from whichever rank wrote them. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.engines.protocols import EngineError
from tasks.engines.tensor_files import rank_file, rank_files

if TYPE_CHECKING:
    from tasks.engines.megatron_model import MegatronModel

STEM = "fp8-history"
_SIDES, _KINDS = ("fwd", "bwd"), ("scale", "amax_history")
_FORWARD_TENSORS = 3
"""Input, weight and output of a product."""


def save_history(model: MegatronModel, directory: Path, rank: int, ranks: int) -> None:
    """Write this rank's; before its first pass there is none."""
    tensors = {
        f"{name}.{side}.{kind}": getattr(module.fp8_meta[f"scaling_{side}"], kind).cpu()
        for name, module in _modules(model)
        for side in _SIDES
        for kind in _KINDS
        if f"scaling_{side}" in module.fp8_meta
    }
    save_file(tensors, directory / rank_file(STEM, rank, ranks))


def load_history(model: MegatronModel, directory: Path) -> None:
    """Restore what `save_history` of any layout wrote; `EngineError` names a layer that is missing."""
    wanted, found = dict(_modules(model)), dict[str, Tensor]()
    for file in rank_files(directory, STEM):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.rsplit(".", 2)[0] in wanted and name not in found:
                    found[name] = tensors.get_tensor(name)
    if not found:
        return
    histories = {name: _history(directory, name, module, found) for name, module in wanted.items()}
    from megatron.core.fp8_utils import get_fp8_recipe

    for name, module in wanted.items():
        parts = histories[name]
        module.fp8_meta["num_gemms"] = parts["fwd", "scale"].numel() // _FORWARD_TENSORS
        module.init_fp8_meta_tensors(get_fp8_recipe(model.module.config))
        for (side, kind), value in parts.items():
            getattr(module.fp8_meta[f"scaling_{side}"], kind).copy_(value)


def _history(directory: Path, name: str, module: Any, found: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """A module's part of what was found; `EngineError` where it is missing, or of another number of products."""
    parts = {(s, k): found[f"{name}.{s}.{k}"] for s in _SIDES for k in _KINDS if f"{name}.{s}.{k}" in found}
    if len(parts) < len(_SIDES) * len(_KINDS):
        raise EngineError(f"{directory}: no history of amax for {name}")
    # Experts of a rank have a product each; of any other module (attention keeps three) the number never changes.
    products, wanted = parts["fwd", "scale"].numel() // _FORWARD_TENSORS, getattr(module, "num_gemms", None)
    if wanted not in (None, products):
        raise EngineError(
            f"{directory}: the history of amax for {name} is of {products} products, and a rank has {wanted} here; "
            "allowed under scaling tensor_delayed: the trainer.expert_parallel_size that was saved"
        )
    return parts


def _modules(model: MegatronModel) -> Iterator[tuple[str, Any]]:
    """Modules of Transformer Engine that have products, attention too, by their name in the whole model."""
    for name, module in model.module.decoder.layers.named_modules():
        if hasattr(module, "init_fp8_meta_tensors") and hasattr(module, "_get_weight_quantizers"):
            local, _, rest = name.partition(".")
            yield f"decoder.layers.{model.part.layers[int(local)]}.{rest}", module
