"""The policy loss: values by hand, metrics, masking and extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.loss import LossInputs, LossOutputs, ObjectiveSettings, policy_loss, policy_ratio
from tasks.numerics.normalization import Normalization, loss_coefficients

PLAIN = ObjectiveSettings()
GSPO = ObjectiveSettings(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
CISPO = ObjectiveSettings(surrogate="cispo", clip_low=1.0, clip_high=0.28)
EVERYTHING = tuple(
    ObjectiveSettings(ratio, surrogate, 0.15, 0.25, dual, 0.3, estimator, gradient, 0.1)  # type: ignore[arg-type]
    for ratio in ("token", "sequence")
    for surrogate, dual in (("clip", None), ("clip", 1.5), ("cispo", None), ("reinforce", None))
    for estimator, gradient in (("k1", "unbiased"), ("k2", "pathwise"), ("k3", "unbiased"), ("k3", "pathwise"))
)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def tokens(ratios: list[float], advantages: list[float], weights: list[float] | None = None) -> LossInputs:
    """One sequence of valid tokens with given ratios e^(pi - p), token mean."""
    old = torch.full((1, len(ratios)), -2.0, dtype=torch.float64)
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    return LossInputs(
        logprobs=old + row(*ratios).log(),
        old_logprobs=old,
        advantages=row(*advantages),
        weights=row(*(weights or [1.0] * len(ratios))),
        coefficients=torch.full((1, len(ratios)), 1 / len(ratios), dtype=torch.float64),
        mask=mask,
    )


def random_inputs(seed: int, rows: int, columns: int, mode: Normalization = "token_mean") -> LossInputs:
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64)

    old = -4 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=g) < 0.6
    return LossInputs(
        logprobs=old + 0.3 * normal(),
        old_logprobs=old,
        advantages=normal()[:, :1].expand(rows, columns),
        weights=2 * torch.rand(rows, columns, generator=g, dtype=torch.float64),
        coefficients=loss_coefficients(mask, mode, 7),
        mask=mask,
        reference_logprobs=old + 0.5 * normal(),
        entropy=normal().abs(),
    )


def gradient(inputs: LossInputs, chosen: ObjectiveSettings) -> Tensor:
    leaf = inputs.logprobs.detach().clone().requires_grad_()
    (got,) = torch.autograd.grad(policy_loss(replace(inputs, logprobs=leaf), chosen).loss, leaf)
    return got


def figures(out: LossOutputs) -> list[float]:
    return [out.loss.item(), *out.sums.values(), *out.counts.values(), *out.maxima.values()]


def test_at_ratio_one_the_loss_is_minus_the_weighted_advantage() -> None:
    out = policy_loss(tokens([1.0, 1.0, 1.0], [2.0, -1.0, 0.5], [1.0, 2.0, 0.5]), PLAIN)
    assert out.loss.item() == pytest.approx(-(2.0 - 2.0 + 0.25) / 3, rel=1e-14)
    assert out.sums == {"loss/policy": pytest.approx(-0.25 / 3), "loss/kl": 0.0, "loss/entropy": 0.0}
    assert out.counts == {"policy/clipped_fraction": 0.0, "policy/kl_to_old": 0.0, "policy/ratio_mean": 3.0}
    assert out.maxima == {"policy/ratio_max": 1.0}


def test_clipping_by_hand() -> None:
    # Ratio 1.5 or 0.5, advantage +1 or -1: the pessimistic one of clipped and unclipped is taken.
    inputs = tokens([1.5, 1.5, 0.5, 0.5, 1.1, 1.5], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    out = policy_loss(inputs, PLAIN)
    assert out.loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8 - 1.1) / 6, rel=1e-12)
    assert out.counts["policy/clipped_fraction"] == 2.0
    want = [0.0, 1.5 / 6, -0.5 / 6, 0.0, -1.1 / 6, 0.0]
    assert gradient(inputs, PLAIN)[0].tolist() == pytest.approx(want, rel=1e-12)


def test_metrics_by_hand() -> None:
    out = policy_loss(tokens([2.0, 0.25, 1.0], [1.0, 1.0, 1.0]), PLAIN)
    # k3(p - pi): 1/2 - 1 + log 2, and 4 - 1 - log 4.
    assert out.counts["policy/kl_to_old"] == pytest.approx(2.5 - math.log(2), rel=1e-12)
    assert out.counts["policy/ratio_mean"] == pytest.approx(3.25, rel=1e-12)
    assert out.maxima["policy/ratio_max"] == pytest.approx(2.0, rel=1e-12)


def test_asymmetric_clip_by_hand() -> None:
    chosen = ObjectiveSettings(clip_low=0.1, clip_high=0.4)
    out = policy_loss(tokens([1.5, 1.3, 0.5, 0.95], [1.0, 1.0, -1.0, -1.0]), chosen)
    assert out.loss.item() == pytest.approx((-1.4 - 1.3 + 0.9 + 0.95) / 4, rel=1e-12)
    assert out.counts["policy/clipped_fraction"] == 2.0


def test_dual_clip_by_hand() -> None:
    # A < 0 alone is bounded, at c |A|; A > 0 is clipped as before.
    chosen = replace(PLAIN, dual_clip=3.0)
    inputs = tokens([5.0, 2.0, 5.0, 0.5], [-2.0, -2.0, 1.0, -1.0])
    out = policy_loss(inputs, chosen)
    assert out.loss.item() == pytest.approx((6.0 + 4.0 - 1.2 + 0.8) / 4, rel=1e-12)
    assert out.counts["policy/clipped_fraction"] == 3.0
    assert gradient(inputs, chosen)[0].tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0], rel=1e-12)
    assert policy_loss(inputs, PLAIN).loss.item() == pytest.approx((10.0 + 4.0 - 1.2 + 0.8) / 4, rel=1e-12)


def test_cispo_by_hand() -> None:
    # pi = -2 + log r; the clipped ratio multiplies the gradient, which is never cut. No lower bound here.
    inputs = tokens([2.0, 0.1, 1.1], [1.0, -1.0, 0.5])
    out = policy_loss(inputs, CISPO)
    pi = [-2 + math.log(r) for r in (2.0, 0.1, 1.1)]
    want = (-1.28 * 1.0 * pi[0] + 0.1 * pi[1] - 1.1 * 0.5 * pi[2]) / 3
    assert out.loss.item() == pytest.approx(want, rel=1e-12)
    assert gradient(inputs, CISPO)[0].tolist() == pytest.approx([-1.28 / 3, 0.1 / 3, -0.55 / 3], rel=1e-12)
    assert out.counts["policy/clipped_fraction"] == 1.0
    both = replace(CISPO, clip_low=0.2)
    assert gradient(inputs, both)[0].tolist() == pytest.approx([-1.28 / 3, 0.8 / 3, -0.55 / 3], rel=1e-12)
    assert policy_loss(inputs, both).counts["policy/clipped_fraction"] == 2.0


def test_reinforce_by_hand_does_not_use_the_ratio() -> None:
    chosen = ObjectiveSettings(surrogate="reinforce")
    inputs = tokens([4.0, 0.25], [1.0, -3.0], [0.5, 2.0])
    want = (-0.5 * (-2 + math.log(4)) + 6 * (-2 - math.log(4))) / 2
    out = policy_loss(inputs, chosen)
    assert out.loss.item() == pytest.approx(want, rel=1e-12)
    assert gradient(inputs, chosen)[0].tolist() == pytest.approx([-0.25, 3.0], rel=1e-14)
    assert out.counts["policy/clipped_fraction"] == 0.0 and out.counts["policy/ratio_mean"] == pytest.approx(4.25)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_the_mean_over_sequences_of_the_clipped_sequence_objective(seed: int) -> None:
    inputs = random_inputs(seed, 6, 9, "sequence_mean")
    inputs = replace(inputs, weights=torch.ones_like(inputs.weights))
    chosen = replace(GSPO, clip_low=0.05, clip_high=0.08)
    objective = []
    for i in range(6):
        d = (inputs.logprobs - inputs.old_logprobs)[i][inputs.mask[i]].numpy()
        if d.size:
            s, a = math.exp(d.mean()), float(inputs.advantages[i, 0])
            objective.append(min(s * a, min(max(s, 0.95), 1.08) * a))
    # Coefficients are fp32.
    assert policy_loss(inputs, chosen).loss.item() == pytest.approx(-np.mean(objective), rel=1e-6)


def test_gspo_by_hand_counts_all_tokens_of_a_clipped_sequence() -> None:
    # Geometric means 2 and 1/2; lengths 2 and 1.
    old = torch.tensor([[-2.0, -2.0], [-2.0, -9.0]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs=old + torch.tensor([[4.0, 1.0], [0.5, 7.0]], dtype=torch.float64).log(),
        old_logprobs=old,
        advantages=torch.ones(2, 2, dtype=torch.float64),
        weights=torch.ones(2, 2),
        coefficients=torch.tensor([[0.25, 0.25], [0.5, 0.0]]),
        mask=torch.tensor([[True, True], [True, False]]),
    )
    out = policy_loss(inputs, replace(GSPO, clip_high=0.25))
    assert out.loss.item() == pytest.approx(-(1.25 + 0.5) / 2, rel=1e-12)
    assert out.counts["policy/clipped_fraction"] == 2.0
    assert out.counts["policy/ratio_mean"] == pytest.approx(2 + 2 + 0.5, rel=1e-12)
    assert out.maxima["policy/ratio_max"] == pytest.approx(2.0, rel=1e-12)


def test_truncated_weights_keep_the_denominator_and_zero_weights_drop_the_token() -> None:
    assert policy_loss(tokens([1.0, 1.0], [1.0, 1.0], [1.0, 2.0]), PLAIN).loss.item() == pytest.approx(-1.5)
    assert policy_loss(tokens([1.0, 1.0], [1.0, 1.0], [1.0, 0.0]), PLAIN).loss.item() == pytest.approx(-0.5)


def test_kl_is_coefficient_weighted_and_enters_with_kl_coef() -> None:
    inputs = replace(tokens([1.0, 1.0], [1.0, -1.0]), reference_logprobs=row(-2.0 + math.log(2), -2.0 - math.log(2)))
    out = policy_loss(inputs, replace(PLAIN, kl_coef=0.1))
    # k3(log 2) + k3(-log 2) = (1 - log 2) + (log 2 - 1/2) = 1/2.
    assert out.sums["loss/kl"] == pytest.approx(0.25, rel=1e-12)
    assert out.loss.item() == pytest.approx(0.025, rel=1e-12)


def test_the_kl_term_is_weighted_by_weight_and_token_ratio() -> None:
    inputs = replace(tokens([2.0, 0.5], [1.0, 1.0], [0.5, 3.0]), reference_logprobs=row(-2.0, -2.0))
    for chosen in (PLAIN, GSPO, CISPO):
        got = policy_loss(inputs, replace(chosen, kl_estimator="k1")).sums["loss/kl"]
        assert got == pytest.approx((0.5 * 2.0 * math.log(2) + 3.0 * 0.5 * -math.log(2)) / 2, rel=1e-12)
        pathwise = replace(chosen, kl_estimator="k1", kl_gradient="pathwise")
        assert policy_loss(inputs, pathwise).sums["loss/kl"] == pytest.approx(0.0, abs=1e-15)


def test_entropy_is_subtracted() -> None:
    inputs = replace(tokens([1.0, 1.0], [0.0, 0.0]), entropy=row(1.0, 2.0))
    out = policy_loss(inputs, replace(PLAIN, entropy_coef=0.1))
    assert out.sums["loss/entropy"] == 1.5 and out.loss.item() == pytest.approx(-0.15, rel=1e-14)


def test_parts_with_a_zero_coefficient_are_reported_and_leave_the_loss_alone() -> None:
    inputs = random_inputs(0, 3, 4)
    bare = policy_loss(replace(inputs, reference_logprobs=None, entropy=None), PLAIN)
    out = policy_loss(inputs, PLAIN)
    assert torch.equal(out.loss, bare.loss) and out.sums["loss/kl"] > 0 and out.sums["loss/entropy"] > 0
    broken = replace(inputs, reference_logprobs=torch.full_like(inputs.logprobs, math.nan))
    assert torch.equal(policy_loss(broken, PLAIN).loss, bare.loss)


@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        (PLAIN, replace(PLAIN, kl_estimator="k1", kl_gradient="pathwise")),
        (CISPO, replace(CISPO, dual_clip=1.1)),
        (replace(PLAIN, surrogate="reinforce"), ObjectiveSettings("sequence", "reinforce", 0.5, 0.9, 2.0)),
    ],
)
def test_unused_settings_change_nothing(chosen: ObjectiveSettings, other: ObjectiveSettings) -> None:
    inputs = replace(random_inputs(3, 4, 5), reference_logprobs=None, entropy=None)
    assert torch.equal(policy_loss(inputs, chosen).loss, policy_loss(inputs, other).loss)
    assert torch.equal(gradient(inputs, chosen), gradient(inputs, other))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38, -200.0, 200.0])
@pytest.mark.parametrize("chosen", EVERYTHING)
def test_masked_positions_may_hold_anything(chosen: ObjectiveSettings, poison: float) -> None:
    clean = random_inputs(5, 3, 6)
    assert not bool(clean.mask.all())
    dirty = LossInputs(
        **{
            name: getattr(clean, name)
            if name == "mask"
            else torch.where(clean.mask, getattr(clean, name), poison).to(getattr(clean, name).dtype)
            for name in clean.__dataclass_fields__
        }
    )
    assert figures(policy_loss(dirty, chosen)) == figures(policy_loss(clean, chosen))
    assert torch.equal(gradient(dirty, chosen), gradient(clean, chosen))
    assert not gradient(dirty, chosen)[~clean.mask].any()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("chosen", EVERYTHING)
def test_without_valid_tokens_everything_is_zero(chosen: ObjectiveSettings, shape: tuple[int, int]) -> None:
    inputs = random_inputs(0, *shape)
    empty = torch.zeros(shape, dtype=torch.bool)
    inputs = replace(inputs, mask=empty, coefficients=loss_coefficients(empty, "token_mean"))
    assert set(figures(policy_loss(inputs, chosen))) == {0.0}
    assert gradient(inputs, chosen).tolist() == torch.zeros(shape).tolist()


def test_log_ratios_of_200_by_hand() -> None:
    old = row(-1.0, -201.0, -1.0, -201.0)
    ones = torch.ones_like(old)
    inputs = LossInputs(row(-201.0, -1.0, -201.0, -1.0), old, row(1.0, 1.0, -1.0, -1.0), ones, ones, ones.bool())
    # min(r A, clip(r) A): e^-20, 1.2, -0.8 and the unbounded side -e^20; dual clip bounds that at -3.
    out = policy_loss(inputs, PLAIN)
    assert out.loss.item() == pytest.approx(-(math.exp(-20) + 1.2 - 0.8 - math.exp(20)), rel=1e-12)
    assert out.maxima["policy/ratio_max"] == pytest.approx(math.exp(20), rel=1e-14)
    assert out.counts["policy/kl_to_old"] == pytest.approx(2 * (math.exp(20) - 21) + 2 * (math.exp(-20) + 19))
    dual = policy_loss(inputs, replace(PLAIN, dual_clip=3.0))
    assert dual.loss.item() == pytest.approx(-(math.exp(-20) + 1.2 - 0.8 - 3.0), rel=1e-12)
    # One sequence: the mean is 0, whatever its tokens are.
    assert policy_loss(inputs, replace(PLAIN, ratio="sequence")).maxima["policy/ratio_max"] == 1.0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(-1e4, 0)] * 3, st.floats(-9, 9), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(EVERYTHING),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_finite_for_any_finite_input(
    values: list[tuple[float, float, float, float, bool]], chosen: ObjectiveSettings, dtype: torch.dtype
) -> None:
    pi, old, reference, a, valid = (torch.tensor([list(side)]) for side in zip(*values, strict=True))
    mask = valid.bool()
    weights, entropy = torch.full(pi.shape, 2.0), torch.full(pi.shape, 11.0, dtype=dtype)
    inputs = LossInputs(
        pi.to(dtype),
        old.to(dtype),
        a,
        weights,
        loss_coefficients(mask, "token_mean"),
        mask,
        reference.to(dtype),
        entropy,
    )
    assert np.isfinite(figures(policy_loss(inputs, chosen))).all()
    assert bool(torch.isfinite(gradient(inputs, chosen)).all())


def test_a_score_that_is_not_a_number_is_not_hidden() -> None:
    for name in ("logprobs", "old_logprobs", "weights", "advantages"):
        inputs = tokens([1.5, 0.5], [1.0, 1.0])
        broken = replace(inputs, **{name: torch.where(torch.tensor([[True, False]]), getattr(inputs, name), math.nan)})
        assert math.isnan(policy_loss(broken, PLAIN).loss.item())


def long_response(advantage: float) -> LossInputs:
    old = torch.full((1, 8192), -0.5, dtype=torch.float64)
    mask = torch.ones(1, 8192, dtype=torch.bool)
    a, w = torch.full_like(old, advantage), torch.ones_like(old)
    return LossInputs(old - 1e-3, old, a, w, loss_coefficients(mask, "sequence_mean"), mask)


def test_a_long_response_with_a_constant_difference_by_hand() -> None:
    # The product over the tokens would be e^-8.192; token ratio and geometric mean are e^-0.001.
    for chosen in (PLAIN, replace(PLAIN, ratio="sequence")):
        out = policy_loss(long_response(2.0), chosen)
        assert out.loss.item() == pytest.approx(-2 * 0.9990004998333750, rel=1e-11)
        assert out.counts["policy/ratio_mean"] / 8192 == pytest.approx(0.9990004998333750, rel=1e-11)
    # Below 1 - 3e-4 all its tokens are clipped where A < 0, none where A > 0.
    clipped = policy_loss(long_response(-1.0), GSPO)
    assert clipped.loss.item() == pytest.approx(0.9997, rel=1e-12)
    assert clipped.counts["policy/clipped_fraction"] == 8192
    assert policy_loss(long_response(1.0), GSPO).counts["policy/clipped_fraction"] == 0


def test_a_sequence_ratio_in_fp32_keeps_digits_beyond_clips_of_1e_4() -> None:
    d = torch.full((1, 8192), 3e-4) + 1e-4 * torch.randn(1, 8192, generator=torch.Generator().manual_seed(0))
    got = float(policy_ratio(d, torch.ones(1, 8192, dtype=torch.bool), "sequence")[0, 0])
    assert got == pytest.approx(math.exp(d.double().mean().item()), abs=6e-8)


def test_fp32_inputs_give_an_fp32_loss_and_fp64_advantages_do_not_widen_it() -> None:
    inputs = random_inputs(1, 2, 3)
    assert inputs.reference_logprobs is not None and inputs.entropy is not None
    single = replace(
        inputs,
        logprobs=inputs.logprobs.float(),
        old_logprobs=inputs.old_logprobs.float(),
        weights=inputs.weights.float(),
        reference_logprobs=inputs.reference_logprobs.float(),
        entropy=inputs.entropy.float(),
    )
    for chosen in EVERYTHING:
        out = policy_loss(single, chosen)
        assert out.loss.dtype == torch.float32 and out.loss.shape == ()
        assert out.loss.item() == pytest.approx(policy_loss(inputs, chosen).loss.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("clip_low", -0.1, "0 to 1"),
        ("clip_low", 1.5, "0 to 1"),
        ("clip_low", math.nan, "0 to 1"),
        ("clip_high", -0.1, "numbers >= 0"),
        ("clip_high", math.nan, "numbers >= 0"),
        ("dual_clip", 1.0, "None and numbers > 1"),
        ("dual_clip", math.nan, "None and numbers > 1"),
        ("kl_coef", -1.0, "finite numbers >= 0"),
        ("entropy_coef", math.inf, "finite numbers >= 0"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} = {value}: allowed are {allowed}"):
        ObjectiveSettings(**{name: value})  # type: ignore[arg-type]


def test_a_coefficient_without_its_input_is_refused() -> None:
    inputs = tokens([1.0], [1.0])
    with pytest.raises(ValueError, match=r"kl_coef = 0.1 needs reference_logprobs"):
        policy_loss(inputs, replace(PLAIN, kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef = 0.2 needs entropy"):
        policy_loss(inputs, replace(PLAIN, entropy_coef=0.2))


def test_inputs_of_another_shape_are_refused_instead_of_broadcast() -> None:
    inputs = tokens([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"advantages must be \(1, 2\) like logprobs, got \(1, 1\)"):
        replace(inputs, advantages=row(1.0))
    with pytest.raises(
        ValueError, match=r"needed are \[sequences, tokens\] and a bool mask, got \(1, 2\), torch.int64"
    ):
        replace(inputs, mask=inputs.mask.long())
