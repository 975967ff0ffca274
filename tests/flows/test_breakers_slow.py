"""Runs that end by what they are: a breaker that stops one, rewards that are all equal, and nothing to learn from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.breakers import BREAKERS
from tests.flows.runs import FEW_SAMPLES, Finished, journal_of, train

pytestmark = pytest.mark.slow

QUICK = (*FEW_SAMPLES, "steps=3", "eval_every=3", "checkpoint_every=1", "model.warm_start=null", "data.pool_size=500")


def _run(runs_dir: Path, *arguments: str) -> Finished:
    return train(["run_name=a", *arguments], runs_dir, base=QUICK)


def _tracked(runs_dir: Path) -> tuple[MlflowClient, Run]:
    client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_a_breaker_stops_a_run_and_without_it_the_run_goes_on(tmp_path: Path) -> None:
    rule = "breakers.rules=[{metric: policy/entropy, above: 0, patience: 2, action: stop}]"
    done = _run(tmp_path, "recipe=bf16", rule)
    assert done.code == 6, done.out
    assert "fp8-grpo: BreakerError: policy/entropy = " in done.out
    assert "(above 0 or not finite) for 2 steps, the last of them 2: breakers.rules[0], action stop" in done.out
    journal = journal_of(tmp_path, "a")
    entropies = {f"step {e.step}": e.values["policy/entropy"] for e in journal.entries() if e.kind == "step"}
    assert list(entropies) == ["step 1", "step 2"] and journal.find("checkpoint", 2) is None
    (line,) = map(json.loads, (tmp_path / "a" / BREAKERS).read_text().splitlines())
    assert line == {"kind": "0 policy/entropy stop", "step": 2, "values": entropies}
    client, run = _tracked(tmp_path)
    assert (run.info.status, run.data.tags["ended_by"]) == ("FAILED", "breaker")
    assert BREAKERS in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    # From the checkpoint of step 1: the step that tripped is computed again, and is the same.
    on = _run(tmp_path, "recipe=bf16", "breakers=off", "resume=a")
    assert on.code == 0, on.out
    assert "continues after step 1" in on.out and "from the journal" not in on.out
    _, run = _tracked(tmp_path)
    assert (run.info.status, run.data.tags["ended_by"]) == ("FINISHED", "done")


def test_rewards_that_are_all_equal_have_an_end_of_their_own(tmp_path: Path) -> None:
    # Random weights solve nothing.
    rules = "[{metric: reward/zero_variance_fraction, above: 0.999, patience: 2, action: stop}]"
    done = _run(tmp_path, "recipe=bf16", f"breakers.rules={rules}")
    assert done.code == 8, done.out
    _, run = _tracked(tmp_path)
    assert (run.info.status, run.data.tags["ended_by"]) == ("FAILED", "equal_rewards")


def test_a_run_that_trained_nothing_is_no_success_and_keeps_its_report(tmp_path: Path) -> None:
    # Random weights do not end an answer after one token.
    done = _run(tmp_path, "recipe=bf16", "rollout.max_new_tokens=1", "algorithm.overlong.filter=true")
    assert done.code == 7, done.out
    assert "NothingTrainedError: none of 3 updates in 3 steps was made: 0 skipped" in done.out
    _, run = _tracked(tmp_path)
    assert (run.info.status, run.data.tags["ended_by"]) == ("FAILED", "nothing_trained")
    assert (tmp_path / "a" / "report.md").is_file()
