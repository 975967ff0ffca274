"""What the command refuses before anything starts: a clear message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stepz=3"], "did you mean steps?"),
        (["steps=many"], "steps = many"),
        (["steps=0"], "steps = 0"),
        (["recipe=fp8_everything"], "fp8_everything"),
        (["recipe.calibration.enabled=false"], "recipe.calibration.enabled = false"),
        (["correction=none"], "correction.allow_uncorrected=true"),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9"),
        (["rollout.top_k=20"], "rollout.top_k = 20"),
        (["algorithm.group_size=1"], "algorithm.group_size = 1"),
        (["trainer.micro_batch_size=100"], "trainer.micro_batch_size = 100"),
        (["data=jsonl", "data.path=missing.jsonl"], "missing.jsonl"),
        (["recipe.rollout_linears.exclude=[model.layers.9.mlp.up_proj]"], "model.layers.9.mlp.up_proj"),
    ],
)
@pytest.mark.parametrize("extra", [["--dry-run"], []], ids=["dry-run", "run"])
def test_refused(
    arguments: list[str], message: str, extra: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *arguments, f"runs_dir={tmp_path}/runs", *extra]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not (tmp_path / "runs").exists(), "nothing may be started or written"


def test_model_directory_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["train", f"model.path={tmp_path}"]) == 2
    shown = capsys.readouterr().err
    assert str(tmp_path) in shown and "safetensors" in shown


def test_malformed_row_names_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?"}\n')
    assert main(["train", "data=jsonl", f"data.path={rows}", f"runs_dir={tmp_path}/runs"]) == 2
    shown = capsys.readouterr().err
    assert f"{rows}:2" in shown and "answer" in shown


def test_uncorrected_fp8_rollout_can_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "correction=none", "correction.allow_uncorrected=true", "--dry-run"]) == 0
    assert "correction       none" in capsys.readouterr().out


def test_dry_run_prints_configuration_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "recipe=fp8_e2e", "steps=7", "algorithm.updates_per_step=2"]) == 0
    shown = capsys.readouterr().out
    assert "steps: 7" in shown and "path: null" in shown
    assert "14 linears e4m3 (2 q_proj, 2 k_proj, 2 v_proj, 2 o_proj, 2 gate_proj, 2 up_proj, 2 down_proj" in shown
    assert "bf16: lm_head" in shown
    assert "14 optimiser updates" in shown
