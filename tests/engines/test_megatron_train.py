"""Whole runs that the Megatron trainer trains, in the processes of its actors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.store import CheckpointStore
from tests.flows.runs import SMALL, points, succeeded, train

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

MEGATRON = (
    "trainer=megatron",
    "trainer.device=cpu",
    "recipe=fp8_rollout_kv",
    "trainer.tokens_per_micro_batch=512",
    "trainer.optimizer.learning_rate=2e-4",
)
BASE = tuple(setting for setting in SMALL if not setting.startswith("trainer."))
TWO = ("trainer.ranks=2", "trainer.threads=1")
TENSOR = (*TWO, "trainer.tensor_parallel_size=2")


def _train(runs_dir: Path, *settings: str) -> None:
    succeeded(train([*MEGATRON, *settings], runs_dir, {"OMP_NUM_THREADS": "1"}, BASE))


def _mismatch(runs_dir: Path, run: str, steps: int) -> None:
    """Of each step in the range of a healthy FP8 rollout."""
    found = points(runs_dir, run)
    assert all(1.0 < found["mismatch/token_mult_prob_error", step][0] < 1.1 for step in range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_trains_with_megatron_under_audit(tmp_path: Path) -> None:
    """With FP8 weights, keys and values in the rollout: export, scales and checkpoint pass through the run.

    It begins on two data ranks, which split masters and moments, and goes on on one.
    """
    _train(tmp_path, *TWO, "run_name=run", "steps=2")
    _train(tmp_path, "trainer.threads=1", "resume=run", "steps=3")
    _mismatch(tmp_path, "run", 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_tensor_ranks_goes_on_on_data_ranks(tmp_path: Path) -> None:
    """Every sync is audited; the checkpoint is written by both ranks, and has every point once."""
    _train(tmp_path, *TENSOR, "run_name=run", "steps=2")
    manifest = CheckpointStore(f"{tmp_path}/checkpoints").latest("run")
    assert manifest is not None
    parts = {entry.path for entry in manifest.files}
    names = {f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("weights", "optimizer") for rank in range(2)}
    assert names < parts and "trainer.json" in parts
    _train(tmp_path, *TWO, "resume=run", "steps=3")
    _mismatch(tmp_path, "run", 3)
    found = points(tmp_path, "run")
    for metric in ("optim/grad_norm", "importance/ess", "calibration/max_rel_change"):
        assert all(len(found[metric, step]) == 1 for step in range(1, 4))
