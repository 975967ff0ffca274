"""One rank of a Megatron trainer that is saved, resumed and moved: `python -m ...megatron_continue_worker JOB RANK`.

JOB as that of `megatron_rank_worker`, and `source`: the folder of a layout that has saved already, or None. Each case
trains a step and saves below `out`; then both it and a resumed trainer train another. Under `out` the rank writes
`NAME.RANK.json`: what all of these gave.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.megatron_rank_worker import SAMPLES, build, configured, layout, rollout_batch


def step(engine: Any) -> dict[str, Any]:
    """Metrics of a step and its calibration, and what the engine is after it."""
    batch = rollout_batch()
    scores = engine.score(batch)
    metrics = engine.train(batch, scores.logprobs, torch.linspace(-1.5, 1.5, SAMPLES))
    metrics |= engine.calibrate(batch.rows())
    return {"metrics": scores.metrics | metrics, "state": state(engine)}


def state(engine: Any) -> dict[str, Any]:
    report = engine.report()
    assert report.problems == ()
    scales = {f"{layer}.{part}": scale for (layer, part), scale in report.scales.items()}
    return {"version": report.version, "fingerprints": report.fingerprints, "scales": scales}


def saved(engine: Any, folder: Path, rank: int) -> Path:
    if rank == 0:
        folder.mkdir(exist_ok=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    engine.save(folder)
    return folder


def results(case: dict[str, Any], job: dict[str, Any], rank: int) -> dict[str, Any]:
    config, folder = configured(case, job["layout"]), Path(case["folder"])
    engine = build(config, folder, case["dtype"], rank)
    found = {"first": step(engine)}
    at = saved(engine, Path(job["out"]) / case["name"], rank)
    found["second"] = step(engine)
    resumed = build(config, folder, case["dtype"], rank)
    # Another process has other random states.
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    resumed.load(at)
    found["loaded"] = state(resumed)
    found["resumed"] = step(resumed)
    if job["source"] is not None:
        moved = build(config, folder, case["dtype"], rank)
        moved.load(Path(job["source"]) / case["name"])
        found["moved"] = {"state": state(moved)} | {"metrics": step(moved)["metrics"]}
    return found


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    from tasks.engines import megatron_cpu

    megatron_cpu.install()
    from tasks.engines.megatron_model import start_groups, stop_groups

    start_groups(layout(configured(job["cases"][0], job["layout"]), rank), False, job["rendezvous"], 60, seed=1)
    for case in job["cases"]:
        (Path(job["out"]) / f"{case['name']}.{rank}.json").write_text(json.dumps(results(case, job, rank)))
    stop_groups()


if __name__ == "__main__":
    main()
