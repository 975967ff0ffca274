"""The policy loss against its published formulas in float64 numpy: value, and gradient by central differences.

`written_out` takes the log-probabilities twice: where an objective stops the gradient it reads `frozen`, elsewhere
`now`. Its differences in `now` alone are the gradient that the objective is defined to have. Micro-batches add up
in both.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tasks.numerics.loss import LossInputs, ObjectiveSettings, policy_loss
from tasks.numerics.normalization import Normalization, loss_coefficients

FloatArray = NDArray[np.float64]

STEP = 1e-6

RATIOS = ("token", "sequence")
SURROGATES = (
    ObjectiveSettings(clip_low=0.15, clip_high=0.25),
    ObjectiveSettings(clip_low=0.15, clip_high=0.25, dual_clip=1.3),
    ObjectiveSettings(surrogate="cispo", clip_low=0.15, clip_high=0.25),
    ObjectiveSettings(surrogate="cispo", clip_low=1.0, clip_high=0.25),
    ObjectiveSettings(surrogate="reinforce"),
)

WHOLE = tuple(
    replace(s, ratio=r, kl_coef=0.3, kl_gradient=g, entropy_coef=0.1)  # type: ignore[arg-type]
    for r, s, g in itertools.product(RATIOS, SURROGATES, ("unbiased", "pathwise"))
)


@dataclass(frozen=True)
class Arrays:
    now: FloatArray
    frozen: FloatArray
    old: FloatArray
    advantages: FloatArray
    weights: FloatArray
    coefficients: FloatArray
    mask: NDArray[np.bool_]
    reference: FloatArray
    entropy: FloatArray


def token_loss(r: float, r_frozen: float, pi: float, a: float, s: ObjectiveSettings) -> float:
    if s.surrogate == "reinforce":
        return -a * pi
    if s.surrogate == "cispo":
        return -min(max(r_frozen, 1 - s.clip_low), 1 + s.clip_high) * a * pi
    objective = min(r * a, min(max(r, 1 - s.clip_low), 1 + s.clip_high) * a)
    if s.dual_clip is not None and a < 0:
        objective = max(objective, s.dual_clip * a)
    return -objective


def kl_loss(pi: float, pi_frozen: float, reference: float, weight: float, s: ObjectiveSettings) -> float:
    x = reference - pi
    k = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[s.kl_estimator]
    return k if s.kl_gradient == "pathwise" else weight * k * math.exp(pi - pi_frozen)


def written_out(a: Arrays, s: ObjectiveSettings) -> float:
    total = 0.0
    for i in range(a.now.shape[0]):
        valid = np.flatnonzero(a.mask[i])
        for t in valid:
            d, d_frozen = a.now[i, t] - a.old[i, t], a.frozen[i, t] - a.old[i, t]
            r, r_frozen, token_ratio = math.exp(d), math.exp(d_frozen), math.exp(d_frozen)
            if s.ratio == "sequence":
                r = math.exp(float((a.now[i] - a.old[i])[valid].mean()))
                r_frozen = math.exp(float((a.frozen[i] - a.old[i])[valid].mean()))
            w, pi = a.weights[i, t], a.now[i, t]
            term = w * token_loss(r, r_frozen, pi, a.advantages[i, t], s)
            term += s.kl_coef * kl_loss(pi, a.frozen[i, t], a.reference[i, t], w * token_ratio, s)
            total += a.coefficients[i, t] * (term - s.entropy_coef * a.entropy[i, t])
    return total


def random_inputs(seed: int, mode: Normalization, rows: int = 4) -> LossInputs:
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, 5, generator=g, dtype=torch.float64)

    old = -0.1 - 3 * torch.rand(rows, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=g) < 0.7
    mask[2:3] = False
    # A shift common to a sequence, so that also its mean is often clipped.
    shift = 0.2 * normal() + 0.4 * torch.randn(rows, 1, generator=g, dtype=torch.float64)
    return LossInputs(
        logprobs=old + shift,
        old_logprobs=old,
        advantages=normal()[:, :1].expand(rows, 5),
        weights=2 * torch.rand(rows, 5, generator=g, dtype=torch.float64),
        coefficients=loss_coefficients(mask, mode, 6).double(),
        mask=mask,
        reference_logprobs=old + 0.5 * normal(),
        entropy=normal().abs(),
    )


def parts_of(inputs: LossInputs, rows: list[int]) -> LossInputs:
    tensors = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    return LossInputs(**{name: None if x is None else x[rows] for name, x in tensors.items()})


def arrays(inputs: LossInputs) -> Arrays:
    assert inputs.reference_logprobs is not None and inputs.entropy is not None
    return Arrays(
        now=inputs.logprobs.numpy(),
        frozen=inputs.logprobs.numpy(),
        old=inputs.old_logprobs.numpy(),
        advantages=inputs.advantages.numpy(),
        weights=inputs.weights.numpy(),
        coefficients=inputs.coefficients.numpy(),
        mask=inputs.mask.numpy(),
        reference=inputs.reference_logprobs.numpy(),
        entropy=inputs.entropy.numpy(),
    )


def differences(inputs: LossInputs, chosen: ObjectiveSettings) -> FloatArray:
    base = arrays(inputs)
    got = np.zeros_like(base.now)
    for i, t in np.ndindex(*base.now.shape):
        shift = np.zeros_like(base.now)
        shift[i, t] = STEP
        up, down = (written_out(replace(base, now=base.now + sign * shift), chosen) for sign in (1, -1))
        got[i, t] = (up - down) / (2 * STEP)
    return got


def gradient(inputs: LossInputs, chosen: ObjectiveSettings) -> Tensor:
    leaf = inputs.logprobs.clone().requires_grad_()
    (got,) = torch.autograd.grad(policy_loss(replace(inputs, logprobs=leaf), chosen).loss, leaf)
    return got


def assert_away_from_kinks(inputs: LossInputs, chosen: ObjectiveSettings) -> None:
    d = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    mean = d.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
    for log_ratio, kink in itertools.product((d, mean), (1 - chosen.clip_low, 1 + chosen.clip_high, chosen.dual_clip)):
        assert kink is None or bool(((log_ratio.exp() - kink).abs() > 10 * STEP).all())


def assert_follows_the_formula(inputs: LossInputs, chosen: ObjectiveSettings) -> None:
    assert_away_from_kinks(inputs, chosen)
    want = written_out(arrays(inputs), chosen)
    assert policy_loss(inputs, chosen).loss.item() == pytest.approx(want, rel=1e-12, abs=1e-14)
    got = gradient(inputs, chosen)
    np.testing.assert_allclose(got.numpy(), differences(inputs, chosen), rtol=1e-6, atol=1e-8)
    assert not got[~inputs.mask].any()


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_surrogates(ratio: str, surrogate: ObjectiveSettings, mode: Normalization) -> None:
    for seed in range(2):
        assert_follows_the_formula(random_inputs(seed, mode), replace(surrogate, ratio=ratio))  # type: ignore[arg-type]


@pytest.mark.parametrize("kl_gradient", ["unbiased", "pathwise"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_surrogates_with_kl_and_entropy(
    ratio: str, surrogate: ObjectiveSettings, estimator: str, kl_gradient: str
) -> None:
    chosen = replace(surrogate, ratio=ratio, kl_coef=0.3, entropy_coef=0.1)  # type: ignore[arg-type]
    chosen = replace(chosen, kl_estimator=estimator, kl_gradient=kl_gradient)  # type: ignore[arg-type]
    assert_follows_the_formula(random_inputs(3, "sequence_mean"), chosen)


def test_the_random_cases_reach_both_sides_of_every_clip() -> None:
    # Otherwise the comparisons above would hold without any clipping.
    for ratio, surrogate in itertools.product(RATIOS, SURROGATES[:3]):
        chosen = replace(surrogate, ratio=ratio)  # type: ignore[arg-type]
        inputs = [random_inputs(seed, "token_mean") for seed in range(4)]
        clipped = sum(policy_loss(x, chosen).counts["policy/clipped_fraction"] for x in inputs)
        assert 0 < clipped < sum(int(x.mask.sum()) for x in inputs)


def test_torch_gradcheck_of_the_objectives_without_a_stopped_gradient() -> None:
    for ratio in RATIOS:
        chosen = ObjectiveSettings(ratio=ratio, dual_clip=3.0, kl_coef=0.2, kl_gradient="pathwise", entropy_coef=0.3)  # type: ignore[arg-type]
        inputs = random_inputs(5, "token_mean")
        assert_away_from_kinks(inputs, chosen)
        assert inputs.entropy is not None
        leaves = inputs.logprobs.clone().requires_grad_(), inputs.entropy.clone().requires_grad_()

        def loss(pi: Tensor, entropy: Tensor, inputs: LossInputs = inputs, s: ObjectiveSettings = chosen) -> Tensor:
            return policy_loss(replace(inputs, logprobs=pi, entropy=entropy), s).loss

        assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-8, rtol=1e-6)


def test_entropy_is_raised_with_the_coefficient_of_its_token() -> None:
    inputs = random_inputs(0, "sequence_mean")
    assert inputs.entropy is not None
    leaf = inputs.entropy.clone().requires_grad_()
    loss = policy_loss(replace(inputs, entropy=leaf), ObjectiveSettings(entropy_coef=0.25)).loss
    (got,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(got, -0.25 * inputs.coefficients, rtol=1e-14, atol=0.0)


def test_nothing_but_log_probabilities_and_entropy_is_differentiated() -> None:
    inputs = random_inputs(0, "token_mean")
    assert inputs.reference_logprobs is not None
    fixed = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("old_logprobs", "advantages", "weights", "coefficients", "reference_logprobs")
    }
    for surrogate in SURROGATES:
        leaf = inputs.logprobs.clone().requires_grad_()
        policy_loss(replace(inputs, logprobs=leaf, **fixed), replace(surrogate, kl_coef=0.1)).loss.backward()
        assert leaf.grad is not None and bool(leaf.grad.any())
    assert all(tensor.grad is None for tensor in fixed.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 1.3, 3.0]))
def test_clipped_tokens_are_those_without_gradient(seed: int, dual_clip: float | None) -> None:
    inputs = random_inputs(seed, "token_mean")
    chosen = ObjectiveSettings(clip_low=0.15, clip_high=0.25, dual_clip=dual_clip)
    without = (gradient(inputs, chosen) == 0) & inputs.mask
    assert policy_loss(inputs, chosen).counts["policy/clipped_fraction"] == float(without.sum())


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    inputs = random_inputs(1, "token_mean")
    got = gradient(inputs, SURROGATES[2])
    assert policy_loss(inputs, SURROGATES[2]).counts["policy/clipped_fraction"] > 0
    assert bool((got[inputs.mask] != 0).all())


def test_one_sequence_ratio_spreads_its_gradient_evenly_over_the_sequence() -> None:
    inputs = random_inputs(2, "sequence_mean")
    inputs = replace(inputs, weights=torch.ones_like(inputs.weights))
    got = gradient(inputs, ObjectiveSettings(ratio="sequence", clip_low=1.0, clip_high=9.0))
    for i in range(4):
        values = got[i][inputs.mask[i]]
        assert values.numel() == 0 or (values[0] != 0 and torch.allclose(values, values[0], rtol=1e-12))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(WHOLE),
    st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_any_split_by_sequences_adds_up(
    seed: int, chosen: ObjectiveSettings, mode: Normalization, part_of_row: list[int]
) -> None:
    inputs = random_inputs(seed, mode, len(part_of_row))
    whole, want = policy_loss(inputs, chosen), gradient(inputs, chosen)
    got, outs = torch.zeros_like(want), []
    for part in range(4):
        rows = [i for i, p in enumerate(part_of_row) if p == part]
        micro = parts_of(inputs, rows)
        outs.append(policy_loss(micro, chosen))
        got[rows] = gradient(micro, chosen)
    assert sum(out.loss.item() for out in outs) == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    for name, value in whole.sums.items():
        assert sum(out.sums[name] for out in outs) == pytest.approx(value, rel=1e-12, abs=1e-13)
    for name, value in whole.counts.items():
        assert sum(out.counts[name] for out in outs) == pytest.approx(value, rel=1e-12, abs=1e-13)
    assert max(out.maxima["policy/ratio_max"] for out in outs) == whole.maxima["policy/ratio_max"]


def test_an_empty_response_leaves_the_others_as_they_are() -> None:
    inputs = random_inputs(7, "sequence_mean")
    assert inputs.mask.any(1).tolist() == [True, True, False, True]
    for chosen in WHOLE:
        got, want = policy_loss(inputs, chosen), policy_loss(parts_of(inputs, [0, 1, 3]), chosen)
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-12, abs=1e-14)
        assert got.sums == pytest.approx(want.sums, rel=1e-12) and got.counts == pytest.approx(want.counts, rel=1e-12)
