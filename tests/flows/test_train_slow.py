"""Whole runs that take longer: every recipe, S3, other models and data, clusters and servers of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.flows.runs import FEW_SAMPLES, Finished, final_weights, journal_of, points, train, train_and_kill
from tests.s3_server import SeaweedServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def _ok(done: Finished) -> Finished:
    assert done.code == 0, done.out
    return done


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout", "fp8_rollout_kv", "fp8_e2e", "fp8_e2e_kv"])
def test_every_recipe_runs(recipe: str, runs_dir: Path) -> None:
    _ok(train([f"recipe={recipe}", f"run_name={recipe}"], runs_dir))
    journal = journal_of(runs_dir, recipe)
    last = journal.last("step")
    assert last is not None and last.step == 6
    assert ("calibration/saturated_fraction" in last.values) == recipe.endswith("_kv")
    # On CPU decode and whole-sequence kernels can agree to the last bit, and both sides share one quantiser;
    # only a recipe whose two sides compute differently must show a mismatch.
    error = last.values["mismatch/token_mult_prob_error"]
    assert error >= 1 and (error > 1 or recipe in ("bf16", "fp8_e2e"))
    journal.close()


@pytest.mark.s3
def test_s3_killed_and_resumed_is_bitwise_equal(
    runs_dir: Path, s3_server: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ok(train(["run_name=reference"], runs_dir))
    url = f"s3://{s3_server.bucket}/checkpoints"
    environment = {"AWS_ACCESS_KEY_ID": s3_server.access_key, "AWS_SECRET_ACCESS_KEY": s3_server.secret_key}
    options = {"endpoint_url": s3_server.endpoint_url}
    place = ["storage=s3", f"storage.url={url}", f"storage.options.endpoint_url={s3_server.endpoint_url}"]
    train_and_kill(place, runs_dir, "on-s3", after_step=3, environment=environment)
    done = _ok(train([*place, "resume=auto"], runs_dir, environment))
    assert "run on-s3 continues after step 2" in done.out and "computed again" not in done.out
    assert points(runs_dir, "on-s3") == points(runs_dir, "reference")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert final_weights(url, "on-s3", options) == final_weights(f"{runs_dir}/checkpoints", "reference")


def test_resume_without_the_local_journal(runs_dir: Path) -> None:
    """Another machine has the checkpoints and MLflow, but not the run's folder."""
    train_and_kill([], runs_dir, "moved", after_step=3)
    for path in (runs_dir / "moved").iterdir():
        path.unlink()
    _ok(train(["resume=moved"], runs_dir))
    found = points(runs_dir, "moved")
    assert {step for key, step in found if key == "reward/mean"} == {1, 2, 3, 4, 5, 6}
    assert all(len(values) == 1 for values in found.values())


def test_a_damaged_checkpoint_is_passed_over(runs_dir: Path) -> None:
    _ok(train(["run_name=whole"], runs_dir))
    _ok(train(["run_name=damaged", "steps=4"], runs_dir))
    (weights,) = (runs_dir / "checkpoints" / "damaged" / "attempts").glob("00000004-*/weights.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = _ok(train(["resume=damaged"], runs_dir))
    assert "the checkpoint of step 4 is damaged; the run goes on after step 2" in done.out
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "damaged") == final_weights(url, "whole")


def test_resume_rules(runs_dir: Path) -> None:
    _ok(train(["run_name=short", "steps=2"], runs_dir))
    assert "this run exists" in train(["run_name=short"], runs_dir).out
    refused = train(["resume=short", "trainer.optimizer.learning_rate=1e-5"], runs_dir)
    assert refused.code != 0 and "trainer.optimizer.learning_rate: 0.0002 -> 1e-05" in refused.out
    assert "no complete checkpoint" in train(["resume=nobody"], runs_dir).out
    longer = _ok(train(["resume=short", "steps=3"], runs_dir))
    assert "continues after step 2" in longer.out
    fewer = train(["resume=short", "steps=1"], runs_dir)
    assert fewer.code == 2 and "steps = 1: run short is at step 3" in fewer.out
    done = _ok(train(["resume=short", "steps=3"], runs_dir))
    assert "what this run did" in done.out
    journal = journal_of(runs_dir, "short")
    assert [entry.step for entry in journal.entries() if entry.kind == "step"] == [1, 2, 3]
    journal.close()


def test_local_model_and_jsonl_data(runs_dir: Path, tmp_path: Path) -> None:
    _ok(train(["run_name=for-model", "steps=1"], runs_dir))
    (model,) = (runs_dir / "cache" / "warm_start").iterdir()
    rows = tmp_path / "sums.jsonl"
    sums = [(a, b) for a in range(20) for b in range(20)]
    rows.write_text("\n".join(json.dumps({"question": f"{a} + {b} =", "answer": f"so #### {a + b}"}) for a, b in sums))
    own = ["data=jsonl", f"data.path={rows}", f"model.path={model}", "run_name=own"]
    _ok(train(own, runs_dir, base=FEW_SAMPLES))
    journal = journal_of(runs_dir, "own")
    last = journal.last("step")
    assert last is not None and last.step == 6
    journal.close()


@pytest.fixture
def ray_head() -> Iterator[str]:
    """An existing cluster on loopback; yields its address."""
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ray = str(Path(sys.executable).parent / "ray")
    start = [ray, "start", "--head", "--port=6399", "--num-cpus=4", "--include-dashboard=false"]
    start += ["--disable-usage-stats", "--object-store-memory=200000000"]
    subprocess.run(start, env=environment, check=True, capture_output=True, timeout=120)
    yield "127.0.0.1:6399"
    subprocess.run([ray, "stop", "--force"], env=environment, check=False, capture_output=True, timeout=60)


def test_existing_cluster_is_joined_and_left_running(runs_dir: Path, ray_head: str) -> None:
    cluster = ["cluster=existing", f"cluster.address={ray_head}"]
    for name in ("joined", "joined-again"):
        _ok(train([*cluster, f"run_name={name}", "steps=1"], runs_dir, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}))


def test_tracking_uri_of_the_environment_is_honoured(runs_dir: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/own.db"
    _ok(train(["steps=1", "run_name=tracked"], runs_dir, {"MLFLOW_TRACKING_URI": uri}))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    assert [run.info.run_name for run in client.search_runs([experiment.experiment_id])] == ["tracked"]
