"""Whole runs that the Megatron trainer trains, in the process of its actor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.flows.runs import SMALL, points, train

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_trains_with_megatron_under_audit(tmp_path: Path) -> None:
    """With FP8 weights, keys and values in the rollout: export, scales and checkpoint pass through the run."""
    settings = ["trainer=megatron", "trainer.device=cpu", "recipe=fp8_rollout_kv"]
    base = [setting for setting in SMALL if not setting.startswith("trainer.")]
    settings.append("trainer.tokens_per_micro_batch=512")
    done = train([*settings, "run_name=run", "steps=2"], tmp_path, base=base)
    assert done.code == 0, done.out
    again = train([*settings, "resume=run", "steps=3"], tmp_path, base=base)
    assert again.code == 0, again.out
    measured = points(tmp_path, "run")
    mismatch = [values[0] for (name, _), values in measured.items() if name == "mismatch/token_mult_prob_error"]
    assert len(mismatch) == 3
    assert all(1.0 < value < 1.1 for value in mismatch)
