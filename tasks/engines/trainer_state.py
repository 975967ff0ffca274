"""What every trainer engine exports, and what it writes beside its weights and its optimiser's state."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from conf.schema import Recipe
from tasks.engines.precision_plan import block_spec, scale_name
from tasks.engines.protocols import EngineError, SyncPayload
from tasks.numerics.fingerprint import fingerprints
from tasks.numerics.fp8 import quantize_weight_as
from tasks.numerics.kv_scales import CalibrationError, Scales, scale_faults, scales_from_json, scales_to_json

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""How the names of the two kinds of files begin; see `tasks.engines.tensor_files.rank_file`."""

STATE = "trainer.json"


def export_payload(
    recipe: Recipe, version: int, weights: Mapping[str, Tensor], quantized: Collection[str], scales: Scales
) -> SyncPayload:
    """BF16 `weights` by Hugging Face name as the recipe's rollout side holds them; `quantized` names linear layers.

    Each is quantised once, here; the others are copied.
    """
    spec, codes = block_spec(recipe.rollout_linears), {f"{name}.weight" for name in quantized}
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in codes:
            q = quantize_weight_as(name, weight, spec.weight_format)
            tensors[name], tensors[scale_name(name)] = q.codes, q.scales
        else:
            tensors[name] = weight.clone()
    return SyncPayload(version, tensors, dict(scales) if recipe.kv.quantized else {}, fingerprints(tensors))


@dataclass(frozen=True)
class TrainerState:
    """Small state of a trainer. `reference`: fingerprint of the KL term's policy, None without one."""

    version: int
    reference: str | None
    updates: int
    scales: Scales


def write_state(directory: Path, state: TrainerState) -> None:
    """As JSON in the folder of a checkpoint."""
    # float.hex keeps every bit and cannot be rounded by a JSON reader.
    written = vars(state) | {"scales": scales_to_json(state.scales)}
    (directory / STATE).write_text(json.dumps(written, indent=1, sort_keys=True))


def read_state(directory: Path, reference: str | None, layers: int, heads: int | None) -> TrainerState:
    """What `write_state` wrote.

    `EngineError` unless it is there, the KL term's policy is `reference`, and the scales are those of `layers` layers
    with `heads` scales for each part.
    """
    if not (directory / STATE).is_file():
        raise EngineError(f"{directory} is no checkpoint of this engine: it lacks {STATE}")
    state = json.loads((directory / STATE).read_text())
    if state["reference"] != reference:
        raise EngineError(
            f"{directory}: the KL term's reference policy was {state['reference']}, and the starting weights here "
            f"are {reference}: a continued run needs the model that it started from"
        )
    try:
        scales = scales_from_json(state["scales"])
    except CalibrationError as error:
        raise EngineError(f"{directory / STATE}: {error}") from error
    faults = scale_faults(scales, layers, heads) if scales else ()
    if faults:
        raise EngineError(f"{directory}: the Q/K/V scales do not fit this model and recipe: {faults[0]}")
    return TrainerState(state["version"], state["reference"], state["updates"], scales)
