"""A comparison from MLflow alone, of runs that the plain MLflow client wrote with the same metric names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from conf.compose import compose
from flows.champions import register_champions
from flows.cli import main
from flows.comparison import Comparison, compare
from flows.corridor import PlannedChild
from flows.sweep_report import make_report
from infra.mlflow_read import MlflowReadError
from infra.store import CheckpointStore
from tasks.numerics.comparison import ratio_interval

PROMPTS = 40


class Foreign:
    """Writes runs as somebody else's program would."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = self.client.create_experiment("fp8-grpo", (folder / "artifacts").as_uri())

    def run(
        self,
        sweep_id: str,
        recipe: str,
        seed: int,
        accuracy: float,
        step_s: float = 1.0,
        rate: float = 100.0,
        status: str = "FINISHED",
        answers: Sequence[int] | None = None,
        tags: Mapping[str, str] | None = None,
        mismatch: float = 1.01,
        name: str | None = None,
    ) -> str:
        named = {"sweep_id": sweep_id, "sweep": f"theirs-{sweep_id[0]}", "recipe": recipe, "seed": str(seed)} | dict(
            tags or {}
        )
        run_id: str = self.client.create_run(
            self.experiment, run_name=name or f"{recipe}-{seed}", tags=named
        ).info.run_id
        for step in range(1, 4):
            # The first step is slow, as first steps are; medians leave it out.
            self.client.log_metric(run_id, "time/step_s", step_s * (10 if step == 1 else 1), step=step)
            self.client.log_metric(run_id, "time/rollout_s", step_s / 2, step=step)
            self.client.log_metric(run_id, "throughput/rollout_tokens_per_s", rate, step=step)
            self.client.log_metric(run_id, "mismatch/token_mult_prob_error", mismatch, step=step)
            self.client.log_metric(run_id, "mismatch/abs_diff_by_position/00000-00007", 0.02, step=step)
            self.client.log_metric(run_id, "mismatch/abs_diff_by_position/00008-00015", 0.04, step=step)
        self.client.log_metric(run_id, "eval/accuracy", 0.1, step=0)
        self.client.log_metric(run_id, "eval/accuracy", accuracy, step=3)
        if answers is not None:
            values = {f"p{number}": answer for number, answer in enumerate(answers)}
            line = {"kind": "eval/accuracy", "step": 3, "values": values}
            self.client.log_text(run_id, json.dumps(line) + "\n", "eval_results.jsonl")
        if recipe == "fp8_e2e_kv":
            scales = [{"kind": "step", "step": s, "values": {"layer 0 k": s / 10, "layer 0 q": 1.0}} for s in (1, 2)]
            self.client.log_text(run_id, "".join(json.dumps(s) + "\n" for s in scales), "calibration_scales.jsonl")
        self.client.set_terminated(run_id, status)
        return run_id


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    """One store for all tests: each has sweeps, and names of sweeps, of its own."""
    return Foreign(tmp_path_factory.mktemp("foreign"))


def _compare(foreign: Foreign, sweep_id: str, *overrides: str, planned: Any = ()) -> Comparison:
    return compare(foreign.client, "fp8-grpo", sweep_id, compose(overrides).sweep, planned)


def _answers(solved: int) -> list[int]:
    return [1] * solved + [0] * (PROMPTS - solved)


def _sweep(foreign: Foreign, sweep_id: str, fp8_rate: float = 80.0) -> dict[tuple[str, int], str]:
    """BF16 on three seeds, and an FP8 recipe whose rollout has another speed: by default 0.8 times as fast."""
    ids = {}
    hardware = {"gpus": "2", "device": "NVIDIA H200"}
    for seed in range(3):
        ids["bf16", seed] = foreign.run(sweep_id, "bf16", seed, 0.5, answers=_answers(20), tags=hardware)
        ids["fp8_e2e_kv", seed] = foreign.run(
            sweep_id, "fp8_e2e_kv", seed, 0.5, 1.25, fp8_rate + seed, answers=_answers(20), tags=hardware, mismatch=1.02
        )
    return ids


