"""Objectives and corrections as a trainer engine runs them: each shipped one trains, unused options change nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from conf.compose import CONFIG_DIR
from conf.overrides import groups
from tasks.engines.protocols import EngineError, RolloutBatch, TrainerEngine
from tasks.engines.registry import build_trainer
from tests.contract.engines import Workbench, advantages, make_model

ALGORITHMS, CORRECTIONS = groups(CONFIG_DIR)["algorithm"], groups(CONFIG_DIR)["correction"]


def _options(correction: str) -> tuple[str, ...]:
    # The suite pins some keys of the default options; here the shipped values are the subject.
    return (f"correction={correction}", "correction.allow_uncorrected=true")


def _two_steps(trainer: TrainerEngine, batch: RolloutBatch) -> dict[str, float]:
    """The second step on the same samples meets ratios away from 1."""
    p = trainer.score(batch).logprobs
    trainer.train(batch, p, advantages())
    return trainer.train(batch, p, advantages())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(trainers: Workbench, algorithm: str) -> None:
    options = (f"algorithm={algorithm}", "algorithm.kl_coef=0.05", "algorithm.entropy_coef=0.01")
    trainer, batch = trainers.trainer("fp8_rollout", *options), trainers.batch("fp8_rollout")
    before = trainer.report().fingerprints
    metrics = _two_steps(trainer, batch)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["optim/grad_norm"] > 0 and metrics["loss/kl"] > 0 and metrics["loss/entropy"] > 0
    assert metrics["policy/ratio_max"] > 1.0 and metrics["policy/kl_to_old"] > 0
    assert metrics["optim/empty_updates"] == 0.0
    assert all(trainer.report().fingerprints[name] != before[name] for name in before)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains_and_accounts_for_what_it_rejects(trainers: Workbench, correction: str) -> None:
    trainer, batch = trainers.trainer("fp8_rollout", *_options(correction)), trainers.batch("fp8_rollout")
    metrics = _two_steps(trainer, batch)
    config = trainers.config("fp8_rollout", *_options(correction)).correction
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0.0 <= metrics["importance/rejected_sequences_fraction"] <= metrics["importance/rejected_fraction"] < 1.0
    rules = [name for name in metrics if name.startswith("importance/rejected_fraction_")]
    assert len(rules) == len(config.rejection)
    if not config.rejection and config.outside == "truncate":
        assert metrics["importance/rejected_fraction"] == 0.0
    assert ("importance/self_normalizer" in metrics) == config.self_normalize


def test_a_rejected_sequence_moves_no_weight(trainers: Workbench) -> None:
    """All but the first sample are made far off the trainer's policy; only the first can then act."""
    batch = trainers.batch("bf16")
    far = RolloutBatch(**vars(batch) | {"logprobs": batch.logprobs.clone()})
    far.logprobs[1:] -= 5.0
    options = ("correction=outlier_veto",)
    trainer = trainers.trainer("bf16", *options)
    p = trainer.score(far).logprobs
    only_first = torch.where(torch.arange(12) == 0, 1.5, 0.0)
    alone = trainers.trainer("bf16", *options)
    everyone = trainer.train(far, p, torch.full((12,), 1.5))
    alone.train(batch, p, only_first)
    assert everyone["importance/rejected_fraction"] == pytest.approx(11 / 12)
    assert trainer.report().fingerprints == alone.report().fingerprints


def test_a_step_without_a_kept_token_leaves_the_weights_and_says_so(trainers: Workbench) -> None:
    batch = trainers.batch("bf16")
    far = RolloutBatch(**vars(batch) | {"logprobs": batch.logprobs - 5.0})
    trainer = trainers.trainer("bf16", "correction=outlier_veto", "correction.rejection.0.upper=2.0")
    before = trainer.report().fingerprints
    metrics = trainer.train(far, trainer.score(far).logprobs, advantages())
    assert metrics["importance/rejected_fraction"] == 1.0
    assert metrics["optim/empty_updates"] == 1.0
    assert trainer.report().fingerprints == before and trainer.version == 1
    assert metrics["loss/policy"] == metrics["policy/ratio_max"] == metrics["optim/grad_norm"] == 0.0


