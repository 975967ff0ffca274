"""Megatron's parameters and their optimiser state under Hugging Face names, whole, and back. One tensor rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.engines.megatron_names import ModelShape, fuse, source_shape, split
from tasks.engines.protocols import EngineError

if TYPE_CHECKING:
    from tasks.engines.megatron_model import MegatronModel

_STEP = "step"
"""State of a parameter as a whole; everything else has the parameter's shape."""


def named_as_hf(model: MegatronModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all parameters, by Megatron's names, as those of a Hugging Face checkpoint; dtype is kept."""
    found: dict[str, Tensor] = {}
    for entry in model.entries:
        found |= split(model.plan.shape, entry, [tensors[entry.name]])
    return found


def named_as_megatron(model: MegatronModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `named_as_hf`; rows that pad the vocabulary are zeros."""
    shape, part = model.plan.shape, model.part
    return {
        entry.name: fuse(shape, entry, [tensors[name] for name in entry.sources], part.tensor_rank, part.tensor_size)
        for entry in model.entries
    }


def state_as_hf(model: MegatronModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimiser's `<parameter>.<kind>`, by Hugging Face names; parameters that were never updated are absent."""
    found: dict[str, Tensor] = {}
    kinds = _kinds(state)
    for entry in model.entries:
        for kind in kinds.get(entry.name, ()):
            tensor = state[f"{entry.name}.{kind}"]
            if kind == _STEP:
                parts = {name: tensor.clone() for name in entry.sources}
            else:
                parts = split(model.plan.shape, entry, [tensor])
            found |= {f"{name}.{kind}": part for name, part in parts.items()}
    return found


def state_as_megatron(model: MegatronModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `state_as_hf`; `EngineError` for state that the model's parameters cannot be made of."""
    shape, part, kinds = model.plan.shape, model.part, _kinds(state)
    unknown = sorted(kinds.keys() - {name for entry in model.entries for name in entry.sources})
    if unknown:
        raise EngineError(f"{unknown[0]}: optimiser state of a weight that the model lacks")
    found: dict[str, Tensor] = {}
    for entry in model.entries:
        held = [kinds.get(name, ()) for name in entry.sources]
        if any(set(other) != set(held[0]) for other in held[1:]):
            raise EngineError(f"{', '.join(entry.sources)}: optimiser state differs in kind: {held}")
        for kind in held[0]:
            parts = [state[f"{name}.{kind}"] for name in entry.sources]
            if kind != _STEP:
                _check_shapes(shape, kind, dict(zip(entry.sources, parts, strict=True)))
                found[f"{entry.name}.{kind}"] = fuse(shape, entry, parts, part.tensor_rank, part.tensor_size)
            elif any(not torch.equal(other, parts[0]) for other in parts[1:]):
                raise EngineError(f"{', '.join(entry.sources)}: updated {[float(p) for p in parts]} times")
            else:
                found[f"{entry.name}.{kind}"] = parts[0]
    return found


def _check_shapes(shape: ModelShape, kind: str, parts: Mapping[str, Tensor]) -> None:
    for name, tensor in parts.items():
        found, wanted = tuple(tensor.shape), source_shape(shape, name)
        if found != wanted:
            raise EngineError(f"{name}.{kind}: checkpoint {found}, this optimiser {wanted}")


def _kinds(state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Kinds of state that each parameter has."""
    found: dict[str, tuple[str, ...]] = {}
    for full in state:
        name, _, kind = full.rpartition(".")
        found[name] = (*found.get(name, ()), kind)
    return found
