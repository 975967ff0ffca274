"""Trainers on two ranks that are saved and resumed, in the same layout bit for bit, and in others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from tests.engines.megatron_models import save_model
from tests.engines.rank_processes import run_ranks

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

# The first test runs all processes.
pytestmark = pytest.mark.timeout(900)

KL = "algorithm.kl_coef=0.05"
CASES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "tied": ("qwen3_tied", "float32", (KL, "recipe=fp8_rollout_kv")),
    "bf16": ("qwen3_tied", "bfloat16", ("trainer.optimizer.weights=bf16_kahan", "trainer.optimizer.state=bf16")),
    "fp8": ("qwen3_tied", "float32", ("trainer.optimizer.state=fp8",)),
    "moe": ("moe", "float32", ()),
}
LAYOUTS: Mapping[str, tuple[Mapping[str, int], str | None, tuple[str, ...]]] = {
    # Keys of the trainer, whose checkpoints are loaded besides, and cases.
    "pipeline": ({"ranks": 2, "pipeline_parallel_size": 2}, None, ("tied", "moe")),
    "tensor": ({"ranks": 2, "tensor_parallel_size": 2}, "pipeline", ("tied",)),
    "data": ({"ranks": 2}, "tensor", ("tied",)),
    "expert": ({"ranks": 2, "expert_parallel_size": 2}, "pipeline", ("moe",)),
    "tensor_rounded": ({"ranks": 2, "tensor_parallel_size": 2}, None, ("bf16", "fp8")),
    "data_rounded": ({"ranks": 2}, "tensor_rounded", ("bf16",)),
    "one": ({"ranks": 1}, "data", ("tied",)),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("continue")
    folders = {name: save_model(name, base / name) for name in ("qwen3_tied", "moe")}
    results = {}
    for name, (keys, source, cases) in LAYOUTS.items():
        (out := base / "runs" / name).mkdir(parents=True)
        listed = []
        for case in cases:
            model, dtype, overrides = CASES[case]
            folder = str(folders[model])
            listed.append({"name": case, "folder": folder, "overrides": overrides, "dtype": dtype, "poisoned": False})
        at = None if source is None else str(base / "runs" / source)
        run_ranks(
            "tests.engines.megatron_continue_worker",
            {"layout": keys, "source": at, "cases": listed},
            out,
            keys["ranks"],
        )
        for case in cases:
            results[name, case] = [json.loads((out / f"{case}.{r}.json").read_text()) for r in range(keys["ranks"])]
    return results


def test_a_resumed_trainer_continues_bitwise_on_every_rank(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    for ranks in found.values():
        for own in ranks:
            assert own["loaded"] == own["first"]["state"] == ranks[0]["first"]["state"]
            assert own["resumed"] == own["second"]
            assert own["second"]["state"]["version"] == 2
            assert own["second"]["state"]["fingerprints"] != own["first"]["state"]["fingerprints"]


def test_another_layout_holds_the_same_and_goes_on_alike(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    compared = 0
    for (name, case), ranks in found.items():
        source = LAYOUTS[name][1]
        if source is None:
            continue
        before = found[source, case][0]
        for own in ranks:
            assert own["moved"]["state"] == before["first"]["state"]
            kept = ("loss/", "optim/", "policy/", "calibration/")
            expected = {k: v for k, v in before["second"]["metrics"].items() if k.startswith(kept)}
            measured = {k: own["moved"]["metrics"][k] for k in expected}
            tolerance = 1e-3 if CASES[case][1] == "float32" else 0.05
            assert measured == pytest.approx(expected, rel=tolerance, abs=tolerance), (name, case)
            compared += 1
    assert compared == 9