def test_the_denominator_key_scales_the_loss_by_what_is_kept(trainers: Workbench) -> None:
    batch = trainers.batch("fp8_rollout")
    d = (trainers.trainer("fp8_rollout").score(batch).logprobs - batch.logprobs)[batch.response_mask()]
    rule = f"correction.rejection=[{{statistic:k2,level:token,upper:{float(d.square().median() / 2):.6e}}}]"
    every = trainers.trainer("fp8_rollout", "correction.weight=none", rule)
    kept = trainers.trainer("fp8_rollout", "correction.weight=none", rule, "correction.denominator=kept")
    p = every.score(batch).logprobs
    values = torch.full((12,), 1.0)
    one, two = every.train(batch, p, values), kept.train(batch, p, values)
    share = 1 - one["importance/rejected_fraction"]
    assert 0.4 < share < 0.6
    assert one["loss/policy"] == pytest.approx(-share, rel=1e-6)
    assert two["loss/policy"] == pytest.approx(-1.0, rel=1e-6)


def test_overlong_filtering_leaves_truncated_samples_out(trainers: Workbench) -> None:
    batch = trainers.batch("bf16")
    assert bool(batch.truncated.all()), "the suite's end token is never sampled"
    half = RolloutBatch(**vars(batch) | {"truncated": torch.arange(12) < 6})
    trainer, plain = trainers.trainer("bf16", "algorithm.overlong.filter=true"), trainers.trainer("bf16")
    p = trainer.score(half).logprobs
    filtered = trainer.train(half, p, torch.full((12,), 1.0))
    rest = RolloutBatch(**{name: value[6:] for name, value in vars(half).items()})
    alone = plain.train(rest, p[6:], torch.full((6,), 1.0))
    # Half a batch: processors with AMX add in another order, about 1e-4. Without the filter the norm is 4.2, not 6.4.
    assert filtered["loss/policy"] == pytest.approx(alone["loss/policy"], rel=1e-3)
    assert filtered["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("scaling", ["tensor", "tensor_delayed"])
def test_scores_and_updates_see_the_same_batches(trainers: Workbench, scaling: str) -> None:
    """Under per-tensor scaling a token's value depends on its batch: the ratio before the first update is 1 still."""
    options = (
        f"recipe.training_linears.scaling={scaling}",
        "recipe.rollout_linears.scaling=tensor",
        "algorithm.updates_per_step=2",
        "algorithm.kl_coef=0.1",
        "trainer.optimizer.learning_rate=1e-30",
    )
    trainer, batch = trainers.trainer("fp8_e2e", *options), trainers.batch("fp8_e2e")
    for _ in range(3):
        metrics = trainer.train(batch, trainer.score(batch).logprobs, advantages())
        if scaling == "tensor":
            assert metrics["policy/ratio_max"] == 1.0 and metrics["policy/clipped_fraction"] == 0.0
        # The reference is quantised as the policy is, by the same histories: equal weights, no KL.
        assert metrics["loss/kl"] == 0.0


def test_a_continued_run_needs_the_reference_that_it_started_with(trainers: Workbench, tmp_path: Path) -> None:
    options = ("algorithm.kl_coef=0.1",)
    (tmp_path / "state").mkdir()
    trainers.trainer("bf16", *options).save(tmp_path / "state")
    other = build_trainer(trainers.config("bf16", *options), make_model(tmp_path / "other", seed=1))
    with pytest.raises(EngineError, match=r"reference policy was .* needs the model that it started from"):
        other.load(tmp_path / "state")


UNUSED = {
    "clip bounds without a ratio": (("algorithm=rloo",), ("algorithm.clip_low=0.5", "algorithm.clip_high=0.9")),
    "dual clip beside cispo": (("algorithm=cispo",), ("algorithm.dual_clip=3.0",)),
    "length of another normalisation": ((), ("algorithm.normalization_length=77",)),
    "estimator without a KL term": ((), ("algorithm.kl_estimator=k1", "algorithm.kl_gradient=pathwise")),
    "cap without a weight": (("correction=k1_token",), ("correction.cap=9.0", "correction.lower=0.4")),
    "buffer without a penalty": ((), ("algorithm.overlong.buffer=3",)),
    "bound of dynamic sampling that is off": ((), ("algorithm.dynamic_sampling.max_generation_batches=3",)),
    "denominator without rejection": ((), ("correction.denominator=kept",)),
    "names": ((), ("algorithm.name=other", "correction.name=other")),
}


@pytest.mark.parametrize("what", UNUSED)
def test_an_unused_option_changes_nothing(trainers: Workbench, what: str) -> None:
    base, extra = UNUSED[what]
    batch = trainers.batch("fp8_rollout")
    plain, other = trainers.trainer("fp8_rollout", *base), trainers.trainer("fp8_rollout", *base, *extra)
    assert _two_steps(plain, batch) == _two_steps(other, batch)
    assert plain.report().fingerprints == other.report().fingerprints
