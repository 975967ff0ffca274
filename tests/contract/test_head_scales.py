"""Scales for each KV head, from the trainer's calibration to the rollout's codes and back through a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.compose import ConfigError
from tasks.engines.protocols import EngineError, SyncError
from tasks.engines.registry import build_trainer
from tasks.numerics.kv_scales import Scales
from tests.contract.engines import LAYERS, ROLLOUT_ENGINES, TRAINER_ENGINES, Workbench, engine_params, make_model
from tests.contract.reference import Reference

RECIPE = "fp8_rollout_kv"
HEAD = "recipe.calibration.granularity=head"
ONLY_KV = "recipe.rollout_linears.format=bf16"
KV_HEADS, QUERY_HEADS = 2, 4


@pytest.fixture(scope="module")
def grouped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Query heads that share KV heads; the other tests' model has one KV head."""
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS}
    return make_model(tmp_path_factory.mktemp("grouped-model"), **heads)


@pytest.fixture(scope="module", params=engine_params(ROLLOUT_ENGINES))
def rollouts(request: pytest.FixtureRequest, grouped_model: Path) -> Workbench:
    return Workbench(request.param, TRAINER_ENGINES[0], grouped_model)


@pytest.fixture(scope="module", params=engine_params(TRAINER_ENGINES))
def trainers(request: pytest.FixtureRequest, grouped_model: Path) -> Workbench:
    return Workbench(ROLLOUT_ENGINES[0], request.param, grouped_model)


