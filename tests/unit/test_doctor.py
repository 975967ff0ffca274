"""What `fp8-grpo doctor` says of a machine without a GPU: rows of recipes, whatever is refused, and the exit code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli import CONFIG_ERROR, FAILED, OK, main

RECIPES = ("bf16", "fp8_e2e", "fp8_e2e_kv", "fp8_rollout", "fp8_rollout_kv")
Doctor = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run it with everything installed: the exit code, the rows by recipe, and what was said below the table."""
    monkeypatch.setattr("flows.doctor.installed", lambda module: True)
    monkeypatch.setattr("flows.doctor.gpu_count", lambda: 0)
    monkeypatch.setattr("flows.doctor.cpu_flags", lambda: frozenset({"avx512f", "avx512bw"}))
    monkeypatch.setattr("flows.cli._wide", lambda: Console(highlight=False, width=2000))

    def run(*overrides: str) -> tuple[int, dict[str, str], str]:
        code = main(["doctor", *overrides])
        shown = capsys.readouterr()
        lines = [[cell.strip() for cell in line.split("│")] for line in shown.out.splitlines()]
        rows = {cells[1]: cells[2] for cells in lines if len(cells) > 3 and cells[1] in RECIPES}
        return code, rows, shown.out.rpartition("┘")[2] + shown.err

    return run


def test_the_default_runs_here(doctor: Doctor) -> None:
    code, rows, said = doctor()
    assert code == OK and rows == dict.fromkeys(RECIPES, "yes")
    assert "a run asks for 2 Ray actors (rollout, trainer); no GPU" in said


def test_a_recipe_that_is_refused_is_a_row_and_the_others_are_judged(doctor: Doctor) -> None:
    code, rows, _ = doctor("recipe=fp8_rollout_kv", "trainer=megatron", "trainer.device=cpu", "trainer.ranks=2")
    refused = "no: recipe.training_linears.format = e4m3: trainer=megatron computes FP8 with Transformer Engine"
    assert code == OK and rows.keys() == set(RECIPES)
    for recipe, row in rows.items():
        assert row.startswith(refused) if "e2e" in recipe else row == "yes"


def test_the_configured_recipe_is_refused_as_train_refuses_it(doctor: Doctor) -> None:
    code, rows, said = doctor("recipe=fp8_e2e", "trainer=megatron", "trainer.device=cpu")
    assert code == CONFIG_ERROR and rows["bf16"] == "yes"
    assert said.strip().startswith("fp8-grpo: the configuration is refused:\n  recipe.training_linears.format = e4m3")
    code, rows, said = doctor("stepz=3")
    assert code == CONFIG_ERROR and not rows and "stepz = 3: unknown key" in said


def test_rows_say_what_the_machine_lacks(doctor: Doctor) -> None:
    code, rows, said = doctor("trainer=megatron")
    assert code == FAILED
    lack = "1 GPU (rollout 0, trainer 1); no CPU slots; this machine has 0 GPUs in all; allowed: trainer.device=cpu"
    assert all(row.startswith("no: the run asks for") and lack in row for row in rows.values())
    assert said.count("recipe fp8_e2e_kv cannot run here: the run asks for") == 1


@pytest.mark.parametrize("engines", [(), ("rollout=vllm", "trainer=megatron", "recipe=bf16")])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("model=moonlight_16b_a3b", "model.architecture.latent_attention = .*no engine here runs multi-head latent"),
        ("model.path={folder}/none", "model.path = .*/none: does not exist; allowed: a folder with config.json"),
        ("model.path={folder}", "model.path = .*: lacks a tokenizer file, weights"),
    ],
)
def test_a_model_that_no_engine_runs_is_a_row(
    doctor: Doctor, tmp_path: Path, model: str, reason: str, engines: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    code, rows, said = doctor(model.format(folder=tmp_path), *engines)
    assert code == FAILED and rows.keys() == set(RECIPES)
    assert all(re.match(f"no: {reason}", row) for row in rows.values())
    assert re.search(f"cannot run here: {reason}", said)


def test_a_model_that_these_engines_do_not_run_is_a_row(doctor: Doctor) -> None:
    code, rows, _ = doctor("model=qwen3_30b_a3b")
    assert code == FAILED
    assert all("which the PyTorch engines do not run" in row for row in rows.values())


def test_rows_say_what_memory_cannot_hold(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.doctor.host_memory", lambda: 32_000_000_000)
    code, rows, _ = doctor("model=qwen3_8b_base")
    assert code == FAILED
    assert rows["bf16"].startswith("no: model.name = qwen3_8b_base: the engines on this machine's CPU hold 163.8 GB")


def test_a_python_of_the_workers_that_cannot_serve_is_named(doctor: Doctor, tmp_path: Path) -> None:
    python = tmp_path / "no-python"
    code, _, said = doctor(f"cluster.worker_python={python}")
    assert code == FAILED
    assert f"cannot run here: cluster.worker_python={python} on this machine: could not be run" in said.replace(
        "\n", ""
    )