def test_figures_intervals_and_verdicts_are_those_of_the_runs(foreign: Foreign) -> None:
    _sweep(foreign, "figures")
    found = _compare(foreign, "figures", "sweep.gates.min_rollout_speedup=1.0")
    assert found.sweep == "theirs-f" and not found.lost and not found.notes
    base, fp8 = found.variants
    assert (base.variant, fp8.variant, fp8.seeds) == ("bf16", "fp8_e2e_kv", (0, 1, 2))
    assert fp8.accuracy is not None and fp8.accuracy.value == 0.5
    assert fp8.accuracy.low == pytest.approx(0.35, abs=0.03) and fp8.accuracy.high == pytest.approx(0.65, abs=0.03)
    # Equal answers to equal prompts: the pairs leave no doubt, though each accuracy alone has plenty.
    assert fp8.difference is not None and (fp8.difference.low, fp8.difference.high) == (0.0, 0.0)
    assert fp8.rollout_speedup == ratio_interval([0.80, 0.81, 0.82])
    assert fp8.step_speedup is not None and fp8.step_speedup.value == pytest.approx(0.8)
    assert fp8.mismatch_medians == (1.02, 1.02, 1.02)
    assert fp8.phases["step"] == 1.25 and fp8.phases["rollout"] == 0.625 and fp8.phases["train"] is None
    assert fp8.by_position == (("00000-00007", pytest.approx(0.02)), ("00008-00015", pytest.approx(0.04)))
    assert fp8.curves.scales["layer 0 k"] == ((1, 0.1), (2, 0.2))
    assert fp8.curves.accuracy[1] == ((0, 0.1), (3, 0.5))
    # 15 s of steps a run, three runs, two GPUs.
    assert fp8.gpu_seconds == pytest.approx(90.0)
    assert fp8.cost_usd == pytest.approx(90.0 / 3600 * 5.20)
    outcomes = {j.gate.split(" at ")[0]: j.outcome for j in fp8.judgements}
    assert outcomes == {
        "accuracy loss": "pass",
        "mismatch": "pass",
        "rollout speed-up": "fail",
        "step speed-up": "not judged",
    }
    assert any("rollout was slower: 0.810 times" in j.reason for j in fp8.judgements)
    assert (base.verdict, fp8.verdict) == ("pass", "fail")


def test_runs_without_answers_are_compared_by_totals_and_one_seed_is_not_enough(foreign: Foreign) -> None:
    foreign.run("s2", "bf16", 0, 0.5)
    foreign.run("s2", "fp8_rollout", 0, 0.4)
    (_, one) = _compare(foreign, "s2", "sweep.gates.min_step_speedup=1.0").variants
    assert one.difference is not None and one.difference.value == pytest.approx(-0.1) and one.difference.low is None
    assert [j.outcome for j in one.judgements] == ["not enough data", "pass", "not judged", "not enough data"]
    assert one.verdict == "not enough data"
    foreign.run("s2", "bf16", 1, 0.5)
    foreign.run("s2", "fp8_rollout", 1, 0.4)
    (_, two) = _compare(foreign, "s2").variants
    assert two.difference is not None and two.difference.low == pytest.approx(-0.1)
    assert two.verdict == "fail"


def test_lost_runs_are_named_and_cost_no_others(foreign: Foreign) -> None:
    _sweep(foreign, "s3")
    foreign.run("s3", "fp8_rollout", 0, 0.5, status="FAILED")
    found = _compare(foreign, "s3")
    assert found.lost == {"fp8_rollout-0": "FAILED"}
    assert [variant.variant for variant in found.variants] == ["bf16", "fp8_e2e_kv"]
    planned = [PlannedChild("s3-fp8_e2e-s0", "fp8_e2e", 0, "")]
    planned_too = _compare(foreign, "s3", planned=planned)
    assert planned_too.lost == {"fp8_rollout-0": "FAILED", "s3-fp8_e2e-s0": "absent"}
    assert all(check.place == "missing" for check in planned_too.corridors["fp8_e2e"])
    assert "fp8_e2e: eval/accuracy is missing or not a number" in planned_too.regressions
    # Done again, it is no longer lost.
    foreign.run("s3", "fp8_rollout", 0, 0.5)
    assert not _compare(foreign, "s3").lost