def _spread(scales: Scales) -> dict[tuple[int, str], Tensor]:
    """Scales as the reference can broadcast them: `[1, heads, 1, 1]`."""
    spread = {}
    for (layer, part), scale in scales.items():
        assert isinstance(scale, tuple) and len(scale) == KV_HEADS
        heads = torch.tensor(scale).repeat_interleave(QUERY_HEADS // KV_HEADS if part == "q" else 1)
        spread[(layer, part)] = heads.view(1, -1, 1, 1)
    return spread


def test_the_largest_head_has_the_scale_of_its_layer(trainers: Workbench) -> None:
    rows = trainers.prompt_rows()
    by_layer, by_head = trainers.trainer(RECIPE), trainers.trainer(RECIPE, HEAD)
    for trainer in (by_layer, by_head):
        trainer.calibrate(rows)
    one, several = by_layer.report().scales, by_head.report().scales
    assert one.keys() == several.keys()
    assert {key: max(scale) for key, scale in several.items()} == one  # type: ignore[arg-type]
    assert any(min(scale) < 0.95 * max(scale) for scale in several.values())  # type: ignore[arg-type]


def test_the_cache_rounds_each_head_under_its_own_scale(rollouts: Workbench) -> None:
    """Scales of the heads are pulled far apart, so that no other assignment to heads fits as well."""
    if not rollouts.rollout_engine.head_scales:
        with pytest.raises(ConfigError, match=r"granularity = head: .* takes one scale a layer"):
            rollouts.config(RECIPE, HEAD)
        return
    payload = rollouts.payload(RECIPE, HEAD, ONLY_KV)
    apart: Scales = {
        key: (scale[0], 40 * scale[1]) for key, scale in payload.kv_scales.items() if isinstance(scale, tuple)
    }
    swapped: Scales = {key: scale[::-1] for key, scale in apart.items() if isinstance(scale, tuple)}
    engine = rollouts.empty_rollout(RECIPE, HEAD, ONLY_KV)
    engine.load_weights(replace(payload, kv_scales=apart))
    batch = engine.generate(rollouts.request())
    distances = []
    for scales in (apart, swapped):
        reference = Reference(rollouts.model_dir, payload, _spread(scales), dtype=torch.bfloat16)  # type: ignore[arg-type]
        with torch.no_grad():
            expected = reference.logprobs(batch)
        distances.append(float((batch.logprobs - expected)[batch.response_mask()].abs().mean()))
    near, other = distances
    assert near < rollouts.rollout_engine.fp8_error
    assert near < 0.5 * other


def test_calibrated_heads_reach_the_rollout_engine_bitwise(trainers: Workbench) -> None:
    trainer, engine = trainers.trainer(RECIPE, HEAD), trainers.empty_rollout(RECIPE, HEAD)
    engine.load_weights(trainer.export_weights(trainers.recipe(RECIPE, HEAD)))
    assert engine.report().scales == trainer.report().scales
    assert {len(scale) for scale in engine.report().scales.values()} == {KV_HEADS}  # type: ignore[arg-type]


@pytest.mark.parametrize("held, sent", [((), (HEAD,)), ((HEAD,), ())])
def test_scales_of_another_granularity_are_refused(
    rollouts: Workbench, held: tuple[str, ...], sent: tuple[str, ...]
) -> None:
    if not rollouts.rollout_engine.head_scales and held:
        pytest.skip("an engine without scales for each head refuses the recipe itself")
    payload = Workbench(ROLLOUT_ENGINES[0], TRAINER_ENGINES[0], rollouts.model_dir).payload(RECIPE, *sent)
    engine = rollouts.empty_rollout(RECIPE, *held)
    with pytest.raises(SyncError, match=r"layer 0 [qkv]: scales for (2 heads|the whole layer), needed for"):
        engine.load_weights(payload)
    assert engine.report().version is None


def test_head_scales_come_back_from_a_checkpoint(trainers: Workbench, tmp_path: Path) -> None:
    trainer = trainers.trainer(RECIPE, HEAD)
    trainer.save(tmp_path)
    resumed = build_trainer(trainers.config(RECIPE, HEAD), trainers.model_dir)
    resumed.load(tmp_path)
    assert resumed.report().scales == trainer.report().scales
    rows = trainers.prompt_rows()
    assert resumed.calibrate(rows) == trainer.calibrate(rows)
    other = build_trainer(trainers.config(RECIPE), trainers.model_dir)
    with pytest.raises(EngineError, match=r"do not fit this model and recipe: layer 0 [qkv]: scales for 2 heads"):
        other.load(tmp_path)
    state = json.loads((tmp_path / "trainer.json").read_text())
    state["scales"]["0.k"] = ["many", "0x1p0"]
    (tmp_path / "trainer.json").write_text(json.dumps(state))
    with pytest.raises(EngineError, match=r"trainer\.json: scale 0\.k: .* is no hexadecimal number"):
        resumed.load(tmp_path)


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_sub_sampled_calibration_states_its_bound_and_stays_below_the_whole(
    trainers: Workbench, granularity: str
) -> None:
    form = f"recipe.calibration.granularity={granularity}"
    rows = trainers.batch(RECIPE).rows()
    whole, some, all_of_it = (
        trainers.trainer(RECIPE, form, f"recipe.calibration.max_tokens_per_sequence={limit}", *more)
        for limit, more in (("null", ()), (3, ("trainer.micro_batch_size=4",)), (64, ()))
    )
    metrics = [trainer.calibrate(rows) for trainer in (whole, some, all_of_it)]
    assert "calibration/subsample_bound" not in metrics[0]
    assert 0 < metrics[1]["calibration/subsample_bound"] <= 1
    assert metrics[2]["calibration/subsample_bound"] == 0.0
    assert all_of_it.report().scales == whole.report().scales
    measured, exact = some.report().scales, whole.report().scales
    for (layer, part), scale in exact.items():
        mine = measured[(layer, part)]
        pairs = [(mine, scale)] if isinstance(scale, float) else list(zip(mine, scale, strict=True))  # type: ignore[arg-type]
        assert all(0.3 * b < a <= b for a, b in pairs)
    # The draw depends on rows and version alone, never on micro-batches.
    again = trainers.trainer(RECIPE, form, "recipe.calibration.max_tokens_per_sequence=3")
    again.calibrate(rows)
    assert again.report().scales == measured
    assert len(measured) == 3 * LAYERS
