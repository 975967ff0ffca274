"""Whole runs that are killed or end, and go on: from S3, from another machine, past a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.side_records import EVAL_RESULTS
from tests.flows.runs import final_weights, journal_of, points, succeeded, train, train_and_kill, train_anew
from tests.s3_server import SeaweedServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.s3
def test_s3_killed_and_resumed_is_bitwise_equal(
    runs_dir: Path, s3_server: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded(train(["run_name=reference"], runs_dir))
    url = f"s3://{s3_server.bucket}/checkpoints"
    environment = {"AWS_ACCESS_KEY_ID": s3_server.access_key, "AWS_SECRET_ACCESS_KEY": s3_server.secret_key}
    options = {"endpoint_url": s3_server.endpoint_url}
    place = ["storage=s3", f"storage.url={url}", f"storage.options.endpoint_url={s3_server.endpoint_url}"]
    train_and_kill(place, runs_dir, "on-s3", after_step=3, extra=environment)
    done = succeeded(train_anew([*place, "resume=auto"], runs_dir, environment))
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
    succeeded(train(["resume=moved"], runs_dir))
    found = points(runs_dir, "moved")
    assert {step for key, step in found if key == "reward/mean"} == {1, 2, 3, 4, 5, 6}
    assert all(len(values) == 1 for values in found.values())


def test_a_damaged_checkpoint_is_passed_over(runs_dir: Path) -> None:
    succeeded(train(["run_name=whole"], runs_dir))
    succeeded(train(["run_name=damaged", "steps=4"], runs_dir))
    (weights,) = (runs_dir / "checkpoints" / "damaged" / "attempts").glob("00000004-*/weights.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = succeeded(train(["resume=damaged"], runs_dir))
    assert "the checkpoint of step 4 is damaged; the run goes on after step 2" in done.out
    url = f"{runs_dir}/checkpoints"
    whole, damaged = final_weights(url, "whole"), final_weights(url, "damaged")
    # The run that ended after step 4 evaluated it, as each run does its last step; it has what the other has besides.
    assert damaged.pop(EVAL_RESULTS) != whole.pop(EVAL_RESULTS)
    assert damaged == whole
    answers = {name: set((runs_dir / name / EVAL_RESULTS).read_text().splitlines()) for name in ("whole", "damaged")}
    assert answers["whole"] < answers["damaged"]


def test_resume_rules(runs_dir: Path) -> None:
    succeeded(train(["run_name=short", "steps=2"], runs_dir))
    assert "this run exists" in train(["run_name=short"], runs_dir).out
    refused = train(["resume=short", "trainer.optimizer.learning_rate=1e-5"], runs_dir)
    assert refused.code != 0 and "trainer.optimizer.learning_rate: 0.0002 -> 1e-05" in refused.out
    assert "no complete checkpoint" in train(["resume=nobody"], runs_dir).out
    longer = succeeded(train(["resume=short", "steps=3"], runs_dir))
    assert "continues after step 2" in longer.out
    fewer = train(["resume=short", "steps=1"], runs_dir)
    assert fewer.code == 2 and "steps = 1: run short is at step 3" in fewer.out
    done = succeeded(train(["resume=short", "steps=3"], runs_dir))
    assert "what this run did" in done.out
    journal = journal_of(runs_dir, "short")
    assert [entry.step for entry in journal.entries() if entry.kind == "step"] == [1, 2, 3]
    journal.close()
