"""Whole runs that take longer: every recipe, other models and data, clusters and servers of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mlflow import MlflowClient

from tests.flows.runs import FEW_SAMPLES, journal_of, succeeded, train
from tests.flows.servers import ray_head

LOAD = ("data.eval_prompts=16", "algorithm.prompts_per_step=4", "algorithm.group_size=4", "trainer.micro_batch_size=8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout", "fp8_rollout_kv", "fp8_e2e", "fp8_e2e_kv"])
def test_every_recipe_runs(recipe: str, runs_dir: Path) -> None:
    succeeded(train([f"recipe={recipe}", f"run_name={recipe}"], runs_dir))
    journal = journal_of(runs_dir, recipe)
    last = journal.last("step")
    assert last is not None and last.step == 6
    assert ("calibration/saturated_fraction" in last.values) == recipe.endswith("_kv")
    # On CPU decode and whole-sequence kernels can agree to the last bit, and both sides share one quantiser;
    # only a recipe whose two sides compute differently must show a mismatch.
    error = last.values["mismatch/token_mult_prob_error"]
    assert error >= 1 and (error > 1 or recipe in ("bf16", "fp8_e2e"))
    journal.close()


def test_local_model_and_jsonl_data(runs_dir: Path, tmp_path: Path) -> None:
    succeeded(train(["run_name=for-model", "steps=1"], runs_dir))
    (model,) = (path for path in (runs_dir / "cache" / "warm_start").iterdir() if path.is_dir())
    rows = tmp_path / "sums.jsonl"
    sums = [(a, b) for a in range(20) for b in range(20)]
    rows.write_text("\n".join(json.dumps({"question": f"{a} + {b} =", "answer": f"so #### {a + b}"}) for a, b in sums))
    own = ["data=jsonl", f"data.path={rows}", f"model.path={model}", "run_name=own"]
    succeeded(train(own, runs_dir, base=FEW_SAMPLES))
    journal = journal_of(runs_dir, "own")
    last = journal.last("step")
    assert last is not None and last.step == 6
    journal.close()


def test_existing_cluster_is_joined_and_left_running(runs_dir: Path) -> None:
    with TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder, ray_head(Path(folder)) as address:
        cluster = ["cluster=existing", f"cluster.address={address}"]
        for name in ("joined", "joined-again"):
            succeeded(
                train([*cluster, f"run_name={name}", "steps=1"], runs_dir, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
            )


def test_tracking_uri_of_the_environment_is_honoured(runs_dir: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/own.db"
    succeeded(train(["steps=1", "run_name=tracked"], runs_dir, {"MLFLOW_TRACKING_URI": uri}))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    assert [run.info.run_name for run in client.search_runs([experiment.experiment_id])] == ["tracked"]


def test_random_prompts_and_rewards_without_checkpoints(runs_dir: Path) -> None:
    """What a measurement of speed runs: a model of random weights, nothing to learn, nothing kept."""
    data = ["data=synthetic", "data.prompt_digits=24", "data.pool_size=400", "model.warm_start=null"]
    done = succeeded(train([*data, "run_name=load", "checkpoint_every=null", "steps=2"], runs_dir, base=LOAD))
    assert "warning: checkpoint_every is null" in done.out
    journal = journal_of(runs_dir, "load")
    kinds = [entry.kind for entry in journal.entries()]
    assert "checkpoint" not in kinds and kinds.count("step") == 2
    last = journal.last("step")
    assert last is not None and 0 < last.values["reward/mean"] < 1 and last.values["optim/grad_norm"] > 0
    journal.close()
    assert not (runs_dir / "checkpoints" / "load").exists()
