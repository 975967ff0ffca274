"""One rank of the Megatron trainer on CPU, for the tests of its state: `python -m ... JOB RANK`.

JOB is a JSON file: `layout` (without the rank), `rendezvous`, `out`, and `tasks`, each with `name`, `folder` of the
model, `checkpoint` to load and `storage` of moments. Of each task the rank writes `NAME.RANK.json` below `out`, and all
ranks together the checkpoint `NAME`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.engines import megatron_cpu
from tasks.engines.megatron_config import Layout
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineError, TokenRows
from tasks.numerics.fingerprint import fingerprints
from tasks.numerics.fp8 import NonFiniteError
from tasks.numerics.kv_scales import scales_to_json
from tests.engines.megatron_state import CALIBRATIONS, SCALINGS, recipe_of, token_rows, trainer_config


class HalfOwner:
    """An optimiser of which each of two data-parallel ranks owns every other parameter."""

    def __init__(self, whole: Any, rank: int) -> None:
        self._whole, self._rank = whole, rank

    @property
    def updates(self) -> int:
        return int(self._whole.updates)

    def _owner(self, name: str) -> int:
        return list(self._whole.weights()).index(name) % 2

    def weights(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._whole.weights().items() if self._owner(name) == self._rank}

    def live_state(self) -> dict[str, Tensor]:
        state = self._whole.live_state()
        return {name: t for name, t in state.items() if self._owner(name.rpartition(".")[0]) == self._rank}

    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor], updates: int) -> None:
        assert weights.keys() == self.weights().keys()
        assert all(self._owner(name.rpartition(".")[0]) == self._rank for name in state)
        everything = {}
        for name, held in self._whole.weights().items():
            everything[name] = weights[name] if name in weights else torch.empty_like(held)
            dist.broadcast(everything[name], self._owner(name))
        self._whole.load(everything, state, updates)


def engine_for(task: Mapping[str, Any], layout: Layout) -> Any:
    from tasks.engines.megatron_engine import MegatronSpec, MegatronTrainerEngine

    config = trainer_config("megatron", Path(task["folder"]))
    optimizer = config.trainer.optimizer.model_copy(update={"state": task["storage"]})
    trainer = config.trainer.model_copy(update={"optimizer": optimizer})
    spec = MegatronSpec(config.recipe, config.algorithm, config.correction, trainer, config.rollout)
    engine = MegatronTrainerEngine(Path(task["folder"]), spec, layout)
    whole = len(engine._optimizer.weights()) == len(engine._policy.live_weights())
    if layout.data == 2 and layout.expert == 1 and whole:
        engine._optimizer = HalfOwner(engine._optimizer, layout.rank)
    return engine


def exports(engine: Any, rank: int) -> dict[str, dict[str, int]]:
    """Fingerprints of the tensors that came, by scaling; those of the payload are of the same."""
    from tasks.engines.megatron_export import exporter_of, gather_payload

    found = {}
    for name, overrides in SCALINGS.items():
        payload = engine.export_weights(recipe_of(*overrides))
        assert payload.version == engine.version
        assert fingerprints(payload.tensors) == payload.fingerprints
        assert rank == 0 or not payload.tensors
        # Nothing drags the memory of others along.
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in payload.tensors.values())
        found[name] = payload.fingerprints
    policy, recipe = engine._policy, recipe_of(*SCALINGS["block"])
    quantized = plan_linears(engine._shape, recipe.rollout_linears).quantized
    exporter = exporter_of(policy.model.plan.shape, engine._world, policy.live_weights(), recipe, quantized)
    # In messages of one parameter or a few.
    assert gather_payload(exporter, recipe, 0, {}, limit=30_000).fingerprints == found["block"]
    return found


def calibrations(engine: Any) -> dict[str, Any]:
    """Scales and metrics of one row, which is one rank's alone, and then of all against those."""
    rows, found, spec = token_rows(), {}, engine._spec
    one = TokenRows(rows.tokens[:1], rows.lengths[:1])
    for name, overrides in CALIBRATIONS.items():
        engine._spec, engine._scales = replace(spec, recipe=recipe_of("recipe=fp8_rollout_kv", *overrides)), {}
        found[name] = []
        for measured in (one, rows):
            metrics = engine.calibrate(measured)
            found[name].append({"scales": scales_to_json(engine.report().scales), "metrics": metrics})
    engine._spec, engine._scales = spec, {}
    return found


def refused(engine: Any, folders: Mapping[str, str]) -> dict[str, str]:
    """What loading each of these says; nothing is changed by it."""
    before, found = engine.report(), {}
    for name, folder in folders.items():
        try:
            engine.load(Path(folder))
        except EngineError as error:
            found[name] = str(error)
    assert engine.report() == before
    return found


def damaged_export(engine: Any, rank: int) -> str:
    """Of a policy with one infinite weight, on rank 1."""
    if rank == 1:
        engine._policy.live_weights()["decoder.layers.1.mlp.linear_fc2.weight"][3, 5] = torch.inf
    try:
        engine.export_weights(recipe_of("recipe=fp8_rollout"))
    except NonFiniteError as error:
        return str(error)
    return "exported"


def unequal_copies(engine: Any, rank: int, layout: Layout) -> list[str]:
    """Problems in the report before and after one copy of a weight changes on rank 1, if ranks share any."""
    weights = engine._policy.live_weights()
    shared = "output_layer.weight" if layout.pipeline > 1 else "decoder.layers.0.self_attention.q_layernorm.weight"
    before = list(engine.report().problems)
    if rank == 1 and shared in weights:
        weights[shared].view(-1)[0] += 1
    return [*before, *engine.report().problems]


def failed_save(engine: Any, rank: int, out: Path) -> str:
    """To a folder that one rank does not have."""
    folder = out / "nowhere"
    if rank == 0:
        folder = out / "somewhere"
        folder.mkdir()
    try:
        engine.save(folder)
    except EngineError as error:
        return str(error)
    return "saved"


def results(task: Mapping[str, Any], layout: Layout, out: Path) -> dict[str, Any]:
    engine = engine_for(task, layout)
    fresh = engine.report().fingerprints
    # No random state is part of a checkpoint.
    torch.manual_seed(layout.rank + 17)
    engine.load(Path(task["checkpoint"]))
    report = engine.report()
    found = {"fresh": fresh, "report": report.fingerprints, "version": engine.version, "scales": str(report.scales)}
    saved = out / task["name"]
    if layout.rank == 0:
        saved.mkdir()
    if layout.world > 1:
        dist.barrier()
    engine.save(saved)
    found["updates"] = engine._optimizer.updates
    if task["storage"] != "fp32":
        return found
    found["exports"] = exports(engine, layout.rank)
    found["calibrations"] = calibrations(engine)
    found["refused"] = refused(engine, task["refused"])
    if task["refused"]:
        found["unsaved"] = failed_save(engine, layout.rank, out)
        found["infinite"] = damaged_export(engine, layout.rank)
    found["unequal"] = unequal_copies(engine, layout.rank, layout)
    return found


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    megatron_cpu.install()
    from tasks.engines.megatron_model import start_groups, stop_groups

    layout, out = Layout(**job["layout"], rank=rank), Path(job["out"])
    start_groups(layout, on_gpu=False, rendezvous=job["rendezvous"], timeout_s=60, seed=1)
    for task in job["tasks"]:
        (out / f"{task['name']}.{rank}.json").write_text(json.dumps(results(task, layout, out)))
    stop_groups()


if __name__ == "__main__":
    main()