def test_further_axes_are_compared_at_equal_values(foreign: Foreign) -> None:
    for value, slow in ((0.0, 1.0), (0.01, 2.0)):
        tags = {"axes": json.dumps({"algorithm.kl_coef": value})}
        for seed in (0, 1):
            foreign.run("s4", "bf16", seed, 0.5, slow, tags=tags)
            foreign.run("s4", "fp8_e2e", seed, 0.5, slow / 2, tags=tags)
    found = _compare(foreign, "s4")
    assert {v.variant: v.step_speedup.value if v.step_speedup else None for v in found.variants} == {
        "bf16, algorithm.kl_coef=0.0": None,
        "fp8_e2e, algorithm.kl_coef=0.0": 2.0,
        "bf16, algorithm.kl_coef=0.01": None,
        "fp8_e2e, algorithm.kl_coef=0.01": 2.0,
    }


def _corridor(foreign: Foreign, sweep_id: str) -> dict[str, str]:
    overrides = ["sweep.corridor.metrics=[{metric: eval/accuracy, relative: 0.0, absolute: 0.05}]"]
    checks = _compare(foreign, sweep_id, *overrides).corridors
    return {variant: check.place for variant, (check,) in checks.items()}


def test_the_corridor_is_of_earlier_sweeps_of_the_same_name(foreign: Foreign) -> None:
    for night in range(3):
        foreign.run(f"n{night}", "bf16", 0, 0.50)
    assert _corridor(foreign, "n2") == {"bf16": "not enough history"}
    foreign.run("n3", "bf16", 0, 0.54)
    assert _corridor(foreign, "n3") == {"bf16": "inside"}
    foreign.run("n4", "bf16", 0, 0.60)
    foreign.run("n5", "bf16", 0, 0.40)
    foreign.run("n6", "bf16", 0, float("nan"))
    foreign.run("n7", "bf16", 0, 0.9, status="FAILED")
    foreign.run("n8", "bf16", 0, 0.9, tags={"device": "another"})
    foreign.run("other", "bf16", 0, 0.9, tags={"sweep": "another"})
    found = {night: _corridor(foreign, night)["bf16"] for night in ("n4", "n5", "n6", "n7", "n8", "other")}
    assert found == {
        "n4": "above",
        "n5": "below",
        "n6": "missing",
        "n7": "missing",
        "n8": "not enough history",
        "other": "not enough history",
    }


