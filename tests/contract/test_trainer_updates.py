"""Updates: the loss by hand, gradients against an independent model, and what must not move the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tasks.engines.protocols import RolloutBatch, TrainerEngine
from tests.contract.engines import FP8_TRAINING, Workbench, advantages, linears_of
from tests.contract.reference import Reference

LARGE_STEP = "trainer.optimizer.learning_rate=1e-2"


def _train(trainer: TrainerEngine, batch: RolloutBatch, values: Tensor | None = None) -> dict[str, float]:
    scores = trainer.score(batch)
    return trainer.train(batch, scores.logprobs, advantages() if values is None else values)


def _weights(trainer: TrainerEngine) -> dict[str, int]:
    return trainer.report().fingerprints


def test_training_changes_the_weights_and_is_deterministic(trainers: Workbench, recipe: str) -> None:
    batch = trainers.batch(recipe)
    first, second = trainers.trainer(recipe), trainers.trainer(recipe)
    start = _weights(first)
    for _ in range(2):
        assert _train(first, batch) == _train(second, batch)
    assert _weights(first) == _weights(second)
    assert all(_weights(first)[name] != start[name] for name in start)
    plan = trainers.recipe(recipe)
    assert first.export_weights(plan).fingerprints == second.export_weights(plan).fingerprints


@pytest.mark.slow
def test_several_threads_are_deterministic_too(trainers: Workbench) -> None:
    batch, threads = trainers.batch("fp8_e2e"), "trainer.threads=2"
    p = trainers.trainer("fp8_e2e").score(batch).logprobs
    first, second = trainers.trainer("fp8_e2e", threads), trainers.trainer("fp8_e2e", threads)
    assert first.train(batch, p, advantages()) == second.train(batch, p, advantages())
    assert _weights(first) == _weights(second)


def test_the_version_counts_calls_of_train(trainers: Workbench) -> None:
    trainer, batch = trainers.trainer("bf16", "algorithm.updates_per_step=2"), trainers.batch("bf16")
    assert trainer.version == trainer.report().version == 0
    for version in (1, 2):
        _train(trainer, batch)
        assert trainer.version == trainer.report().version == version
        assert trainer.export_weights(trainers.recipe("bf16")).version == version


def test_the_loss_is_the_token_mean_of_weight_times_advantage(trainers: Workbench, recipe: str) -> None:
    """Before any update the policy ratio is 1."""
    trainer, batch = trainers.trainer(recipe), trainers.batch(recipe)
    p, mask = trainer.score(batch).logprobs, batch.response_mask()
    weights = (p - batch.logprobs).exp().clamp(max=2.0)
    expected = -(weights * advantages()[:, None])[mask].double().mean()
    metrics = trainer.train(batch, p, advantages())
    assert metrics["loss/policy"] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    assert metrics["loss/kl"] == 0.0
    assert metrics["policy/clipped_fraction"] == 0.0
    assert metrics["optim/skipped_steps"] == 0.0
    assert metrics["optim/lr"] == 3e-4


def test_gradients_are_those_of_an_independent_model(trainers: Workbench) -> None:
    """Norm of the gradient, and the first AdamW step, which moves each weight by lr against the gradient's sign."""
    batch, mask = trainers.batch("bf16"), trainers.batch("bf16").response_mask()
    reference = Reference(trainers.model_dir, trainers.payload("bf16"))
    logp = reference.logprobs(batch)
    weights = (logp.detach() - batch.logprobs).exp().clamp(max=2.0)
    loss = -(weights * advantages()[:, None] * (logp - logp.detach()).exp())[mask].mean()
    loss.backward()
    grads = {name: p.grad for name, p in reference.parameters.items()}
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))
    trainer = trainers.trainer("bf16", LARGE_STEP)
    assert _train(trainer, batch)["optim/grad_norm"] == pytest.approx(norm, rel=0.02)
    after = trainer.export_weights(trainers.recipe("bf16")).tensors
    for name, before in trainers.payload("bf16").tensors.items():
        grad = grads[name]
        moved = after[name].float() - before.float()
        large = grad.abs() > grad.abs().mean()
        agreement = (moved.sign() == -grad.sign())[large].double().mean()
        assert float(agreement) > 0.98, name
        # BF16 holds 8 bits: a weight near 1 moves by a multiple of 2^-7.
        assert float(moved.abs().max()) <= 1e-2 + 2**-8 * float(before.float().abs().max()) * 2, name


