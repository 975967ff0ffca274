"""The policy loss: values by hand, its gradient by fp64 differences, masking and micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.objective import LossInputs, ObjectiveSettings, clipped_surrogate, policy_loss

PLAIN = ObjectiveSettings(clip_low=0.2, clip_high=0.2)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def tokens(ratios: list[float], advantages: list[float], weights: list[float] | None = None) -> LossInputs:
    """One sequence of valid tokens with given ratios e^(pi - p)."""
    old = torch.full((1, len(ratios)), -2.0, dtype=torch.float64)
    return LossInputs(
        logprobs=(old + row(*ratios).log()).requires_grad_(),
        old_logprobs=old,
        advantages=row(*advantages),
        weights=row(*(weights or [1.0] * len(ratios))),
        mask=torch.ones(1, len(ratios), dtype=torch.bool),
    )


def random_inputs(seed: int, rows: int, columns: int, reference: bool) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    shift = 0.3 * torch.randn(rows, columns, generator=g, dtype=torch.float64)
    return LossInputs(
        logprobs=(old + shift).requires_grad_(),
        old_logprobs=old,
        advantages=torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, columns),
        weights=2 * torch.rand(rows, columns, generator=g, dtype=torch.float64),
        mask=torch.rand(rows, columns, generator=g) < 0.7,
        reference_logprobs=old + 0.5 * torch.randn(rows, columns, generator=g, dtype=torch.float64)
        if reference
        else None,
    )


def gradient(inputs: LossInputs, settings_: ObjectiveSettings, normalizer: float) -> Tensor:
    leaf = inputs.logprobs.detach().clone().requires_grad_()
    policy_loss(replace(inputs, logprobs=leaf), settings_, normalizer).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_at_ratio_one_the_loss_is_minus_the_weighted_advantage() -> None:
    out = policy_loss(tokens([1.0, 1.0, 1.0], [2.0, -1.0, 0.5], [1.0, 2.0, 0.5]), PLAIN, 3.0)
    assert out.loss.item() == pytest.approx(-(2.0 - 2.0 + 0.25) / 3, rel=1e-14)
    assert out.sums == {"loss/policy": pytest.approx(-0.25), "loss/kl": 0.0, "policy/clipped_fraction": 0.0}


def test_clipping_by_hand() -> None:
    # Ratio 1.5 or 0.5, advantage +1 or -1: the pessimistic one of clipped and unclipped is taken.
    inputs = tokens([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 1.0])
    got = clipped_surrogate(row(1.5, 1.5, 0.5, 0.5, 1.1), row(1.0, -1.0, 1.0, -1.0, 1.0), PLAIN)
    assert got[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -1.1], rel=1e-14)
    out = policy_loss(inputs, PLAIN, 5.0)
    assert out.loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8 - 1.1) / 5, rel=1e-12)
    assert out.sums["policy/clipped_fraction"] == 2.0
    # No gradient where the clip holds; elsewhere d loss / d logprob = -r A / N.
    got_gradient = gradient(inputs, PLAIN, 5.0)[0].tolist()
    assert got_gradient == pytest.approx([0.0, 1.5 / 5, -0.5 / 5, 0.0, -1.1 / 5], rel=1e-12)


def test_clipping_is_asymmetric() -> None:
    wide_up = ObjectiveSettings(clip_low=0.1, clip_high=0.4)
    got = clipped_surrogate(row(1.5, 1.3, 0.5, 0.95), row(1.0, 1.0, -1.0, -1.0), wide_up)
    assert got[0].tolist() == pytest.approx([-1.4, -1.3, 0.9, 0.95], rel=1e-14)
    out = policy_loss(tokens([1.5, 1.3, 0.5, 0.95], [1.0, 1.0, -1.0, -1.0]), wide_up, 4.0)
    assert out.sums["policy/clipped_fraction"] == 2.0
    assert out.loss.item() == pytest.approx((-1.4 - 1.3 + 0.9 + 0.95) / 4, rel=1e-12)


def test_clipped_fraction_counts_only_tokens_whose_clip_holds() -> None:
    out = policy_loss(tokens([1.5, 1.5, 0.5, 0.5, 1.5], [1.0, -1.0, 1.0, -1.0, 0.0]), PLAIN, 1.0)
    assert out.sums["policy/clipped_fraction"] == 2.0


def test_truncated_weight_scales_the_token_and_keeps_the_denominator() -> None:
    # Two tokens, the second cut from a raw weight of 10 to the cap 2: the mean still divides by 2.
    out = policy_loss(tokens([1.0, 1.0], [1.0, 1.0], [1.0, 2.0]), PLAIN, 2.0)
    assert out.loss.item() == pytest.approx(-(1.0 + 2.0) / 2, rel=1e-14)
    zero_weight = policy_loss(tokens([1.0, 1.0], [1.0, 1.0], [1.0, 0.0]), PLAIN, 2.0)
    assert zero_weight.loss.item() == pytest.approx(-0.5, rel=1e-14)


def test_kl_to_the_reference_by_hand() -> None:
    with_kl = replace(PLAIN, kl_coef=0.1)
    inputs = replace(tokens([1.0, 1.0], [1.0, -1.0]), reference_logprobs=row(-2.0 + math.log(2), -2.0 - math.log(2)))
    out = policy_loss(inputs, with_kl, 2.0)
    # k3(log 2) + k3(-log 2) = (1 - log 2) + (log 2 - 1/2) = 1/2.
    assert out.sums["loss/kl"] == pytest.approx(0.5, rel=1e-12)
    assert out.loss.item() == pytest.approx(0.1 * 0.5 / 2, rel=1e-12)
    assert out.sums["loss/policy"] == pytest.approx(0.0, abs=1e-15)
    # d/d pi k3(ref - pi) = 1 - e^(ref - pi): pulls pi up to a higher reference and down to a lower one.
    policy_only = gradient(inputs, PLAIN, 2.0)
    assert (gradient(inputs, with_kl, 2.0) - policy_only)[0].tolist() == pytest.approx(
        [0.1 * (1 - 2) / 2, 0.1 * (1 - 0.5) / 2], rel=1e-12
    )


def test_kl_is_reported_even_with_a_zero_coefficient() -> None:
    inputs = replace(tokens([1.0], [0.0]), reference_logprobs=row(-2.0 + math.log(2)))
    out = policy_loss(inputs, PLAIN, 1.0)
    assert out.sums["loss/kl"] == pytest.approx(1 - math.log(2), rel=1e-12) and out.loss.item() == 0.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_equals_finite_differences(seed: int, kl_coef: float) -> None:
    inputs = random_inputs(seed, 3, 5, reference=kl_coef > 0)
    chosen = ObjectiveSettings(clip_low=0.15, clip_high=0.25, kl_coef=kl_coef)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    h = 1e-6
    assert bool(((ratio - 0.85).abs() > 10 * h).all()) and bool(((ratio - 1.25).abs() > 10 * h).all())
    got = gradient(inputs, chosen, 7.0)
    base = inputs.logprobs.detach()
    for index in range(base.numel()):
        shift = torch.zeros_like(base)
        shift.view(-1)[index] = h
        up = policy_loss(replace(inputs, logprobs=base + shift), chosen, 7.0).loss
        down = policy_loss(replace(inputs, logprobs=base - shift), chosen, 7.0).loss
        assert float(got.view(-1)[index]) == pytest.approx(float(up - down) / (2 * h), rel=1e-6, abs=1e-9)
    assert not got[~inputs.mask].any()


def test_advantages_weights_and_old_scores_get_no_part_in_the_gradient_path() -> None:
    inputs = tokens([1.0], [1.0])
    out = policy_loss(inputs, PLAIN, 1.0)
    out.loss.backward()
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.tolist() == [[-1.0]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(1, 4), st.booleans())
def test_micro_batches_add_up_to_the_batch(seed: int, rows: int, size: int, reference: bool) -> None:
    inputs = random_inputs(seed, rows, 6, reference)
    chosen = ObjectiveSettings(0.2, 0.3, kl_coef=0.05)
    normalizer = float(max(1, int(inputs.mask.sum())))
    whole, whole_gradient = policy_loss(inputs, chosen, normalizer), gradient(inputs, chosen, normalizer)
    loss, sums, gradients = 0.0, dict.fromkeys(whole.sums, 0.0), []
    for start in range(0, rows, size):
        part = slice(start, start + size)
        reference_part = None if inputs.reference_logprobs is None else inputs.reference_logprobs[part]
        micro = LossInputs(
            inputs.logprobs.detach()[part],
            inputs.old_logprobs[part],
            inputs.advantages[part],
            inputs.weights[part],
            inputs.mask[part],
            reference_part,
        )
        out = policy_loss(micro, chosen, normalizer)
        loss += out.loss.item()
        sums = {name: sums[name] + value for name, value in out.sums.items()}
        gradients.append(gradient(micro, chosen, normalizer))
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-14)
    assert sums == pytest.approx(whole.sums, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300])
def test_masked_positions_may_hold_anything(poison: float) -> None:
    clean = random_inputs(5, 3, 6, reference=True)
    chosen = ObjectiveSettings(0.2, 0.2, kl_coef=0.1)

    def poisoned(x: Tensor) -> Tensor:
        return torch.where(clean.mask, x.detach(), poison)

    assert clean.reference_logprobs is not None
    dirty = LossInputs(
        logprobs=poisoned(clean.logprobs),
        old_logprobs=poisoned(clean.old_logprobs),
        advantages=poisoned(clean.advantages),
        weights=poisoned(clean.weights),
        mask=clean.mask,
        reference_logprobs=poisoned(clean.reference_logprobs),
    )
    want, got = policy_loss(clean, chosen, 9.0), policy_loss(dirty, chosen, 9.0)
    assert torch.equal(got.loss.detach(), want.loss.detach()) and got.sums == want.sums
    assert torch.equal(gradient(dirty, chosen, 9.0), gradient(clean, chosen, 9.0))
    assert not gradient(dirty, chosen, 9.0)[~clean.mask].any()


def test_a_micro_batch_without_valid_tokens_gives_zero_and_no_gradient() -> None:
    inputs = replace(tokens([1.5, 0.5], [1.0, math.nan]), mask=torch.zeros(1, 2, dtype=torch.bool))
    out = policy_loss(inputs, PLAIN, 4.0)
    assert out.loss.item() == 0.0 and set(out.sums.values()) == {0.0}
    assert gradient(inputs, PLAIN, 4.0).tolist() == [[0.0, 0.0]]


def test_log_ratios_up_to_200_stay_finite() -> None:
    old = row(-1.0, -201.0, -1.0, -201.0)
    inputs = LossInputs(
        logprobs=row(-201.0, -1.0, -201.0, -1.0),
        old_logprobs=old,
        advantages=row(1.0, 1.0, -1.0, -1.0),
        weights=torch.ones_like(old),
        mask=torch.ones(1, 4, dtype=torch.bool),
    )
    out = policy_loss(inputs, PLAIN, 1.0)
    # min(r A, clip(r) A): e^-20, 1.2, -0.8 and the unbounded side -e^20.
    assert out.loss.item() == pytest.approx(-(math.exp(-20) + 1.2 - 0.8 - math.exp(20)), rel=1e-12)
    assert bool(torch.isfinite(gradient(inputs, PLAIN, 1.0)).all())


def test_zero_advantage_gives_no_loss_and_no_gradient() -> None:
    inputs = tokens([1.5, 1.0, 0.5], [0.0, 0.0, 0.0])
    assert policy_loss(inputs, PLAIN, 3.0).loss.item() == 0.0
    assert not gradient(inputs, PLAIN, 3.0).any()


def test_fp32_inputs_give_an_fp32_loss() -> None:
    inputs = random_inputs(1, 2, 3, reference=True)
    assert inputs.reference_logprobs is not None
    single = LossInputs(
        inputs.logprobs.detach().float(),
        inputs.old_logprobs.float(),
        inputs.advantages.float(),
        inputs.weights.float(),
        inputs.mask,
        inputs.reference_logprobs.float(),
    )
    out = policy_loss(single, PLAIN, 3.0)
    assert out.loss.dtype == torch.float32 and out.loss.shape == ()
    assert out.loss.item() == pytest.approx(policy_loss(inputs, PLAIN, 3.0).loss.item(), rel=1e-5)
