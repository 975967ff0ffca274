"""State of the trainer: what it exports, what it saves, and a reference policy that stays where it was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tasks.engines.protocols import EngineError, TrainerEngine
from tasks.engines.registry import build_trainer
from tasks.numerics.fingerprint import fingerprint
from tests.contract.engines import KV_RECIPES, RECIPES, Workbench, advantages, linears_of, make_model
from tests.contract.reference import quantize_blocks


def _step(trainer: TrainerEngine, bench: Workbench, recipe: str, shift: float = 0.0) -> dict[str, float]:
    """Train on one batch, and calibrate on its tokens as a run does."""
    batch = bench.batch(recipe)
    metrics = trainer.train(batch, trainer.score(batch).logprobs, advantages() + shift)
    if recipe in KV_RECIPES:
        metrics |= trainer.calibrate(batch.rows())
    return metrics


def _state(trainer: TrainerEngine, bench: Workbench, recipe: str) -> tuple[object, ...]:
    report, payload = trainer.report(), trainer.export_weights(bench.recipe(recipe))
    return report.version, report.fingerprints, report.scales, payload.fingerprints, payload.kv_scales


def test_a_saved_and_loaded_trainer_continues_bitwise(trainers: Workbench, recipe: str, tmp_path: Path) -> None:
    warm = "trainer.optimizer.warmup_steps=3"
    straight = trainers.trainer(recipe, warm)
    _step(straight, trainers, recipe)
    straight.save(tmp_path)
    saved = _state(straight, trainers, recipe)
    after = [_step(straight, trainers, recipe, shift) for shift in (0.1, 0.2)]
    resumed = build_trainer(trainers.config(recipe, warm), trainers.model_dir)
    resumed.load(tmp_path)
    # Another process has other random states, and nothing may depend on them.
    torch.manual_seed(987654321)
    random.seed(1)
    assert _state(resumed, trainers, recipe) == saved
    assert [_step(resumed, trainers, recipe, shift) for shift in (0.1, 0.2)] == after
    assert _state(resumed, trainers, recipe) == _state(straight, trainers, recipe) != saved


def test_loading_replaces_all_state_of_a_used_trainer(trainers: Workbench, tmp_path: Path) -> None:
    """Back to version 0: neither moments nor scales of the abandoned steps stay."""
    recipe = trainers.full_recipe
    fresh, used = trainers.trainer(recipe), trainers.trainer(recipe)
    fresh.save(tmp_path)
    for _ in range(2):
        _step(used, trainers, recipe)
    used.load(tmp_path)
    assert _state(used, trainers, recipe) == _state(fresh, trainers, recipe)
    assert _step(used, trainers, recipe) == _step(fresh, trainers, recipe)
    assert _state(used, trainers, recipe) == _state(fresh, trainers, recipe)


def test_saving_changes_nothing(trainers: Workbench, tmp_path: Path) -> None:
    recipe = trainers.full_recipe
    trainer, other = trainers.trainer(recipe), trainers.trainer(recipe)
    _step(trainer, trainers, recipe)
    _step(other, trainers, recipe)
    trainer.save(tmp_path)
    assert _step(trainer, trainers, recipe) == _step(other, trainers, recipe)


@pytest.mark.parametrize(
    "dimensions, message",
    [
        ({"hidden_size": 256}, r"model\.embed_tokens\.weight: checkpoint \(128, 256\), model \(128, 128\)"),
        ({"intermediate_size": 128}, r"layers\.0\.mlp\.gate_proj\.weight: checkpoint \(128, 128\), model \(256, 128\)"),
        ({"num_hidden_layers": 1}, r"differ in weights: .*model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"differ in weights: .*model\.layers\.2\."),
        ({"tie_word_embeddings": False}, r"differ in weights: .*lm_head\.weight"),
    ],
)
def test_a_foreign_checkpoint_is_refused_by_tensor(
    trainers: Workbench, tmp_path: Path, dimensions: dict[str, int], message: str
) -> None:
    foreign = make_model(tmp_path / "model", **dimensions)
    (tmp_path / "saved").mkdir()
    build_trainer(trainers.config("bf16", f"model.path={foreign}"), foreign).save(tmp_path / "saved")
    trainer = trainers.trainer("bf16")
    before = _state(trainer, trainers, "bf16")
    with pytest.raises(EngineError, match=message):
        trainer.load(tmp_path / "saved")
    assert _state(trainer, trainers, "bf16") == before, "a refused checkpoint leaves nothing behind"


def test_a_folder_without_a_checkpoint_is_refused(trainers: Workbench, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is no checkpoint of this engine: it lacks"):
        trainers.trainer("bf16").load(tmp_path)


def test_an_export_is_a_snapshot(trainers: Workbench, recipe: str) -> None:
    trainer = trainers.trainer(recipe)
    before = trainer.export_weights(trainers.recipe(recipe))
    _step(trainer, trainers, recipe)
    after = trainer.export_weights(trainers.recipe(recipe))
    assert {name: fingerprint(t) for name, t in before.tensors.items()} == before.fingerprints
    assert (before.version, after.version) == (0, 1)
    assert before.fingerprints.keys() == after.fingerprints.keys() == after.tensors.keys()
    codes = {f"{name}.weight" for name in linears_of(0, 1)}
    changed = {name for name, value in after.fingerprints.items() if value != before.fingerprints[name]}
    # One step of 3e-4 shows in BF16 and in codes; a norm near 1 may keep its BF16 bits, a block its amax.
    assert codes <= changed


def test_one_set_of_weights_exports_under_every_recipe(trainers: Workbench) -> None:
    """Codes come from the BF16 compute copy, never from the fp32 masters; the rest is the same BF16 everywhere."""
    trainer = trainers.trainer("fp8_e2e_kv")
    _step(trainer, trainers, "fp8_e2e_kv")
    exports = {recipe: trainer.export_weights(trainers.recipe(recipe)) for recipe in RECIPES}
    plain = exports["bf16"].tensors
    quantized = {f"{name}.weight" for name in linears_of(0, 1)}
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}
    for recipe in RECIPES[1:]:
        tensors = exports[recipe].tensors
        assert tensors.keys() == plain.keys() | {f"{name}_scale_inv" for name in quantized}
        for name in plain.keys() - quantized:
            assert exports[recipe].fingerprints[name] == exports["bf16"].fingerprints[name]
        for name in quantized:
            values, scales = quantize_blocks(plain[name])
            assert tensors[name].dtype == torch.float8_e4m3fn
            assert torch.equal(tensors[name].float(), values), name
            torch.testing.assert_close(tensors[f"{name}_scale_inv"], scales, rtol=1e-6, atol=0)
    with_scales = {recipe for recipe in RECIPES if exports[recipe].kv_scales}
    assert with_scales == set(KV_RECIPES)
    assert exports["fp8_rollout_kv"].kv_scales == trainer.report().scales


def test_an_untied_head_is_exported_and_never_quantised(trainers: Workbench, tmp_path: Path) -> None:
    folder = make_model(tmp_path, tie_word_embeddings=False)
    bench = Workbench(trainers.rollout_engine, trainers.trainer_engine, folder)
    recipe = bench.full_recipe
    payload = bench.payload(recipe)
    assert payload.tensors["lm_head.weight"].dtype == torch.bfloat16
    report = bench.rollout(recipe).report()
    assert report.fingerprints == payload.fingerprints
    assert report.quantized_linears == linears_of(0, 1)


def test_without_a_kl_term_there_is_no_kl(trainers: Workbench) -> None:
    trainer = trainers.trainer("bf16")
    assert [_step(trainer, trainers, "bf16")["loss/kl"] for _ in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e"])
def test_kl_to_the_starting_policy_is_zero_at_the_start_and_grows(trainers: Workbench, recipe: str) -> None:
    trainer = trainers.trainer(recipe, "algorithm.kl_coef=0.1")
    kl = [_step(trainer, trainers, recipe)["loss/kl"] for _ in range(3)]
    assert kl[0] == 0.0
    assert 0 < kl[1] < kl[2]


def test_kl_is_that_of_scores_before_and_after(trainers: Workbench) -> None:
    trainer, batch = trainers.trainer("bf16", "algorithm.kl_coef=0.1"), trainers.batch("bf16")
    mask = batch.response_mask()
    start = trainer.score(batch).logprobs[mask].double()
    _step(trainer, trainers, "bf16")
    current = trainer.score(batch).logprobs[mask].double()
    x, d = start - current, current - batch.logprobs[mask].double()
    # Weighted as the surrogate is: the samples came from the rollout's policy.
    expected = float((d.exp().clamp(max=2.0) * (x.exp() - 1 - x)).mean())
    assert _step(trainer, trainers, "bf16")["loss/kl"] == pytest.approx(expected, rel=1e-4)


def test_a_kl_term_holds_the_policy_back(trainers: Workbench) -> None:
    free, held = trainers.trainer("bf16"), trainers.trainer("bf16", "algorithm.kl_coef=5.0")
    mask, batch = trainers.batch("bf16").response_mask(), trainers.batch("bf16")
    start = free.score(batch).logprobs[mask]
    for trainer in (free, held):
        for _ in range(4):
            _step(trainer, trainers, "bf16")
    moved = [float((t.score(batch).logprobs[mask] - start).abs().mean()) for t in (free, held)]
    assert moved[1] < 0.9 * moved[0]


def test_the_reference_policy_survives_save_and_load(trainers: Workbench, tmp_path: Path) -> None:
    key = "algorithm.kl_coef=0.1"
    straight = trainers.trainer("bf16", key)
    _step(straight, trainers, "bf16")
    straight.save(tmp_path)
    expected = _step(straight, trainers, "bf16")
    resumed = build_trainer(trainers.config("bf16", key), trainers.model_dir)
    resumed.load(tmp_path)
    assert _step(resumed, trainers, "bf16") == expected
    assert expected["loss/kl"] > 0
