"""One uninterrupted run, the same run again, and the same run killed in the middle of a step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli import main
from infra.store import CheckpointStore
from tests.flows.runs import (
    OWN_PREFECT,
    final_weights,
    journal_of,
    points,
    succeeded,
    train,
    train_and_interrupt,
    train_and_kill,
    train_anew,
)

pytestmark = pytest.mark.timeout(900)

NO_MODEL_MEETS = ("rollout.kv_preflight.warn=1e-9", "rollout.kv_preflight.refuse=1e-9")

PREFLIGHT = (
    "preflight/mean_abs_logprob_diff",
    "preflight/max_abs_logprob_diff",
    "preflight/token_mult_prob_error",
    "preflight/tokens",
)
METRICS = (
    "mismatch/token_mult_prob_error",
    "mismatch/gen_kl",
    "mismatch/policy_kl",
    "mismatch/js",
    "mismatch/max_abs_logprob_diff",
    "mismatch/p99_abs_logprob_diff",
    "mismatch/clamped_tokens",
    "mismatch/missing_rollout_logprobs",
    "importance/mean",
    "importance/max",
    "importance/ess",
    "importance/truncated_fraction",
    "importance/truncated_mean",
    "reward/mean",
    "reward/zero_variance_fraction",
    "eval/accuracy",
    "eval/accuracy_bf16",
    "loss/policy",
    "loss/kl",
    "optim/grad_norm",
    "optim/lr",
    "optim/skipped_steps",
    "policy/entropy",
    "policy/clipped_fraction",
    "calibration/max_rel_change",
    "calibration/saturated_fraction",
    "calibration/underflow_fraction",
    "rollout/mean_length",
    "rollout/truncated_fraction",
    "time/sync_s",
    "time/rollout_s",
    "time/reward_s",
    "time/reward_overlapped_s",
    "time/score_s",
    "time/train_s",
    "time/calibrate_s",
    "time/step_s",
    "time/eval_s",
    "time/checkpoint_s",
    "time/bootstrap_s",
    "throughput/rollout_tokens_per_s",
    "throughput/train_tokens_per_s",
    "memory/weights_gb",
    "memory/kv_capacity_tokens",
    "memory/peak_gb",
    *PREFLIGHT,
    "time/preflight_s",
)


@pytest.fixture(scope="module")
def reference(runs_dir: Path) -> str:
    """The uninterrupted run."""
    done = succeeded(train(["run_name=reference"], runs_dir, OWN_PREFECT))
    assert "what this run did" in done.out and "eval accuracy, after" in done.out
    assert f"ui --backend-store-uri sqlite:///{runs_dir}/mlflow.db" in done.out
    return "reference"


def test_its_last_checkpoint_is_exported_as_a_hugging_face_folder(
    runs_dir: Path, reference: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    assert main(["export", reference, str(folder), f"storage.url={runs_dir}/checkpoints"]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    store = CheckpointStore(f"{runs_dir}/checkpoints")
    manifest = store.latest(reference)
    assert manifest is not None
    store.fetch(manifest, tmp_path / "checkpoint")
    held, weights = model.state_dict(), load_file(tmp_path / "checkpoint" / "weights.safetensors")
    assert len(weights) == 24
    for name, weight in weights.items():
        assert torch.equal(held[name], weight.to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(folder).encode("1 + 1")


def test_mlflow_holds_the_whole_run(runs_dir: Path, reference: str) -> None:
    client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'reference'")
    assert sorted(set(METRICS) - set(run.data.metrics)) == []
    assert run.info.status == "FINISHED"
    assert {k: run.data.tags[k] for k in ("recipe", "engine.rollout", "engine.trainer", "model", "seed")} == {
        "recipe": "fp8_e2e_kv",
        "engine.rollout": "torch",
        "engine.trainer": "torch",
        "model": "tiny_qwen3",
        "seed": "0",
    }
    assert run.data.tags["flow_run_id"] and run.data.tags["git_commit"]
    assert run.data.params["recipe.kv.dtype"] == "e4m3" and run.data.params["model.path"] == "null"
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "report.md", "report.png", "eval_results.jsonl", "calibration_scales.jsonl"} <= names


def test_every_step_and_evaluation_is_there_once(runs_dir: Path, reference: str) -> None:
    found = points(runs_dir, reference)
    assert {step for key, step in found if key == "reward/mean"} == {1, 2, 3, 4, 5, 6}
    assert {step for key, step in found if key == "eval/accuracy"} == {0, 3, 6}
    assert all(len(values) == 1 for values in found.values())


def test_answers_and_scales_are_those_of_the_metrics(runs_dir: Path, reference: str) -> None:
    answers = [json.loads(line) for line in (runs_dir / reference / "eval_results.jsonl").read_text().splitlines()]
    found = points(runs_dir, reference)
    assert [(line["kind"], line["step"]) for line in answers] == [
        ("eval/accuracy", 0),
        ("eval/accuracy", 3),
        ("eval/accuracy", 6),
        ("eval/accuracy_bf16", 6),
    ]
    for line in answers:
        solved = line["values"].values()
        assert len(solved) == 64 and found[line["kind"], line["step"]] == [sum(solved) / 64]
    path = runs_dir / reference / "calibration_scales.jsonl"
    scales = [json.loads(line)["values"] for line in path.read_text().splitlines()]
    assert len(scales) == 6 and set(scales[0]) == {f"layer {n} {part}" for n in (0, 1) for part in "qkv"}
    for step, (before, after) in enumerate(pairwise(scales), 1):
        change = max(abs(after[slot] / before[slot] - 1) for slot in before)
        assert found["calibration/max_rel_change", step] == [pytest.approx(change)]


def test_the_figures_make_sense(runs_dir: Path, reference: str) -> None:
    journal = journal_of(runs_dir, reference)
    steps = [entry.values for entry in journal.entries() if entry.kind == "step"]
    for values in steps:
        parts = [values[f"time/{p}_s"] for p in ("sync", "rollout", "reward", "score", "train", "calibrate")]
        assert values["time/step_s"] == pytest.approx(sum(parts))
        assert 1 < values["mismatch/token_mult_prob_error"] < 1.2
        assert values["mismatch/missing_rollout_logprobs"] == 0
        assert 0 < values["importance/ess"] <= 1
        assert values["optim/skipped_steps"] == 0
        assert values["throughput/rollout_tokens_per_s"] > 0
    journal.close()


def test_same_command_and_seed_twice_is_bitwise_equal(runs_dir: Path, reference: str) -> None:
    succeeded(train_anew(["run_name=again"], runs_dir))
    assert points(runs_dir, "again") == points(runs_dir, reference)
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "again") == final_weights(url, reference)


def test_killed_in_a_step_and_resumed_is_bitwise_equal(runs_dir: Path, reference: str) -> None:
    train_and_kill([], runs_dir, "killed", 3, OWN_PREFECT)
    journal = journal_of(runs_dir, "killed")
    assert journal.last("checkpoint").step == 2, "the kill came too late for the test"
    assert journal.last("step").step in (3, 4)
    journal.close()
    # Bounds that no model meets: only a new run is measured.
    done = succeeded(train_anew(["resume=killed", *NO_MODEL_MEETS], runs_dir, OWN_PREFECT))
    assert "continues after step 2" in done.out
    assert "computed again" not in done.out, "a repeated step must equal its journal entry"
    assert "pre-flight" not in done.out
    assert points(runs_dir, "killed") == points(runs_dir, reference)
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "killed") == final_weights(url, reference)


def test_the_pre_flight_is_measured_once_and_changes_nothing_else(runs_dir: Path, reference: str) -> None:
    done = succeeded(train(["run_name=unmeasured", "rollout.kv_preflight.enabled=false"], runs_dir))
    assert "pre-flight" not in done.out, done.out
    measured, without = points(runs_dir, reference), points(runs_dir, "unmeasured")
    (mean,), (largest,), (error,), (tokens,) = (measured.pop((name, 0)) for name in PREFLIGHT)
    assert measured == without
    # 128 prompts with answers of 1 to 8 tokens; e^|d| - 1 is at least |d|.
    assert 128 <= tokens <= 8 * 128
    assert 0 < mean < largest and 1 + mean <= error < 1.2
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "unmeasured") == final_weights(url, reference)


@pytest.mark.slow
def test_a_pre_flight_above_its_lower_bound_is_said(runs_dir: Path, reference: str) -> None:
    done = succeeded(train(["run_name=warned", "steps=1", NO_MODEL_MEETS[0]], runs_dir))
    mean = points(runs_dir, reference)[(PREFLIGHT[0], 0)][0]
    assert f"warning: mean |d| {mean:.4g} of log-probabilities" in done.out
    assert "above rollout.kv_preflight.warn 1e-09; safer: a recipe whose KV cache is BF16" in done.out


def test_a_pre_flight_above_its_upper_bound_refuses_the_run(runs_dir: Path, reference: str) -> None:
    done = train(["run_name=refused", *NO_MODEL_MEETS], runs_dir)
    assert done.code == 2, done.out
    values = {name: points(runs_dir, reference)[(name, 0)] for name in PREFLIGHT}
    assert f"rollout.kv_preflight.refuse = 1e-09: this model has mean |d| {values[PREFLIGHT[0]][0]:.4g}" in done.out
    assert "allowed: up to 1e-09" in done.out and "Traceback" not in done.out
    assert points(runs_dir, "refused") == {(name, 0): found for name, found in values.items()}
    assert CheckpointStore(f"{runs_dir}/checkpoints").latest("refused") is None
    client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fp8-grpo'")
    (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'refused'")
    assert run.info.status == "FAILED"


def test_ctrl_c_ends_cleanly(runs_dir: Path, reference: str) -> None:
    done, left = train_and_interrupt(["steps=500"], runs_dir, "interrupted", 2, OWN_PREFECT)
    assert done.code == 130, done.out
    assert "the same command with resume=auto goes on" in done.out
    assert "Traceback" not in done.out and "Error logging to API" not in done.out
    assert left == []
    client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fp8-grpo'")
    (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'interrupted'")
    assert run.info.status == "KILLED"
