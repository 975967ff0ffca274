"""The Megatron trainer beside the PyTorch one on equal weights, and what the contract does not ask of every engine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.engines.megatron_config import Layout
from tasks.engines.protocols import EngineError, TokenRows, TrainerEngine
from tasks.engines.registry import build_trainer
from tasks.numerics.packing import PackingRule
from tests.contract.engines import (
    RECIPES,
    ROLLOUT_ENGINES,
    TRAINER_ENGINES,
    Workbench,
    advantages,
    make_model,
    make_outlier_model,
)
from tests.engines.megatron_models import save_model

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

TORCH, MEGATRON = TRAINER_ENGINES
KV, HEAD = "fp8_rollout_kv", "recipe.calibration.granularity=head"


def _bench(trainer: str, folder: Path) -> Workbench:
    return Workbench(ROLLOUT_ENGINES[0], TORCH if trainer == "torch" else MEGATRON, folder)


@pytest.fixture(scope="module")
def benches(model_dir: Path) -> tuple[Workbench, Workbench]:
    """PyTorch and Megatron, on one folder."""
    return _bench("torch", model_dir), _bench("megatron", model_dir)


def _train(trainer: TrainerEngine, bench: Workbench, recipe: str = "bf16") -> dict[str, float]:
    batch = bench.batch(recipe)
    return trainer.train(batch, trainer.score(batch).logprobs, advantages())


MODELS = {
    "qwen3": lambda folder: make_model(folder),
    "qwen3_untied": lambda folder: make_model(folder, tie_word_embeddings=False),
    "llama_tied": lambda folder: make_outlier_model(folder, 8.0, tied=True),
    "qwen2_bias": lambda folder: save_model("qwen2_bias", folder),
}


@pytest.mark.parametrize("model", MODELS)
def test_exports_are_bitwise_those_of_the_torch_trainer(model: str, tmp_path: Path) -> None:
    """BF16 and codes and scales of every recipe, from the same weights."""
    folder = MODELS[model](tmp_path)
    torch_bench, bench = _bench("torch", folder), _bench("megatron", folder)
    other, trainer = torch_bench.trainer("bf16"), bench.trainer("bf16")
    assert trainer.report().fingerprints == other.report().fingerprints
    for recipe in RECIPES:
        wanted = other.export_weights(torch_bench.recipe(recipe))
        assert trainer.export_weights(torch_bench.recipe(recipe)).fingerprints == wanted.fingerprints


def test_weights_of_a_torch_checkpoint_come_back_bitwise(benches: tuple[Workbench, Workbench], tmp_path: Path) -> None:
    """Trained weights, too: a checkpoint has the same names and forms in both engines."""
    other, trainer = (bench.trainer(KV) for bench in benches)
    for _ in range(2):
        _train(other, benches[0], KV)
    other.save(tmp_path)
    trainer.load(tmp_path)
    assert trainer.version == 2
    assert trainer.report().fingerprints == other.report().fingerprints
    assert trainer.report().scales == other.report().scales
    recipe = benches[0].recipe(KV)
    assert trainer.export_weights(recipe).fingerprints == other.export_weights(recipe).fingerprints
    ends = [_train(engine, benches[0], KV)["optim/grad_norm"] for engine in (other, trainer)]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def test_a_checkpoint_holds_the_moments_of_every_weight(benches: tuple[Workbench, Workbench], tmp_path: Path) -> None:
    trainer = benches[1].trainer("bf16")
    _train(trainer, benches[1])
    trainer.save(tmp_path)
    weights = load_file(tmp_path / "weights.safetensors")
    state = load_file(tmp_path / "optimizer.safetensors")
    assert weights.keys() == trainer.report().fingerprints.keys()
    assert state.keys() == {f"{name}.{kind}" for name in weights for kind in ("step", "exp_avg", "exp_avg_sq")}
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert state[f"{name}.exp_avg"].shape == weight.shape and bool(state[f"{name}.exp_avg"].any())
        assert float(state[f"{name}.step"]) == 1.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q_proj.weight.step": torch.tensor(7.0)}, r"q_proj\.weight, .* updated \[7\.0, 1\.0, 1\.0\] times"),
        ({"k_proj.weight.exp_avg": None}, r"k_proj\.weight, .* optimiser state differs in kind"),
        (
            {"w_proj.weight.step": torch.tensor(1.0)},
            r"w_proj\.weight: optimiser state of a weight that the model lacks",
        ),
        ({"o_proj.weight.exp_avg": torch.zeros(2, 2)}, r"o_proj\.weight\.exp_avg: checkpoint \(2, 2\), this"),
        ({"q_proj.weight.exp_avg": torch.zeros(2, 2)}, r"q_proj\.weight\.exp_avg: checkpoint \(2, 2\), this"),
    ],
)
def test_a_damaged_optimiser_state_is_refused_and_changes_nothing(
    benches: tuple[Workbench, Workbench], tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    trainer = benches[1].trainer("bf16")
    _train(trainer, benches[1])
    trainer.save(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    state = load_file(file) | {f"model.layers.1.self_attn.{name}": value for name, value in change.items()}
    save_file({name: value for name, value in state.items() if value is not None}, file)
    used = benches[1].trainer("bf16")
    before = used.report()
    with pytest.raises(EngineError, match=message):
        used.load(tmp_path)
    assert used.report() == before


def test_scores_are_close_to_those_of_the_torch_trainer(benches: tuple[Workbench, Workbench]) -> None:
    batch = benches[0].batch("bf16")
    ours, theirs = (bench.trainer("bf16").score(batch).logprobs for bench in reversed(benches))
    error = (ours - theirs)[batch.response_mask()].abs()
    # BF16 rounding in both: 0.0101 where the processor multiplies in BF16 (AMX), less elsewhere.
    assert float(error.mean()) < MEGATRON.bf16_error


@pytest.mark.parametrize("options", [(), (HEAD,), (HEAD, "recipe.calibration.max_tokens_per_sequence=5")])
def test_scales_are_those_of_the_torch_trainer(options: tuple[str, ...], tmp_path: Path) -> None:
    """The same tokens are measured: only BF16 rounding lies between them. By head a mix-up would show."""
    folder = make_model(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    rows, found = _bench("torch", folder).batch("bf16").rows(), []
    for name in ("torch", "megatron"):
        trainer = _bench(name, folder).trainer(KV, *options)
        trainer.calibrate(rows)
        found.append(trainer.report().scales)
    assert found[0].keys() == found[1].keys()
    for key, scale in found[0].items():
        assert found[1][key] == pytest.approx(scale, rel=0.02), key


def test_calibration_leaves_no_observer_behind(benches: tuple[Workbench, Workbench]) -> None:
    trainer, rows = benches[1].trainer(KV), benches[1].prompt_rows()
    before = trainer.report().scales
    trainer.score(benches[1].batch(KV))
    broken = TokenRows(rows.tokens, torch.full_like(rows.lengths, 0))
    with pytest.raises(ValueError, match=r"lengths\[0\] = 0"):
        trainer.calibrate(broken)
    assert trainer.report().scales == before
    trainer.calibrate(rows)
    assert trainer.report().scales == before


def test_the_learning_rate_falls_as_configured(benches: tuple[Workbench, Workbench], tmp_path: Path) -> None:
    options = (
        "trainer.optimizer.learning_rate=0.004",
        "trainer.optimizer.warmup_steps=2",
        "trainer.lr_schedule.shape=linear",
        "trainer.lr_schedule.decay_updates=4",
        "trainer.lr_schedule.min_lr=0.001",
    )
    trainer = benches[1].trainer("bf16", *options)
    rates = [_train(trainer, benches[1])["optim/lr"] for _ in range(3)]
    assert rates == pytest.approx([0.002, 0.004, 0.0025])
    trainer.save(tmp_path)
    resumed = benches[1].trainer("bf16", *options)
    resumed.load(tmp_path)
    assert [_train(resumed, benches[1])["optim/lr"] for _ in range(2)] == pytest.approx([0.001, 0.001])


def test_scores_do_not_depend_on_the_chunk_of_logits(benches: tuple[Workbench, Workbench]) -> None:
    batch = benches[1].batch("bf16")
    whole, parts = (
        benches[1].trainer("bf16", f"trainer.logprob_chunk={size}").score(batch).logprobs for size in (1024, 5)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_packed_rows_score_and_learn_as_padded_ones(benches: tuple[Workbench, Workbench]) -> None:
    """Rows of one sequence see nothing of each other, and every value is put back to its own token."""
    benches[1].trainer("bf16")
    from tasks.engines.megatron_passes import passes
    from tasks.engines.megatron_policy import MegatronPolicy

    config, batch = benches[1].config("bf16", "trainer.micro_batch_size=5"), benches[1].batch("bf16")
    padded = passes(config.trainer, config.recipe, 1.0)
    ways = padded, replace(padded, packed=True), replace(padded, packed=True, rule=PackingRule(112, 16, 4))
    logprobs, gradients = [], []
    for way in ways:
        policy = MegatronPolicy(benches[1].model_dir, config.recipe, Layout(), way)
        parts = way.parts(batch.lengths)[0]
        assert 1 < len(parts) < len(batch.lengths)
        logprobs.append(policy.score(batch, parts)[0])
        for rows in parts:
            policy.evaluate(batch, rows, batch.response_mask()[rows], False)[0].sum().backward()
        gradients.append(policy.model.module.decoder.layers[0].self_attention.linear_qkv.weight.grad.float())
    mask = batch.response_mask()
    for found, gradient in zip(logprobs[1:], gradients[1:], strict=True):
        assert torch.equal(found.isnan(), ~mask)
        assert float((found - logprobs[0])[mask].abs().mean()) < MEGATRON.bf16_error / 2
        assert float((gradient - gradients[0]).norm()) < 0.03 * float(gradients[0].norm())


def test_a_mixture_of_experts_trains_and_continues_bitwise(
    benches: tuple[Workbench, Workbench], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "saved").mkdir()
    folder = save_model("moe", tmp_path / "model")
    config, batch = benches[1].config("bf16", f"model.path={folder}"), benches[1].batch("bf16")
    trainer, resumed = build_trainer(config, folder), build_trainer(config, folder)
    before = trainer.report().fingerprints
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in before

    def step(engine: TrainerEngine) -> dict[str, float]:
        return engine.train(batch, engine.score(batch).logprobs, advantages())

    step(trainer)
    after = trainer.report().fingerprints
    assert all(after[name] != before[name] for name in before)
    trainer.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    assert step(trainer) == step(resumed)
    assert trainer.report() == resumed.report()


def test_settings_that_are_not_there_yet_are_refused(benches: tuple[Workbench, Workbench]) -> None:
    for option, message in (
        ("trainer.ranks=2", r"this process has groups for Layout\(tensor=1.* needs a process of its own"),
        ("trainer.device=gpu", "trainer.device = gpu: this machine has no CUDA; allowed: cpu"),
    ):
        with pytest.raises(EngineError, match=message):
            benches[1].trainer("bf16", option)


def test_layers_that_are_computed_again_train_bitwise_alike(benches: tuple[Workbench, Workbench]) -> None:
    ends = []
    for kind in ("selective", "full"):
        trainer = benches[1].trainer("bf16", f"trainer.recompute={kind}")
        ends.append((_train(trainer, benches[1]), trainer.report().fingerprints))
    assert ends[0] == ends[1]


def test_a_process_has_the_groups_of_one_layout(benches: tuple[Workbench, Workbench]) -> None:
    benches[1].trainer("bf16")
    from tasks.engines.megatron_model import ensure_groups

    ensure_groups(Layout(), False, None, 60, 1)
    with pytest.raises(EngineError, match=r"groups for Layout.* needs a process of its own"):
        ensure_groups(Layout(tensor=2), False, "file:///nowhere", 60, 1)
