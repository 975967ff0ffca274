"""Delayed scaling: what enters the history, which scale comes from it, what saturates, who records."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.delayed_scaling import (
    DelayedScales,
    HistorySettings,
    delayed_encode,
    empty_history,
    history_amax,
    push,
)
from tasks.numerics.formats import PER_TENSOR, Format
from tasks.numerics.fp8 import fake_quantize_as
from tasks.numerics.fp8_linear import BlockSpec, fp8_linear, linear_spec
from tests.unit.numerics_support import bits_equal, one_torch_thread, randn

E4M3, E5M2 = Format(PER_TENSOR), Format(PER_TENSOR, "e5m2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def scales(length: int = 4, compute: str = "max", margin: int = 0) -> DelayedScales:
    kept = HistorySettings(length, compute, margin)  # type: ignore[arg-type]
    return DelayedScales(empty_history(kept), torch.zeros(3), kept)


def enter(held: DelayedScales, *amax: float) -> None:
    """One update in which the three tensors had these amax values."""
    held.history.copy_(push(held.history, torch.tensor(amax)))


def encode_of(held: DelayedScales, x: Tensor, fmt: Format = E4M3) -> float:
    return float(held.encode(x, "input", fmt, record=False))


def test_the_newest_entry_comes_first_and_the_oldest_falls_out() -> None:
    held = scales(length=3)
    for value in (1.0, 5.0, 2.0, 3.0):
        enter(held, value, 10 * value, 100 * value)
    assert held.history.tolist() == [[3.0, 30.0, 300.0], [2.0, 20.0, 200.0], [5.0, 50.0, 500.0]]
    enter(held, 4.0, 40.0, 400.0)
    assert held.history[:, 0].tolist() == [4.0, 3.0, 2.0]


@pytest.mark.parametrize("nothing", [0.0, math.inf, math.nan])
def test_zero_and_non_finite_amax_are_not_entered(nothing: float) -> None:
    held = scales(length=2)
    enter(held, 1.0, 2.0, 3.0)
    enter(held, nothing, 4.0, nothing)
    assert held.history.tolist() == [[1.0, 4.0, 3.0], [0.0, 2.0, 0.0]]


def test_push_leaves_its_input_alone() -> None:
    history = empty_history(HistorySettings(2))
    assert push(history, torch.ones(3)) is not history and not history.any()


def test_the_amax_of_a_history_by_hand() -> None:
    held = scales(length=4)
    for value in (7.0, 2.0, 3.0):
        enter(held, value, 1.0, 1.0)
    assert history_amax(held.history, "max").tolist() == [7.0, 1.0, 1.0]
    assert history_amax(held.history, "most_recent").tolist() == [3.0, 1.0, 1.0]


def test_the_scale_of_step_t_comes_from_before_t() -> None:
    """Window of 2: amax 1, 4, 2, 0.5 step by step, each tensor much larger than the history knows."""
    held = scales(length=2)
    wanted = []
    for amax, past in ((1.0, 0.1), (4.0, 1.0), (2.0, 4.0), (0.5, 4.0), (8.0, 2.0)):
        if not held.history.any():
            enter(held, 0.1, 1.0, 1.0)
        wanted.append(448.0 / past)
        assert encode_of(held, torch.tensor([[amax]])) == pytest.approx(wanted[-1], rel=2**-23)
        enter(held, amax, 1.0, 1.0)
    assert wanted[0] == pytest.approx(4480.0)


def test_most_recent_follows_the_last_update() -> None:
    held = scales(compute="most_recent")
    for amax in (64.0, 1.0):
        enter(held, amax, 1.0, 1.0)
    assert encode_of(held, torch.tensor([[2.0]])) == 448.0
    enter(held, 0.0, 1.0, 1.0)
    assert encode_of(held, torch.tensor([[2.0]])) == 448.0, "an empty update changes nothing"


def test_margin_is_a_power_of_two_and_each_element_type_has_its_range() -> None:
    for margin, factor in ((0, 1.0), (1, 0.5), (3, 0.125)):
        held = scales(margin=margin)
        enter(held, 2.0, 2.0, 2.0)
        assert encode_of(held, torch.ones(1, 1)) == 224.0 * factor
        assert encode_of(held, torch.ones(1, 1), E5M2) == 28672.0 * factor


def test_power_of_two_scales_round_up() -> None:
    held = scales()
    enter(held, 3.0, 1.0, 1.0)
    # 448 / 3 = 149.3: the largest power of two below is 128.
    assert encode_of(held, torch.ones(1, 1), Format(PER_TENSOR, "e4m3", "power_of_two")) == 128.0


def test_without_history_the_own_amax_counts() -> None:
    x = randn(1, 5, 7) * 0.03
    held = scales(compute="most_recent")
    for operand in ("input", "weight", "gradient"):
        encode = held.encode(x, operand, E4M3, record=False)  # type: ignore[arg-type]
        assert bits_equal(fake_quantize_as(x, E4M3, encode), fake_quantize_as(x, E4M3))
    assert encode_of(held, torch.zeros(2, 2)) == 1.0
    assert not held.pending.any()


def test_values_beyond_the_history_saturate_and_zeros_stay() -> None:
    held = scales()
    enter(held, 1.75, 1.0, 1.0)
    x = torch.tensor([[0.0, 1.0, 1.75, 1.76, 3.5, -70.0]])
    got = fake_quantize_as(x, E4M3, held.encode(x, "input", E4M3, record=False))
    assert got.tolist() == [[0.0, 1.0, 1.75, 1.75, 1.75, -1.75]]
    zeros = torch.zeros(2, 2)
    assert not fake_quantize_as(zeros, E4M3, held.encode(zeros, "input", E4M3, record=False)).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_poison_the_tensor_and_never_the_history(bad: float) -> None:
    held = scales()
    enter(held, 1.0, 1.0, 1.0)
    x = torch.tensor([[1.0, bad, 2.0]])
    assert bool(torch.isnan(fake_quantize_as(x, E4M3, held.encode(x, "input", E4M3, record=True))).all())
    assert held.pending.tolist() == [0.0, 0.0, 0.0]


def test_an_update_records_the_largest_amax_of_its_micro_batches() -> None:
    held = scales()
    for value in (1.0, 3.0, 2.0):
        held.encode(torch.tensor([[-value]]), "input", E4M3, record=True)
        held.encode(torch.tensor([[10 * value]]), "gradient", E5M2, record=True)
    held.encode(torch.tensor([[99.0]]), "input", E4M3, record=False)
    assert held.pending.tolist() == [3.0, 0.0, 30.0]


def test_a_tensor_without_rows_records_nothing() -> None:
    held = scales()
    x = torch.zeros(0, 8)
    assert fake_quantize_as(x, E4M3, held.encode(x, "input", E4M3, record=True)).shape == (0, 8)
    assert not held.pending.any()


@pytest.mark.parametrize(("length", "margin"), [(0, 0), (1, -1)])
def test_settings_are_checked(length: int, margin: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        HistorySettings(length, "max", margin)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 2.0**100, width=32), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["max", "most_recent"]),
)
def test_the_encode_factor_is_that_of_the_window(amaxes: list[float], length: int, compute: str) -> None:
    held = scales(length, compute)
    for amax in amaxes:
        enter(held, amax, 1.0, 1.0)
    entered = [a for a in amaxes if a > 0][-length:]
    past = (max(entered) if compute == "max" else entered[-1]) if entered else 0.5
    want = min(448.0 / past, torch.finfo(torch.float32).max)
    assert encode_of(held, torch.tensor([[0.5]])) == float(torch.tensor(want, dtype=torch.float64).float())


def test_encode_never_exceeds_the_largest_float() -> None:
    encode = delayed_encode(torch.tensor(1e-44), torch.ones(1, 1), E4M3)
    assert float(encode) == torch.finfo(torch.float32).max


# The linear layer.

SPEC = linear_spec("tensor_delayed", gradient="e5m2", history=HistorySettings(3))


def layer(held: DelayedScales, seed: int = 1, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """One training call; returns Y and both gradients."""
    x, w = (randn(seed, 6, 32) * size).requires_grad_(), (randn(9, 8, 32) * 0.1).requires_grad_()
    y = fp8_linear(x, w, None, SPEC, held)
    y.backward(randn(seed + 1, 6, 8) * 1e-3)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def test_forward_and_backward_record_the_three_tensors() -> None:
    held = scales(length=3)
    layer(held)
    want = [randn(1, 6, 32).abs().max(), (randn(9, 8, 32) * 0.1).abs().max(), (randn(2, 6, 8) * 1e-3).abs().max()]
    assert held.pending.tolist() == [float(w) for w in want]
    assert not held.history.any()


def test_the_first_update_equals_current_scaling() -> None:
    held = scales(length=3)
    got = layer(held)
    x, w = randn(1, 6, 32).requires_grad_(), (randn(9, 8, 32) * 0.1).requires_grad_()
    y = fp8_linear(x, w, None, linear_spec("tensor", gradient="e5m2"))
    y.backward(randn(2, 6, 8) * 1e-3)
    assert x.grad is not None and w.grad is not None
    for a, b in zip(got, (y.detach(), x.grad, w.grad), strict=True):
        assert bits_equal(a, b)


def test_later_updates_use_the_scales_of_history_in_all_three_products() -> None:
    held = scales(length=3)
    enter(held, 2.0, 0.25, 1e-3)
    y, dx, dw = layer(held)
    x, w, dy = randn(1, 6, 32), randn(9, 8, 32) * 0.1, randn(2, 6, 8) * 1e-3
    qx = fake_quantize_as(x, E4M3, torch.tensor([[448.0 / 2.0]]))
    qw = fake_quantize_as(w, E4M3, torch.tensor([[448.0 / 0.25]]))
    qdy = fake_quantize_as(dy, E5M2, torch.tensor([[57344.0]]) / torch.tensor(1e-3))
    assert float(qx.abs().max()) == 2.0 < float(x.abs().max()), "x saturates"
    torch.testing.assert_close(y, qx @ qw.T)
    torch.testing.assert_close(dx, qdy @ qw)
    torch.testing.assert_close(dw, qdy.T @ qx)


def test_scoring_uses_the_scales_and_records_nothing() -> None:
    held = scales(length=3)
    enter(held, 2.0, 0.25, 1e-3)
    trained, _, _ = layer(held)
    held.pending.zero_()
    with torch.no_grad():
        scored = fp8_linear(randn(1, 6, 32), randn(9, 8, 32) * 0.1, None, SPEC, held)
    assert bits_equal(scored, trained)
    assert not held.pending.any()


def test_splitting_a_batch_changes_no_scale_and_no_gradient_scale() -> None:
    x, w, dy = randn(3, 8, 32), randn(9, 8, 32) * 0.1, randn(4, 8, 8) * 1e-3

    def run(parts: int) -> tuple[Tensor, Tensor, Tensor]:
        held = scales(length=3)
        enter(held, 1.0, 0.2, 1e-3)
        outputs, grads = [], []
        for xs, ds in zip(x.chunk(parts), dy.chunk(parts), strict=True):
            leaf = xs.clone().requires_grad_()
            outputs.append(fp8_linear(leaf, w, None, SPEC, held))
            outputs[-1].backward(ds)
            assert leaf.grad is not None
            grads.append(leaf.grad)
        return torch.cat(outputs).detach(), torch.cat(grads), held.pending.clone()

    whole, split = run(1), run(4)
    torch.testing.assert_close(split[0], whole[0])
    torch.testing.assert_close(split[1], whole[1])
    # W is no operand that needs a gradient here, but its amax is recorded in the forward pass.
    assert torch.equal(split[2], whole[2]) and bool((whole[2] > 0).all())


@pytest.mark.parametrize(("spec", "held"), [(SPEC, None), (linear_spec("tensor"), scales()), (BlockSpec(), scales())])
def test_histories_belong_to_delayed_scaling_alone(spec: BlockSpec, held: DelayedScales | None) -> None:
    with pytest.raises(ValueError, match=f"scaling {spec.scaling} with(out)? amax histories"):
        fp8_linear(randn(1, 2, 32), randn(2, 8, 32), None, spec, held)
    with pytest.raises(ValueError, match="tensor_delayed has one, no other"):
        BlockSpec(scaling="tensor", history=HistorySettings())
