"""What `evaluate` runs: the run's own configuration, another recipe's rollout side, and this machine's places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from conf.compose import compose, flatten, resolved
from conf.problems import ConfigError
from flows.evaluation_plan import plan_evaluation, unflattened
from infra.store import CheckpointStore


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm=dapo", "correction=token_mask", "recipe=bf16"],
        ["rollout=vllm", "rollout.engine_args.block_size=16", "data.parameters.x=[1,2]"],
        ["data=jsonl", "data.path=/d.jsonl", 'data.prompt_template="{question} [x]"'],
    ],
)
def test_a_checkpoints_configuration_comes_back(overrides: Sequence[str]) -> None:
    config = compose(overrides)
    stored = json.loads(json.dumps(flatten(config)))
    assert unflattened(stored) == resolved(config)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with step 4 of `made`, trained under fp8_rollout with another seed than the default."""
    config = compose(["recipe=fp8_rollout", "seed=7", "data.eval_prompts=64", "runs_dir=/elsewhere"])
    (tmp_path / "model").mkdir()
    (tmp_path / "weights").write_bytes(b"w")
    meta = {"config": flatten(config), "model_dir": str(tmp_path / "model"), "mlflow_run_id": None}
    CheckpointStore(str(tmp_path / "store")).publish("made", 4, {"weights": tmp_path / "weights"}, meta)
    return tmp_path


def test_its_own_recipe(place: Path) -> None:
    found = plan_evaluation("made", None, "own", [f"storage.url={place / 'store'}"])
    assert (found.config.recipe.name, found.config.seed, found.config.data.eval_prompts) == ("fp8_rollout", 7, 64)
    assert found.config.runs_dir == "runs" and found.config.storage.url == str(place / "store")
    assert (found.manifest.step, found.metric, found.calibrates) == (4, "eval/accuracy", False)


def test_another_recipe_changes_the_rollout_side_alone(place: Path) -> None:
    found = plan_evaluation("made", 4, "fp8_e2e_kv", [f"storage.url={place / 'store'}", "data.eval_prompts=32"])
    recipe = found.config.recipe
    assert recipe.kv.quantized and not recipe.training_linears.quantized and recipe.name == "fp8_e2e_kv"
    assert found.config.data.eval_prompts == 32
    assert (found.metric, found.calibrates) == ("eval/accuracy_fp8_e2e_kv", True)
    same = plan_evaluation("made", 4, "fp8_e2e", [f"storage.url={place / 'store'}"])
    assert same.metric == "eval/accuracy" and not same.calibrates
    assert plan_evaluation("made", 4, "bf16", [f"storage.url={place / 'store'}"]).metric == "eval/accuracy_bf16"


def test_details_of_a_recipe(place: Path) -> None:
    detail = [f"storage.url={place / 'store'}", "recipe.rollout_linears.keep_first_layers=1"]
    for recipe in ("own", "fp8_e2e"):
        found = plan_evaluation("made", 4, recipe, detail)
        assert found.config.recipe.rollout_linears.keep_first_layers == 1
        assert found.metric == f"eval/accuracy_{found.config.recipe.name}"


def test_refusals(place: Path) -> None:
    url = f"storage.url={place / 'store'}"
    with pytest.raises(ConfigError, match=r"run = other: no complete checkpoint .* runs there: made"):
        plan_evaluation("other", None, "own", [url])
    with pytest.raises(ConfigError, match=r"step = 5: .* allowed: 4"):
        plan_evaluation("made", 5, "own", [url])
    with pytest.raises(ConfigError, match="stepz"):
        plan_evaluation("made", None, "own", [url, "stepz=1"])
    (place / "model").rmdir()
    with pytest.raises(ConfigError, match=r"model folder = .*model: not on this machine"):
        plan_evaluation("made", None, "own", [url])
