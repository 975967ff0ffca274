"""Which run a command continues, and what stops it from doing so."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.identity import checkpoint_meta, identify
from flows.inputs import input_digests
from flows.session import _set_aside, _take_over_records
from infra.journal import Journal, JournalError
from infra.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "checkpoints"))


def _config(tmp_path: Path, *overrides: str) -> RunConfig:
    return compose([f"runs_dir={tmp_path}/runs", f"storage.url={tmp_path}/checkpoints", *overrides])


def _publish(store: CheckpointStore, config: RunConfig, run: str, step: int) -> None:
    folder = Path(store.url).parent / "publishing" / run
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"journal-{step}.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path) as journal:
        journal.claim()
        for done in range(1, step + 1):
            journal.append("step", done, {"reward/mean": done / 10}, time_ms=done)
    store.publish(
        run, step, {"journal.jsonl": path}, checkpoint_meta(config, None, "model", input_digests(config), step * 4)
    )


def test_auto_takes_the_newest_run_of_the_same_configuration(tmp_path: Path, store: CheckpointStore) -> None:
    config = _config(tmp_path, "resume=auto")
    assert identify(config, store).manifest is None
    _publish(store, config, "first", 5)
    _publish(store, config, "second", 3)
    _publish(store, _config(tmp_path, "seed=1"), "other-seed", 9)
    found = identify(config, store)
    assert (found.name, found.start_step) == ("second", 3)
    assert identify(_config(tmp_path, "resume=auto", "seed=2"), store).manifest is None


def test_steps_may_grow_but_not_fall_below_what_is_done(tmp_path: Path, store: CheckpointStore) -> None:
    _publish(store, _config(tmp_path), "run", 5)
    assert identify(_config(tmp_path, "resume=run", "steps=50"), store).start_step == 5
    with pytest.raises(ConfigError, match="steps = 4: run run is at step 5; allowed: no fewer steps"):
        identify(_config(tmp_path, "resume=run", "steps=4"), store)


def test_a_refused_resume_lists_what_shapes_results_alone(tmp_path: Path, store: CheckpointStore) -> None:
    _publish(store, _config(tmp_path, "run_name=run"), "run", 5)
    with pytest.raises(ConfigError) as caught:
        identify(_config(tmp_path, "resume=run", "seed=3", "steps=50", "checkpoint_every=1"), store)
    assert caught.value.problems == ("resume = run: inputs changed (seed: 0 -> 3); allowed: the run's own values",)
    limits = ("rollout.kv_preflight.warn=0.01", "rollout.kv_preflight.refuse=0.01")
    assert identify(_config(tmp_path, "resume=run", *limits), store).start_step == 5


MEGATRON = ("trainer=megatron", "trainer.device=cpu", "recipe=bf16")


def test_a_run_goes_on_in_another_layout_of_the_trainer(tmp_path: Path, store: CheckpointStore) -> None:
    """Ranks share the same sums in another way; what is computed stays a matter of the run."""
    layout = ("trainer.ranks=8", "trainer.tensor_parallel_size=2", "trainer.tokens_per_micro_batch=4096")
    _publish(store, _config(tmp_path, *MEGATRON, *layout), "run", 5)
    others = (
        ("trainer.ranks=1",),
        ("trainer.ranks=4", "trainer.pipeline_parallel_size=2", "trainer.distributed_optimizer=false"),
        ("trainer.ranks=2", "trainer.tokens_per_micro_batch=1024", "cluster.trainer_gpus=0.7"),
    )
    for other in others:
        for resume in ("resume=run", "resume=auto"):
            assert identify(_config(tmp_path, *MEGATRON, *other, resume), store).start_step == 5
    for key, was, now in (
        ("trainer.threads", 2, 1),
        ("trainer.device", "cpu", "gpu"),
        ("trainer.optimizer.beta1", 0.9, 0.8),
        ("trainer.deterministic", False, True),
    ):
        config = _config(tmp_path, *MEGATRON, *layout, f"{key}={str(now).lower()}", "resume=run")
        with pytest.raises(ConfigError, match=rf"inputs changed \({key}: {was} -> {now}\)"):
            identify(config, store)


def test_a_run_does_not_go_on_with_another_trainer(tmp_path: Path, store: CheckpointStore) -> None:
    _publish(store, _config(tmp_path, *MEGATRON), "run", 5)
    with pytest.raises(ConfigError, match=r"trainer.engine: megatron -> torch"):
        identify(_config(tmp_path, "recipe=bf16", "resume=run"), store)


def test_a_changed_data_file_is_refused(tmp_path: Path, store: CheckpointStore) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    data = ("data=jsonl", f"data.path={rows}")
    _publish(store, _config(tmp_path, *data), "run", 5)
    assert identify(_config(tmp_path, *data, "resume=run"), store).start_step == 5
    rows.write_text('{"question": "1 + 1?", "answer": "7"}\n')
    for resume in ("resume=run", "resume=auto"):
        with pytest.raises(ConfigError, match=r"inputs changed \(file rows.jsonl: [0-9a-f]{64} -> [0-9a-f]{64}\)"):
            identify(_config(tmp_path, *data, resume), store)


def test_a_changed_model_folder_is_refused(tmp_path: Path, store: CheckpointStore) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    _publish(store, _config(tmp_path, f"model.path={model}"), "run", 5)
    (model / "config.json").write_text('{"rms_norm_eps": 0.5}')
    with pytest.raises(ConfigError, match=r"file config.json"):
        identify(_config(tmp_path, f"model.path={model}", "resume=run"), store)


def test_a_name_is_taken_once_it_has_a_checkpoint(tmp_path: Path, store: CheckpointStore) -> None:
    named = _config(tmp_path, "run_name=mine")
    dead = tmp_path / "runs" / "mine"
    dead.mkdir(parents=True)
    (dead / "journal.jsonl").touch()
    assert identify(named, store).name == "mine", "an attempt without a checkpoint does not take the name"
    _publish(store, named, "mine", 0)
    with pytest.raises(ConfigError, match="run_name = mine: this run exists; allowed: a new name, or resume=mine"):
        identify(named, store)
    (tmp_path / "runs" / "cache").mkdir()
    with pytest.raises(ConfigError, match="exists and is no run"):
        identify(_config(tmp_path, "run_name=cache"), store)


def test_a_dead_attempt_is_set_aside_and_a_live_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Journal(folder / "journal.jsonl") as live:
        live.append("bootstrap", 0, {"time/bootstrap_s": 1.0})
        with pytest.raises(JournalError, match="another process"):
            _set_aside(folder)
    assert folder.is_dir()
    _set_aside(folder)
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("run.abandoned-") and (aside / "journal.jsonl").is_file()


@pytest.mark.parametrize("local_steps", [0, 2, 4, 6])
def test_a_local_journal_is_completed_from_the_checkpoint(
    tmp_path: Path, store: CheckpointStore, local_steps: int
) -> None:
    config = _config(tmp_path, "resume=run")
    _publish(store, config, "run", 4)
    with Journal(tmp_path / "local.jsonl") as journal:
        for step in range(1, local_steps + 1):
            journal.append("step", step, {"reward/mean": step / 10}, time_ms=step)
        _take_over_records(config, identify(config, store), journal)
        assert [entry.step for entry in journal.entries()] == list(range(1, max(4, local_steps) + 1))


def test_claiming_keeps_a_second_process_out(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as first:
        first.claim()
        with Journal(tmp_path / "journal.jsonl") as second, pytest.raises(JournalError, match="another process"):
            second.claim()
    with Journal(tmp_path / "journal.jsonl") as third:
        third.claim()
