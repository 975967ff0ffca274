"""Runs that end by what they are: a breaker that stops one, rewards that are all equal, and nothing to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import get_args

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled

from conf.schema.breakers import Judged
from flows.breakers import BREAKERS
from tests.flows import forkserver
from tests.flows.runs import (
    FEW_SAMPLES,
    Finished,
    command,
    environment,
    final_weights,
    journal_of,
    train,
    train_and_kill,
)
from tests.flows.servers import until

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


def test_a_run_that_fell_back_to_a_bf16_rollout_goes_on_with_one_to_the_bit(tmp_path: Path) -> None:
    rules = "[{metric: mismatch/token_mult_prob_error, above: 0, patience: 2, action: bf16_rollout}]"
    chosen = ("recipe=fp8_rollout_kv", "rollout.kv_preflight.enabled=false", f"breakers.rules={rules}", "steps=4")
    whole = _run(tmp_path / "whole", *chosen)
    assert whole.code == 0, whole.out
    assert "since step 2 the rollout is in BF16: a breaker tripped" in whole.out
    steps = [e.values for e in journal_of(tmp_path / "whole", "a").entries() if e.kind == "step"]
    assert set(get_args(Judged)) <= steps[0].keys()
    mismatch = [values["mismatch/token_mult_prob_error"] for values in steps]
    assert min(mismatch[:2]) > 1.05 and max(mismatch[2:]) < 1.02
    _, run = _tracked(tmp_path / "whole")
    assert (run.data.tags["bf16_rollout_since"], run.data.tags["ended_by"]) == ("2", "done")
    train_and_kill(chosen, tmp_path / "cut", "a", after_step=3, base=QUICK)
    # The rule is gone, and what it did before stays.
    on = train([*chosen, "breakers=off", "resume=a"], tmp_path / "cut", base=QUICK)
    assert on.code == 0 and "since step 2 the rollout is in BF16" in on.out, on.out
    assert "differ" not in on.out
    weights = [final_weights(str(tmp_path / name / "checkpoints"), "a", step=4) for name in ("whole", "cut")]
    assert weights[0] == weights[1]
    _, run = _tracked(tmp_path / "cut")
    assert run.data.tags["bf16_rollout_since"] == "2"


PAUSING = "breakers.rules=[{metric: policy/entropy, above: 0, patience: 2, action: pause}]"


@pytest.mark.parametrize(("person", "code", "ended_by"), [("resumes", 0, "done"), ("cancels", 130, "interrupted")])
def test_a_paused_run_does_what_a_person_says(tmp_path: Path, person: str, code: int, ended_by: str) -> None:
    whole = command(["run_name=a", "recipe=bf16", PAUSING], tmp_path, QUICK)
    variables = environment()
    with TemporaryFile() as out, temporary_settings({PREFECT_API_URL: variables["PREFECT_API_URL"]}):
        process = forkserver.Command(whole, variables, out.fileno(), new_session=False)
        # Not from MLflow: two processes that open a new store at once make its tables twice.
        paused = until(lambda: _paused(process), "the pause", 180)
        assert paused.state is not None and "policy/entropy = " in (paused.state.message or "")
        assert journal_of(tmp_path, "a").find("checkpoint", 2) is not None
        with get_client(sync_client=True) as client:
            if person == "resumes":
                client.resume_flow_run(paused.id)
            else:
                client.set_flow_run_state(paused.id, Cancelled())
        ended = process.wait(timeout=120)
        out.seek(0)
        said = out.read().decode()
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(paused.id).state
    assert ended == code, said
    assert state is not None and state.is_cancelled() == (person == "cancels") and state.is_final()
    assert "step 2: paused for at most 86400 s" in said
    assert ("step 2: resumed" in said) == (person == "resumes")
    assert (journal_of(tmp_path, "a").find("final", 3) is not None) == (person == "resumes")
    _, run = _tracked(tmp_path)
    assert run.data.tags["ended_by"] == ended_by


def _paused(process: forkserver.Command) -> FlowRun | None:
    """The one flow run that waits, on a server of this process's own."""
    assert process.poll() is None, "the run ended"
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    with get_client(sync_client=True) as client:
        return next(iter(client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))), None)


def test_a_paused_run_that_nobody_resumes_ends_and_can_be_resumed(tmp_path: Path) -> None:
    done = _run(tmp_path, "recipe=bf16", PAUSING, "breakers.pause_timeout_s=3")
    assert done.code == 6, done.out
    assert "nobody resumed the run within breakers.pause_timeout_s = 3 s" in done.out
    _, run = _tracked(tmp_path)
    assert (run.info.status, run.data.tags["ended_by"]) == ("FAILED", "breaker")
    on = _run(tmp_path, "recipe=bf16", "breakers=off", "resume=a")
    assert on.code == 0 and "continues after step 2" in on.out, on.out


def test_a_fall_back_that_is_computed_again_without_its_rule_did_not_happen(tmp_path: Path) -> None:
    rules = "[{metric: mismatch/token_mult_prob_error, above: 0, patience: 3, action: bf16_rollout}]"
    chosen = ("recipe=fp8_rollout_kv", "rollout.kv_preflight.enabled=false", "steps=5", "checkpoint_every=2")
    train_and_kill([*chosen, f"breakers.rules={rules}"], tmp_path, "a", after_step=3, base=QUICK)
    assert (tmp_path / "a" / BREAKERS).is_file()
    for _ in range(2):
        on = train([*chosen, "breakers=off", "resume=a"], tmp_path, base=QUICK)
        assert on.code == 0 and "in BF16" not in on.out, on.out
    steps = [e.values for e in journal_of(tmp_path, "a").entries() if e.kind == "step"]
    assert min(values["mismatch/token_mult_prob_error"] for values in steps) > 1.05
    _, run = _tracked(tmp_path)
    assert "bf16_rollout_since" not in run.data.tags