def test_the_command_stores_a_page_that_needs_no_network(
    foreign: Foreign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = _sweep(foreign, "s1", fp8_rate=200.0)
    places = [f"runs_dir={tmp_path}", f"tracking.uri={foreign.uri}"]
    for _ in range(2):
        assert main(["report", "s1", *places]) == 0
    shown = capsys.readouterr().out
    assert "rollout was faster: 2.010 times" in shown and "report.html" in shown
    run = foreign.client.get_run(ids["fp8_e2e_kv", 1])
    assert run.data.metrics["speedup/rollout_vs_bf16"] == pytest.approx(2.01)
    assert len(foreign.client.get_metric_history(ids["fp8_e2e_kv", 1], "speedup/step_vs_bf16")) == 1
    assert foreign.client.get_run(ids["bf16", 1]).data.metrics["speedup/step_vs_bf16"] == 1.0
    (report,) = foreign.client.search_runs([foreign.experiment], "tags.role = 'sweep-report'")
    stored = {item.path for item in foreign.client.list_artifacts(report.info.run_id)}
    assert stored == {"report.html", "report.md", "comparison.json"}
    page = (tmp_path / "sweeps" / "s1" / "report.html").read_text()
    assert page.count("<img ") == 4 and not re.search(r'(src|href)="(?!data:)|url\(|<script', page)
    figures = json.loads((tmp_path / "sweeps" / "s1" / "comparison.json").read_text())
    assert figures["variants"][1]["difference"]["value"] == 0.0


def test_a_sweep_that_nobody_ran_and_a_name_that_cannot_be_are_refused(
    foreign: Foreign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MlflowReadError, match="sweep_id = none: experiment fp8-grpo has no run"):
        make_report(foreign.uri, compose(), "none", False, tmp_path / "x")
    assert main(["report", "none", f"tracking.uri={foreign.uri}"]) == 1
    assert main(["report", "it's", f"tracking.uri={foreign.uri}"]) == 1
    assert "holds a quote" in capsys.readouterr().err


def _checkpoint(store: CheckpointStore, run: str, folder: Path) -> str:
    (folder / "weights").write_text(run)
    manifest = store.publish(run, 3, {"weights": folder / "weights"}, {})
    return f"{store.url}/{run}/manifests/{manifest.attempt}.json"


def test_the_best_checkpoint_of_a_recipe_is_its_champion(foreign: Foreign, tmp_path: Path) -> None:
    config = compose([f"storage.url={tmp_path}/ck", "sweep.registry=mine"])
    store = CheckpointStore(f"{tmp_path}/ck")
    places = {}
    for sweep_id, accuracies in (("c1", (0.5, 0.7)), ("c2", (0.6, 0.65)), ("c3", (0.8,))):
        for seed, accuracy in enumerate(accuracies):
            foreign.run(sweep_id, "fp8_e2e", seed, accuracy, name=f"{sweep_id}-{seed}")
            places[sweep_id, seed] = _checkpoint(store, f"{sweep_id}-{seed}", tmp_path)
    name = "mine-tiny_qwen3-fp8_e2e"
    # The second sweep's best is no better than the champion and registers nothing.
    steps = (("c1", {name: "1"}, ("c1", 1)), ("c2", {}, ("c1", 1)), ("c3", {name: "2"}, ("c3", 0)))
    for sweep_id, registered, champion in steps:
        assert register_champions(foreign.uri, config, _compare(foreign, sweep_id)) == registered
        version = foreign.client.get_model_version_by_alias(name, "champion")
        assert version.tags["manifest"] == places[champion]
        assert Path(version.tags["manifest"]).is_file()
    stored = foreign.client.download_artifacts(version.run_id, "checkpoint/manifest.json", str(tmp_path))
    content = json.loads(Path(stored).read_text())
    assert content["url"] == places["c3", 0] and content["manifest"]["run"] == "c3-0"


def test_what_others_write_is_told_or_left_out_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = Foreign(tmp_path)
    foreign.run("f1", "bf16", 0, 0.5, tags={"gpus": "abc", "cpu_threads": "many"})
    foreign.run("f1", "[/x]", 0, 0.5, tags={"gpus": "nan"})
    foreign.run("f1", "fp8_e2e", 0, math.inf, mismatch=math.inf)
    for number, tags in enumerate(({"axes": "[1,2]"}, {"axes": "3"}, {"seed": "--5"}, {"seed": "\u00b2"})):
        foreign.run("f1", "fp8_rollout", number, 0.5, tags=tags, name=f"odd-{number}")
    places = [f"runs_dir={tmp_path}/runs", f"tracking.uri={foreign.uri}"]
    assert main(["report", "f1", *places]) == 0
    assert "[/x]" in capsys.readouterr().out
    figures = json.loads((tmp_path / "runs" / "sweeps" / "f1" / "comparison.json").read_text())
    assert [run["gpu_seconds"] for run in figures["runs"]] == [None, None, None]
    assert all(f"run odd-{n} says no recipe, seed and axes and is left out" in figures["notes"] for n in range(4))
    judged = {v["variant"]: {j["gate"]: j["outcome"] for j in v["judgements"]} for v in figures["variants"]}
    assert judged["fp8_e2e"]["mismatch at most 1.05"] == "fail" and "[/x]" in judged


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "line 2: line: Invalid JSON"),
        ('{"step": 1, "values": {}}', "line 2: kind: Field required"),
        ('{"kind": "eval/accuracy", "step": 3, "values": {"p": "yes"}}', "line 2: values.p: Input should be 0 or 1"),
        ('{"kind": "eval/accuracy", "step": 3, "values": {"p": null}}', "line 2: values.p: Input should be 0 or 1"),
    ],
)
def test_an_artifact_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    foreign = Foreign(tmp_path)
    run_id = foreign.run("f2", "bf16", 0, 0.5)
    foreign.client.log_text(run_id, "\n" + text, "eval_results.jsonl")
    assert main(["report", "f2", f"runs_dir={tmp_path}/runs", f"tracking.uri={foreign.uri}"]) == 1
    assert f"MlflowReadError: run {run_id}: eval_results.jsonl, {said}" in capsys.readouterr().err
