"""Whole runs whose rollouts come from vLLM, in the process of its actor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.runs import points, succeeded, train

pytest.importorskip("vllm", reason="vLLM is not installed (extra engines-cpu)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout", "fp8_e2e_kv"])
def test_a_run_samples_with_vllm_under_audit(tmp_path: Path, recipe: str) -> None:
    """Every sync of the run is audited, so that a finished run is one whose engine held what was sent."""
    succeeded(train(["rollout=vllm", f"recipe={recipe}", "steps=2", "run_name=run"], tmp_path))
    measured = points(tmp_path, "run")
    mismatch = [values[0] for (name, _), values in measured.items() if name == "mismatch/token_mult_prob_error"]
    assert len(mismatch) == 2
    assert all(1.0 < value < 1.1 for value in mismatch)
