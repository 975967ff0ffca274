"""The flow of a sweep whose runs are in MLflow already: nothing is run again, and it is compared and judged."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flows.sweep_report import stored_plan
from tests.flows.runs import OWN_PREFECT, fp8_grpo, succeeded
from tests.flows.test_comparison import Foreign

pytestmark = pytest.mark.timeout(600)


def _night(foreign: Foreign, sweep_id: str, accuracy: float) -> None:
    for recipe in ("bf16", "fp8_e2e"):
        foreign.run(sweep_id, recipe, 0, accuracy, name=f"{sweep_id}-{recipe}-s0", tags={"sweep": "smoke"})


def test_finished_runs_are_not_repeated_and_leaving_the_corridor_fails(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    for sweep_id, accuracy in (("n1", 0.5), ("n2", 0.5), ("n3", 0.9)):
        _night(foreign, sweep_id, accuracy)
    choice = ["sweep.recipes=[bf16,fp8_e2e]", "sweep.seeds=[0]", "sweep.corridor.min_history=1"]
    places = [f"runs_dir={tmp_path}/runs", f"tracking.uri={foreign.uri}", f"storage.url={tmp_path}/checkpoints"]
    done = succeeded(fp8_grpo(["sweep", "smoke", *choice, *places, "--sweep-id", "n2"], OWN_PREFECT))
    assert "sweep n2: 2 runs, 2 of them done before" in done.out
    figures = json.loads((tmp_path / "runs" / "sweeps" / "n2" / "comparison.json").read_text())
    assert [check["place"] for check in figures["corridors"]["fp8_e2e"]] == ["inside", "inside"]
    plan = stored_plan(foreign.client, "fp8-grpo", "n2")
    assert plan is not None and [child.name for child in plan[1]] == ["n2-bf16-s0", "n2-fp8_e2e-s0"]
    told = "sweep.corridor.notify=slack-webhook/missing"
    left = fp8_grpo(["sweep", "smoke", *choice, told, *places, "--sweep-id", "n3"])
    assert left.code == 1, left.out
    assert "SweepError: sweep n3: corridor, bf16: eval/accuracy 0.9, above [0.47, 0.53] of 2 earlier sweeps" in left.out


def test_a_sweep_without_time_begins_nothing_and_says_what_goes_on(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.run("n1", "bf16", 0, 0.5, name="n1-bf16-s0", tags={"sweep": "smoke"})
    choice = ["sweep.recipes=[bf16,fp8_e2e]", "sweep.seeds=[0]", "sweep.children=shared", "sweep.allocation_s=0.5"]
    places = [f"runs_dir={tmp_path}/runs", f"tracking.uri={foreign.uri}", f"storage.url={tmp_path}/checkpoints"]
    done = fp8_grpo(["sweep", "smoke", *choice, *places, "--sweep-id", "n1"])
    assert done.code == 3, done.out
    again = shlex.join(["fp8-grpo", "sweep", "smoke", *choice, *places, "--sweep-id", "n1"])
    assert done.out.splitlines()[-1] == f"1 run not finished; this goes on: {again}"
    figures = json.loads((tmp_path / "runs" / "sweeps" / "n1" / "comparison.json").read_text())
    # The report of what there is; what is not there yet is no regression.
    assert [variant["variant"] for variant in figures["variants"]] == ["bf16"] and not figures["corridors"]
    assert not (tmp_path / "runs" / "sweeps" / "n1" / "logs").exists()