def test_a_rising_ratio_is_clipped(trainers: Workbench) -> None:
    """Updates on the same samples: once the ratio has left 1 +- 0.2, its tokens are counted."""
    trainer, batch = trainers.trainer("bf16", LARGE_STEP), trainers.batch("bf16")
    old = trainer.score(batch).logprobs
    first = trainer.train(batch, old, advantages())
    second = trainer.train(batch, old, advantages())
    assert first["policy/clipped_fraction"] == 0.0
    assert 0.2 < second["policy/clipped_fraction"] <= 1.0
    assert second["loss/policy"] < first["loss/policy"]


def test_training_raises_what_was_rewarded(trainers: Workbench, recipe: str) -> None:
    trainer, batch = trainers.trainer(recipe), trainers.batch(recipe)
    mask, good = batch.response_mask(), advantages() > 0
    before = trainer.score(batch).logprobs
    for _ in range(3):
        _train(trainer, batch)
    change = torch.where(mask, trainer.score(batch).logprobs - before, 0.0).sum(1)
    assert float(change[good].sum()) > 1.0
    assert float(change[~good].sum()) < -1.0


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e"])
def test_micro_batches_add_up_to_the_batch(trainers: Workbench, recipe: str) -> None:
    batch = trainers.batch(recipe)
    whole, split = trainers.trainer(recipe), trainers.trainer(recipe, "trainer.micro_batch_size=3")
    p = whole.score(batch).logprobs
    one, four = whole.train(batch, p, advantages()), split.train(batch, p, advantages())
    # A weight gradient's FP8 groups run along the tokens of a micro-batch, so that norms differ a little more.
    assert four["loss/policy"] == pytest.approx(one["loss/policy"], rel=0.02, abs=0.01)
    assert four["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=0.02 if recipe == "bf16" else 0.05)


def test_updates_of_a_step_share_its_samples(trainers: Workbench) -> None:
    """Two updates on half the samples each equal two steps on the halves, up to the version."""
    batch = trainers.batch("bf16")
    joint, apart = trainers.trainer("bf16", "algorithm.updates_per_step=2"), trainers.trainer("bf16")
    p = joint.score(batch).logprobs
    joint.train(batch, p, advantages())
    for half in (slice(0, 6), slice(6, 12)):
        part = RolloutBatch(**{name: value[half] for name, value in vars(batch).items()})
        apart.train(part, p[half], advantages()[half])
    assert _weights(joint) == _weights(apart)
    assert (joint.version, apart.version) == (1, 2)


def test_zero_advantages_leave_the_weights(trainers: Workbench, recipe: str) -> None:
    trainer, batch = trainers.trainer(recipe), trainers.batch(recipe)
    start = _weights(trainer)
    metrics = _train(trainer, batch, torch.zeros(12))
    assert metrics["optim/grad_norm"] == metrics["loss/policy"] == metrics["optim/skipped_steps"] == 0.0
    assert _weights(trainer) == start
    assert trainer.version == 1


def test_weight_decay_moves_weights_without_a_gradient(trainers: Workbench) -> None:
    trainer = trainers.trainer("bf16", LARGE_STEP, "trainer.optimizer.weight_decay=1.0")
    before = trainers.payload("bf16").tensors["model.embed_tokens.weight"].float()
    _train(trainer, trainers.batch("bf16"), torch.zeros(12))
    after = trainer.export_weights(trainers.recipe("bf16")).tensors["model.embed_tokens.weight"].float()
    torch.testing.assert_close(after, 0.99 * before, rtol=2**-7, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(trainers: Workbench, recipe: str, poison: float) -> None:
    trainer, unharmed, batch = trainers.trainer(recipe), trainers.trainer(recipe), trainers.batch(recipe)
    start, bad = _weights(trainer), advantages()
    bad[3] = poison
    metrics = _train(trainer, batch, bad)
    assert metrics["optim/skipped_steps"] == 1.0
    assert not math.isfinite(metrics["optim/grad_norm"])
    assert _weights(trainer) == start
    assert trainer.version == 1
    # Nothing of it stays behind: the next step equals that of an engine which never saw it.
    assert _train(trainer, batch) == _train(unharmed, batch)
    assert _weights(trainer) == _weights(unharmed)


def test_one_bad_update_of_two_is_skipped_alone(trainers: Workbench) -> None:
    trainer, batch = trainers.trainer("bf16", "algorithm.updates_per_step=2"), trainers.batch("bf16")
    start, bad = _weights(trainer), advantages()
    bad[3] = float("nan")
    assert _train(trainer, batch, bad)["optim/skipped_steps"] == 1.0
    assert _weights(trainer) != start


def test_the_learning_rate_warms_up_by_applied_updates(trainers: Workbench) -> None:
    trainer = trainers.trainer("bf16", "trainer.optimizer.warmup_steps=4", "trainer.optimizer.learning_rate=0.004")
    batch, bad = trainers.batch("bf16"), advantages()
    bad[0] = float("nan")
    rates = [_train(trainer, batch, a)["optim/lr"] for a in (advantages(), bad, *[advantages()] * 4)]
    # Each figure is the rate of the step's own update; the skipped one does not move the warm-up on.
    assert rates == pytest.approx([0.001, 0.002, 0.002, 0.003, 0.004, 0.004])


def test_fp8_training_computes_in_fp8_and_bf16_training_does_not(trainers: Workbench) -> None:
    """The same samples and the same weights: recipes that train alike end bitwise alike, the others do not."""
    batch = trainers.batch("bf16")
    norms, ends = {}, {}
    for recipe in ("bf16", "fp8_rollout", "fp8_rollout_kv", *FP8_TRAINING):
        trainer = trainers.trainer(recipe)
        report = trainer.report()
        fp8 = recipe in FP8_TRAINING
        assert report.quantized_linears == (linears_of(0, 1) if fp8 else ())
        assert report.linear_dtype == ("float8_e4m3fn" if fp8 else "bfloat16")
        assert (report.kv_dtype, report.query_dtype) == ("bfloat16", "bfloat16")
        norms[recipe] = _train(trainer, batch)["optim/grad_norm"]
        ends[recipe] = _weights(trainer)
    assert ends["bf16"] == ends["fp8_rollout"] == ends["fp8_rollout_kv"]
    assert ends["fp8_e2e"] == ends["fp8_e2e_kv"]
    assert all(ends["fp8_e2e"][name] != value for name, value in ends["bf16"].items())
    assert norms["fp8_e2e"] != norms["bf16"]
    assert norms["fp8_e2e"] == pytest.approx(norms["bf16"], rel=0.1)


@pytest.mark.parametrize(
    "override, quantized",
    [
        ("keep_first_layers=1", linears_of(1)),
        ("keep_last_layers=1", linears_of(0)),
        ("exclude=[model.layers.1.self_attn.q_proj]", linears_of(0) + linears_of(1)[1:]),
    ],
)
def test_layers_that_the_recipe_keeps_train_in_bf16(
    trainers: Workbench, override: str, quantized: tuple[str, ...]
) -> None:
    kept = trainers.trainer("fp8_e2e", f"recipe.training_linears.{override}")
    assert kept.report().quantized_linears == quantized
    batch = trainers.batch("fp8_e2e")
    scores = [t.score(batch).logprobs for t in (kept, trainers.trainer("fp8_e2e"), trainers.trainer("bf16"))]
    mask = batch.response_mask()
    assert not torch.equal(scores[0][mask], scores[1][mask])
    assert not torch.equal(scores[0][mask], scores[2][mask])


def test_an_uncorrected_run_weighs_every_token_alike(trainers: Workbench) -> None:
    trainer = trainers.trainer("fp8_rollout", "correction=none", "correction.allow_uncorrected=true")
    batch = trainers.batch("fp8_rollout")
    mask = batch.response_mask()
    expected = -advantages()[:, None].expand(mask.shape)[mask].double().mean()
    assert _train(trainer, batch)["loss/policy"] == pytest.approx(float(expected), abs=1e-6)
