"""The trainer's optimiser: the default bit for bit, exact checkpoints, clipping, skipping, and Kahan's gain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from conf.schema import Optimizer, TinyArchitecture
from tasks.engines.protocols import EngineError
from tasks.engines.torch_optimizer import PolicyOptimizer, UpdateOutcome, build_optimizer
from tests.benchmarks.kahan_comparison import Setting, compare
from tests.unit.numerics_support import one_torch_thread, randn

SHAPES = {"a.weight": (64, 70), "a.norm": (64,), "weight": (2, 3)}
CHOICES = tuple(itertools.product(("fp32_master", "bf16_kahan", "bf16"), ("fp32", "bf16", "fp8")))
REDUCED = CHOICES[1:]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def _settings(weights: str = "fp32_master", state: str = "fp32", **others: Any) -> Optimizer:
    values = {"learning_rate": 1e-2, "warmup_steps": 0, "weights": weights, "state": state}
    return Optimizer.model_validate(values | others)


def _start() -> dict[str, Tensor]:
    return {name: randn(seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def _build(settings: Optimizer, start: dict[str, Tensor] | None = None) -> tuple[dict[str, Parameter], PolicyOptimizer]:
    start = start or _start()
    compute = {name: Parameter(tensor.to(torch.bfloat16, copy=True)) for name, tensor in start.items()}
    return compute, build_optimizer(compute, lambda: start, settings)


def _gradients(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    return {
        name: (randn(1000 * seed + k, *shape) * scale).to(torch.bfloat16)
        for k, (name, shape) in enumerate(SHAPES.items())
    }


def _backward(compute: dict[str, Parameter], gradients: dict[str, Tensor]) -> None:
    """A backward pass whose gradients are exactly these."""
    for name, gradient in gradients.items():
        (compute[name] * gradient).sum().backward()


def _run(compute: dict[str, Parameter], optimizer: PolicyOptimizer, seeds: range) -> list[UpdateOutcome]:
    outcomes = []
    for seed in seeds:
        _backward(compute, _gradients(seed))
        outcomes.append(optimizer.step())
    return outcomes


def _everything(compute: dict[str, Parameter], optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    weights = {f"weights {name}": t.clone() for name, t in optimizer.weights().items()}
    copies = {f"compute {name}": p.detach().clone() for name, p in compute.items()}
    return weights | copies | optimizer.state_tensors()


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8))
        if a[k].ndim
        else torch.equal(a[k], b[k])
        for k in a
    )


@pytest.mark.parametrize(("weights", "state"), CHOICES)
def test_what_is_put_away_with_the_masters_is_none_of_the_model(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings(weights, state))
    _backward(compute, _gradients(0))
    optimizer.step()
    model = {parameter.untyped_storage().data_ptr() for parameter in compute.values()}
    held = list(optimizer.tensors())
    assert not model & {tensor.untyped_storage().data_ptr() for tensor in held}
    masters = len(SHAPES) if weights == "fp32_master" else 0
    assert len(held) == masters + len(optimizer.live_state())


def test_the_default_is_torchs_adamw_on_fp32_masters_bit_for_bit() -> None:
    settings = _settings(weight_decay=0.1, warmup_steps=3, max_grad_norm=1.0)
    start = _start()
    masters = {name: Parameter(tensor.clone()) for name, tensor in start.items()}
    adam = torch.optim.AdamW(masters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    compute, optimizer = _build(settings, start)
    for update in range(6):
        parts = [_gradients(2 * update, 0.3), _gradients(2 * update + 1, 0.3)]
        for part in parts:
            _backward(compute, part)
        outcome = optimizer.step()
        for name, master in masters.items():
            master.grad = parts[0][name].float().add_(parts[1][name].float())
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters.values()])
        torch.nn.utils.clip_grads_with_norm_(masters.values(), 1.0, norm)
        rate = 1e-2 * min(1.0, (update + 1) / 3)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        assert outcome == UpdateOutcome(float(norm), False, rate, 0)
        assert outcome.grad_norm > 1.0, "the norm must have been clipped for this test to say something"
        for name, master in masters.items():
            assert torch.equal(optimizer.weights()[name], master)
            assert torch.equal(compute[name], master.to(torch.bfloat16))
    state = optimizer.state_tensors()
    for name, master in masters.items():
        assert torch.equal(state[f"{name}.exp_avg"], adam.state[master]["exp_avg"])
        assert torch.equal(state[f"{name}.exp_avg_sq"], adam.state[master]["exp_avg_sq"])
        assert float(state[f"{name}.step"]) == 6


@pytest.mark.parametrize("weights, state", REDUCED)
def test_reduced_precision_follows_the_default(weights: str, state: str) -> None:
    """Ten updates of 1e-2 on weights of size 1: the distance stays a small share of the way."""
    start = {name: tensor.to(torch.bfloat16).float() for name, tensor in _start().items()}
    compute, optimizer = _build(_settings(weights, state, weight_decay=0.1), start)
    other, reference = _build(_settings(weight_decay=0.1), start)
    _run(compute, optimizer, range(10))
    _run(other, reference, range(10))
    moved = torch.cat([(reference.weights()[n] - start[n]).flatten() for n in start])
    apart = torch.cat([(optimizer.weights()[n].float() - reference.weights()[n]).flatten() for n in start])
    limit = {"fp32_master": 0.01, "bf16_kahan": 0.1, "bf16": 0.5}[weights] + (0.15 if state == "fp8" else 0.0)
    assert 0 < float(apart.norm() / moved.norm()) < limit


def test_kahan_weights_follow_float64() -> None:
    """Sixteen updates of about 1e-2: weight + compensation stays within 2^-16 of the weight of float64 AdamW."""
    start = {"x": (randn(3, 500) * 0.05).to(torch.bfloat16)}
    compute, optimizer = _build(_settings("bf16_kahan", weight_decay=0.1, max_grad_norm=None), start)
    w = start["x"].double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 17):
        gradient = (randn(t, 500) + 0.5).to(torch.bfloat16)
        _backward(compute, {"x": gradient})
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient.double(), 0.95 * v + 0.05 * gradient.double().square()
        w = w * (1 - 1e-3) - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    found = optimizer.weights()["x"].double() + optimizer.state_tensors()["x.compensation"].double()
    assert float((w - start["x"].double()).abs().mean()) > 0.04
    assert float(((found - w).abs() / w.abs().clamp(min=0.05)).max()) < 2.0**-14
    assert float((found - w).abs().mean()) < 1e-6


@pytest.mark.parametrize("weights, state", CHOICES)
def test_the_order_of_backward_passes_over_weights_does_not_matter(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings(weights, state))
    other, reverse = _build(_settings(weights, state))
    for seed in range(3):
        gradients = _gradients(seed)
        _backward(compute, gradients)
        _backward(other, dict(reversed(gradients.items())))
        assert optimizer.step() == reverse.step()
    assert _same(_everything(compute, optimizer), _everything(other, reverse))


@pytest.mark.parametrize("weights, state", CHOICES)
def test_a_restored_run_goes_on_bit_for_bit(weights: str, state: str, tmp_path: Path) -> None:
    """Through files, as the trainer keeps them."""
    settings = _settings(weights, state, warmup_steps=5)
    compute, optimizer = _build(settings)
    _run(compute, optimizer, range(3))
    save_file(optimizer.weights(), tmp_path / "weights")
    save_file(optimizer.state_tensors(), tmp_path / "state")
    updates = optimizer.updates
    _run(compute, optimizer, range(3, 6))
    other, restored = _build(settings, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    _backward(other, _gradients(77))
    restored.load(load_file(tmp_path / "weights"), load_file(tmp_path / "state"), updates)
    assert restored.updates == 3 and restored.learning_rate == pytest.approx(1e-2 * 4 / 5)
    _run(other, restored, range(3, 6))
    assert _same(_everything(compute, optimizer), _everything(other, restored))


def test_a_checkpoint_is_not_changed_by_the_run_that_loaded_it() -> None:
    for weights, state in CHOICES:
        compute, optimizer = _build(_settings(weights, state))
        _run(compute, optimizer, range(2))
        saved, moments = {n: t.clone() for n, t in optimizer.weights().items()}, optimizer.state_tensors()
        kept = {name: t.clone() for name, t in moments.items()}
        other, restored = _build(_settings(weights, state))
        restored.load(saved, moments, 2)
        _run(other, restored, range(2, 4))
        assert _same(moments, kept)


@pytest.mark.parametrize("weights, state", REDUCED)
def test_a_checkpoint_of_another_precision_is_refused_and_changes_nothing(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings())
    _run(compute, optimizer, range(2))
    other, reduced = _build(_settings(weights, state))
    _run(other, reduced, range(2))
    before = _everything(compute, optimizer), _everything(other, reduced)
    for target, source in ((optimizer, reduced), (reduced, optimizer)):
        with pytest.raises(EngineError, match=r"differ|this optimiser"):
            target.load(source.weights(), source.state_tensors(), 2)
    assert _same(before[0], _everything(compute, optimizer))
    assert _same(before[1], _everything(other, reduced))


def test_wrong_checkpoints_are_named() -> None:
    compute, optimizer = _build(_settings())
    _run(compute, optimizer, range(1))
    weights, state = optimizer.weights(), optimizer.state_tensors()
    cases: list[tuple[dict[str, Tensor], dict[str, Tensor], str]] = [
        ({k: v for k, v in weights.items() if k != "a.norm"}, state, r"differ in weights: \['a.norm'\]"),
        (weights | {"weight": torch.zeros(3, 2)}, state, r"weight: checkpoint \(3, 2\), model \(2, 3\)"),
        (weights | {"weight": torch.zeros(2, 3).half()}, state, r"weight: checkpoint torch.float16"),
        (weights, state | {"b.exp_avg": torch.zeros(1)}, "b.exp_avg: optimiser state of a weight that the model lacks"),
        (weights, {k: v for k, v in state.items() if k != "weight.step"}, r"weight: .* \['exp_avg', 'exp_avg_sq'\]"),
        (weights, state | {"weight.exp_avg": torch.zeros(3)}, r"weight.exp_avg: checkpoint torch.float32 \(3,\)"),
    ]
    before = _everything(compute, optimizer)
    for given_weights, given_state, message in cases:
        with pytest.raises(EngineError, match=message):
            optimizer.load(given_weights, given_state, 1)
        assert _same(before, _everything(compute, optimizer))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm, max_grad_value", [(1.0, None), (None, None), (None, 0.5)])
def test_a_non_finite_gradient_is_skipped(
    bad: float, max_grad_norm: float | None, max_grad_value: float | None
) -> None:
    for weights, state in CHOICES:
        settings = _settings(weights, state, max_grad_norm=max_grad_norm, max_grad_value=max_grad_value, max_weight=0.5)
        compute, optimizer = _build(settings)
        other, clean = _build(settings)
        _run(compute, optimizer, range(1))
        _run(other, clean, range(1))
        broken = _gradients(1)
        broken["a.norm"][5] = bad
        _backward(compute, broken)
        outcome = optimizer.step()
        assert outcome.skipped and not math.isfinite(outcome.grad_norm) and outcome.clipped_weights == 0
        assert optimizer.updates == 1
        assert _same(_everything(compute, optimizer), _everything(other, clean))
        (after,), (expected,) = _run(compute, optimizer, range(2, 3)), _run(other, clean, range(2, 3))
        assert after == expected and not after.skipped, "nothing of the dropped gradient may stay behind"
        assert _same(_everything(compute, optimizer), _everything(other, clean))


@pytest.mark.parametrize("weights, state", CHOICES)
def test_micro_batches_accumulate_in_fp32(weights: str, state: str) -> None:
    """1 + 4 * 2^-9: each part is lost in BF16. The first moment after one update is a tenth of the sum."""
    compute, optimizer = _build(_settings(weights, state, max_grad_norm=None))
    for value in (1.0, *[2.0**-9] * 4):
        _backward(compute, {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in SHAPES.items()})
    assert all(parameter.grad is None for parameter in compute.values())
    outcome = optimizer.step()
    count = sum(math.prod(shape) for shape in SHAPES.values())
    assert outcome.grad_norm == pytest.approx((1 + 2.0**-7) * math.sqrt(count), rel=1e-6)
    if state == "fp32":
        for name in SHAPES:
            first = optimizer.state_tensors()[f"{name}.exp_avg"]
            torch.testing.assert_close(first, torch.full_like(first, 0.1 * (1 + 2.0**-7)), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("weights", ["fp32_master", "bf16_kahan", "bf16"])
@pytest.mark.parametrize(
    "max_value, max_norm, expected",
    [
        (None, None, (3.0, 4.0)),
        (None, 1.0, (0.6, 0.8)),
        (None, 10.0, (3.0, 4.0)),
        (3.5, None, (3.0, 3.5)),
        (0.5, None, (0.5, 0.5)),
        # The norm of (3, 3) is 4.2426: 3 / 4.2426 each. Of (3, 4) it would have been (0.6, 0.8).
        (3.0, 1.0, (0.70710678, 0.70710678)),
        (3.0, 5.0, (3.0, 3.0)),
    ],
)
def test_gradients_are_clipped_by_value_then_by_norm(
    weights: str, max_value: float | None, max_norm: float | None, expected: tuple[float, float]
) -> None:
    compute = {name: Parameter(torch.ones(1, dtype=torch.bfloat16)) for name in ("x", "y")}
    settings = _settings(weights, max_grad_norm=max_norm, max_grad_value=max_value)
    optimizer = build_optimizer(compute, lambda: {name: torch.ones(1) for name in compute}, settings)
    _backward(compute, {name: torch.tensor([v], dtype=torch.bfloat16) for name, v in (("x", -3.0), ("y", 4.0))})
    assert optimizer.step().grad_norm == pytest.approx(5.0), "the norm is that before clipping"
    state = optimizer.state_tensors()
    assert float(state["x.exp_avg"]) == pytest.approx(-0.1 * expected[0], rel=1e-5)
    assert float(state["y.exp_avg"]) == pytest.approx(0.1 * expected[1], rel=1e-5)


@pytest.mark.parametrize("weights, state", CHOICES)
def test_weights_are_clipped_after_the_update(weights: str, state: str) -> None:
    compute = {"x": Parameter(torch.tensor([0.5, -0.5, 0.25, 2.0], dtype=torch.bfloat16))}
    settings = _settings(weights, state, learning_rate=0.125, max_weight=0.5)
    optimizer = build_optimizer(compute, lambda: {"x": compute["x"].detach().float()}, settings)
    # The first update of Adam is the rate against the gradient's sign: 0.625, -0.375, 0.375, 1.875.
    _backward(compute, {"x": torch.tensor([-1.0, -1.0, -1.0, 1.0], dtype=torch.bfloat16)})
    assert optimizer.step().clipped_weights == 2
    expected = torch.tensor([0.5, -0.375, 0.375, 0.5])
    torch.testing.assert_close(optimizer.weights()["x"].float(), expected, rtol=1e-3, atol=0.0)
    assert torch.equal(compute["x"].float().abs() <= 0.5, torch.ones(4, dtype=torch.bool))
    if weights == "bf16_kahan":
        assert optimizer.state_tensors()["x.compensation"][[0, 3]].tolist() == [0.0, 0.0]


def test_a_huge_bound_changes_nothing() -> None:
    for weights, state in CHOICES:
        compute, optimizer = _build(_settings(weights, state))
        other, bounded = _build(_settings(weights, state, max_weight=1e6, max_grad_value=1e6))
        _run(compute, optimizer, range(2))
        outcomes = _run(other, bounded, range(2))
        assert [o.clipped_weights for o in outcomes] == [0, 0]
        assert _same(_everything(compute, optimizer), _everything(other, bounded))


@pytest.mark.parametrize("weights, state", CHOICES)
def test_a_weight_without_gradient_is_left_alone(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings(weights, state, weight_decay=0.5))
    before = {name: t.clone() for name, t in optimizer.weights().items()}
    assert optimizer.state_tensors() == {}
    _backward(compute, {"weight": _gradients(0)["weight"]})
    optimizer.step()
    assert torch.equal(optimizer.weights()["a.norm"], before["a.norm"])
    assert not torch.equal(optimizer.weights()["weight"], before["weight"])
    assert {name.rpartition(".")[0] for name in optimizer.state_tensors()} == {"weight"}


@pytest.mark.parametrize("weights, state", CHOICES)
def test_extreme_but_finite_gradients_leave_finite_weights(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings(weights, state, max_grad_norm=None))
    for scale in (1e17, 1e-30, 1.0, 0.0):
        _backward(compute, _gradients(0, scale))
        assert not optimizer.step().skipped
    assert all(bool(t.float().isfinite().all()) for t in _everything(compute, optimizer).values())


def test_authoritative_weights() -> None:
    for weights, dtype in (("fp32_master", torch.float32), ("bf16_kahan", torch.bfloat16), ("bf16", torch.bfloat16)):
        compute, optimizer = _build(_settings(weights))
        found = optimizer.weights()
        assert {t.dtype for t in found.values()} == {dtype} and not any(t.requires_grad for t in found.values())
        own = found["weight"].data_ptr() == compute["weight"].data_ptr()
        assert own == (weights != "fp32_master")


def test_masters_are_loaded_only_where_they_are_kept() -> None:
    calls = []

    def load() -> dict[str, Tensor]:
        calls.append(1)
        return _start()

    for weights, expected in (("bf16", 0), ("bf16_kahan", 0), ("fp32_master", 1)):
        build_optimizer({n: Parameter(t.to(torch.bfloat16)) for n, t in _start().items()}, load, _settings(weights))
        assert len(calls) == expected


def test_bf16_weights_are_required_where_they_are_updated() -> None:
    with pytest.raises(EngineError, match=r"weights = bf16_kahan needs BF16 weights, x is torch\.float32"):
        build_optimizer({"x": Parameter(torch.ones(2))}, dict, _settings("bf16_kahan"))


@pytest.mark.parametrize("weights, state", CHOICES)
def test_reported_memory_is_what_is_held(weights: str, state: str) -> None:
    compute, optimizer = _build(_settings(weights, state))
    reported = optimizer.memory()
    _run(compute, optimizer, range(1))
    assert optimizer.memory() == reported, "the figures are those of mid-run from the start"
    held = sum(t.nbytes for name, t in optimizer.state_tensors().items() if not name.endswith(".step"))
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    assert reported["memory/optimizer_state_gb"] * 1e9 == pytest.approx(held)
    masters = sum(t.nbytes for t in optimizer.weights().values()) if weights == "fp32_master" else 0
    assert reported["memory/master_weights_gb"] * 1e9 == pytest.approx(masters)
    assert reported["memory/gradients_gb"] * 1e9 == pytest.approx(4 * elements)


def test_kahan_follows_fp32_masters_more_closely_than_plain_bf16() -> None:
    """The small model at a rate of 1e-5, where plain BF16 loses nearly every update."""
    architecture = TinyArchitecture(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, vocab_size=128
    )
    cases = (("fp32_master", "fp32"), ("bf16_kahan", "fp32"), ("bf16_kahan", "fp8"), ("bf16", "fp32"))
    start, rows = compare(Setting(architecture, steps=12, rate=1e-5, rows=8, length=16), cases)
    master, _, kahan, kahan_fp8, plain = rows
    assert master.own == master.replayed == 0.0
    assert kahan.own < 0.02 and kahan.replayed < 0.02
    assert kahan_fp8.own < 0.15
    assert plain.own > 0.9 and plain.replayed > 0.9
    assert master.loss == pytest.approx(kahan.loss, abs=0.1 * (start - master.loss))
    assert plain.loss > master.loss + 0.5 * (start - master.loss)
