"""Scores: p of each response token at the held weights, and the mismatch with what the rollout engine said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.contract.engines import FP8_TRAINING, Workbench
from tests.contract.reference import Reference


def test_scoring_twice_gives_the_same_bits(trainers: Workbench, recipe: str) -> None:
    trainer, batch = trainers.trainer(recipe), trainers.batch(recipe)
    first, second = trainer.score(batch), trainer.score(batch)
    torch.testing.assert_close(first.logprobs, second.logprobs, rtol=0, atol=0, equal_nan=True)
    assert first.metrics == second.metrics
    assert trainer.version == 0


def test_scores_stand_at_response_tokens_alone(trainers: Workbench, recipe: str) -> None:
    batch = trainers.batch(recipe)
    logprobs = trainers.trainer(recipe).score(batch).logprobs
    assert logprobs.dtype == torch.float32 and logprobs.shape == batch.tokens.shape
    assert torch.equal(torch.isfinite(logprobs), batch.response_mask())
    assert torch.equal(torch.isnan(logprobs), ~batch.response_mask())


def test_scores_are_those_of_an_independent_model(trainers: Workbench, recipe: str) -> None:
    """The trainer's attention is never quantised, whatever the recipe's cache holds."""
    trainer, batch = trainers.trainer(recipe), trainers.batch(recipe)
    fp8 = recipe in FP8_TRAINING
    payload = trainer.export_weights(trainers.recipe("fp8_rollout" if fp8 else "bf16"))
    reference = Reference(trainers.model_dir, payload, dtype=torch.bfloat16 if fp8 else torch.float32)
    with torch.no_grad():
        expected = reference.logprobs(batch)
    error = (trainer.score(batch).logprobs - expected)[batch.response_mask()].abs()
    engine = trainers.trainer_engine
    assert float(error.mean()) < (engine.fp8_error if fp8 else engine.bf16_error)


def test_scores_divide_by_the_sampling_temperature(trainers: Workbench) -> None:
    override = "rollout.temperature=0.5"
    trainer = trainers.trainer("bf16", override)
    batch = trainers.rollout("bf16").generate(trainers.request(temperature=0.5))
    d = (trainer.score(batch).logprobs - batch.logprobs)[batch.response_mask()].abs()
    assert float(d.mean()) < 2 * trainers.trainer_engine.bf16_error


def test_bf16_engines_agree_and_fp8_on_both_sides_beats_fp8_on_one(trainers: Workbench) -> None:
    def error(recipe: str) -> float:
        batch = trainers.batch(recipe)
        d = (trainers.trainer(recipe).score(batch).logprobs - batch.logprobs)[batch.response_mask()]
        return float(d.abs().mean())

    bf16, both, one = error("bf16"), error("fp8_e2e"), error("fp8_rollout")
    assert bf16 < trainers.trainer_engine.bf16_error
    assert bf16 < both < trainers.trainer_engine.fp8_error
    assert 2 * both < one


def test_metrics_are_those_of_the_returned_scores(trainers: Workbench, recipe: str) -> None:
    batch = trainers.batch(recipe)
    scores = trainers.trainer(recipe).score(batch)
    d = (scores.logprobs - batch.logprobs)[batch.response_mask()].double()
    weights = d.exp()
    expected = {
        "mismatch/token_mult_prob_error": d.abs().exp().mean(),
        "mismatch/gen_kl": (d.exp() - 1 - d).mean(),
        "mismatch/policy_kl": ((-d).exp() - 1 + d).mean(),
        "mismatch/max_abs_logprob_diff": d.abs().max(),
        "mismatch/clamped_tokens": 0.0,
        "mismatch/missing_rollout_logprobs": 0.0,
        "importance/mean": weights.mean(),
        "importance/max": weights.max(),
        "importance/ess": weights.sum() ** 2 / (d.numel() * (weights**2).sum()),
        "importance/truncated_fraction": (weights > 2.0).double().mean(),
    }
    for name, value in expected.items():
        assert scores.metrics[name] == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
    assert 0 < scores.metrics["policy/entropy"] < math.log(128)


def test_entropy_is_that_of_the_reference(trainers: Workbench) -> None:
    batch = trainers.batch("bf16")
    reference = Reference(trainers.model_dir, trainers.payload("bf16"))
    with torch.no_grad():
        logp = reference.logits(batch.tokens).log_softmax(-1)[:, :-1]
    entropy = -(logp.exp() * logp).sum(-1)[batch.response_mask()[:, 1:]].mean()
    assert trainers.trainer("bf16").score(batch).metrics["policy/entropy"] == pytest.approx(float(entropy), rel=5e-3)


def test_a_missing_rollout_logprob_is_counted_and_does_not_poison(trainers: Workbench) -> None:
    batch = trainers.batch("bf16")
    holed = batch.logprobs.clone()
    first = int(batch.prompt_lengths[4])
    holed[4, first] = float("nan")
    holed[7, int(batch.prompt_lengths[7]) + 1] = float("-inf")
    scores = trainers.trainer("bf16").score(replace(batch, logprobs=holed))
    assert scores.metrics["mismatch/missing_rollout_logprobs"] == 2.0
    assert all(math.isfinite(value) for value in scores.metrics.values())
    assert math.isfinite(float(scores.logprobs[4, first]))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e"])
def test_scores_do_not_depend_on_micro_batches_or_padding(trainers: Workbench, recipe: str) -> None:
    batch = trainers.batch(recipe)
    whole = trainers.trainer(recipe).score(batch).logprobs
    split = trainers.trainer(recipe, "trainer.micro_batch_size=3").score(batch).logprobs
    garbage = batch.tokens.clone()
    garbage[torch.arange(garbage.shape[1]) >= batch.lengths.unsqueeze(1)] = 9
    padded = trainers.trainer(recipe).score(replace(batch, tokens=garbage)).logprobs
    mask = batch.response_mask()
    engine = trainers.trainer_engine
    bound = engine.bf16_error if recipe == "bf16" else engine.fp8_error
    assert float((split - whole)[mask].abs().mean()) < bound
    torch.testing.assert_close(padded[mask], whole[mask], rtol=0, atol=0)
