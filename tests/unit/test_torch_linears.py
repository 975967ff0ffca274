"""FP8 linear modules: both engines' layers agree in every scaling; amax histories are saved and restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tasks.engines.protocols import EngineError
from tasks.engines.torch_linears import (
    Fp8InferenceLinear,
    Fp8TrainingLinear,
    advance_delayed,
    delayed_state,
    load_delayed_state,
    use_fp8_inference,
    use_fp8_training,
)
from tasks.numerics.delayed_scaling import HistorySettings
from tasks.numerics.fp8 import quantize_weight_as
from tasks.numerics.fp8_linear import BlockSpec, linear_spec
from tests.unit.numerics_support import bits_equal, one_torch_thread, randn

DELAYED = linear_spec("tensor_delayed", gradient="e5m2", history=HistorySettings(3))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def model(spec: BlockSpec, seed: int = 0) -> nn.Module:
    """Two layers in BF16, the first quantised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 8, bias=False)).to(torch.bfloat16)
    use_fp8_training(made, ("0", "2"), spec)
    return made


def update(made: nn.Module, seed: int) -> Tensor:
    """One optimiser update; returns the output before it."""
    out: Tensor = made(randn(seed, 6, 70, dtype=torch.bfloat16))
    out.backward(randn(seed + 1, 6, 8, dtype=torch.bfloat16))
    with torch.no_grad():
        for p in made.parameters():
            assert p.grad is not None
            p -= 0.01 * p.grad
            p.grad = None
    advance_delayed(made)
    return out.detach()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scaling", ["block", "tensor", "channel", "mxfp8"])
def test_both_engines_agree_bitwise(scaling: str, power_of_two: bool) -> None:
    spec = linear_spec(scaling, power_of_two, weight_block=(32, 16), group=24)  # type: ignore[arg-type]
    trainer = model(spec)
    rollout = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 8, bias=False)).to(torch.bfloat16)
    use_fp8_inference(rollout, ("0", "2"), spec)
    for name in ("0", "2"):
        source, target = trainer.get_submodule(name), rollout.get_submodule(name)
        assert isinstance(source, Fp8TrainingLinear) and isinstance(target, Fp8InferenceLinear)
        q = quantize_weight_as(name, source.weight, spec.weight_format)
        held = target.get_buffer("weight"), target.get_buffer("weight_scale_inv")
        assert held[1].dtype == q.scales.dtype == spec.weight_format.scale_dtype and held[1].shape == q.scales.shape
        held[0].copy_(q.codes)
        held[1].copy_(q.scales)
        assert not target.is_consistent()
        target.install()
        assert target.is_consistent()
        if source.bias is not None:
            target.get_buffer("bias").copy_(source.bias.detach())
    x = randn(1, 3, 5, 70, dtype=torch.bfloat16)
    with torch.no_grad():
        assert bits_equal(rollout(x), trainer(x))


def test_an_engine_that_never_trains_has_no_delayed_scaling() -> None:
    with pytest.raises(EngineError, match="delayed scaling has no histories in an engine that never trains"):
        Fp8InferenceLinear((8, 8), None, DELAYED)


def test_only_delayed_layers_have_histories() -> None:
    assert delayed_state(model(BlockSpec())) == {}
    made = model(BlockSpec())
    advance_delayed(made)
    load_delayed_state(made, {})
    assert [name for name, _ in made.named_buffers()] == []
    assert "amax" not in "".join(model(DELAYED).state_dict()), "checkpoints of weights hold weights only"


def test_an_update_enters_one_amax_a_tensor() -> None:
    made = model(DELAYED)
    weight = float(made.get_parameter("0.weight").detach().abs().max())
    update(made, 1)
    state = delayed_state(made)
    assert sorted(state) == ["0.amax_history", "0.amax_pending", "2.amax_history", "2.amax_pending"]
    assert state["0.amax_history"].shape == (3, 3) and not state["0.amax_pending"].any()
    x = float(randn(1, 6, 70, dtype=torch.bfloat16).abs().max())
    assert state["0.amax_history"][0, :2].tolist() == [x, weight]
    assert state["2.amax_history"][0, 2] == randn(2, 6, 8, dtype=torch.bfloat16).abs().max()
    assert not state["0.amax_history"][1:].any()


def test_scoring_changes_no_history() -> None:
    made = model(DELAYED)
    update(made, 1)
    before = delayed_state(made)
    with torch.no_grad():
        made(100 * randn(5, 6, 70, dtype=torch.bfloat16))
    advance_delayed(made)
    after = delayed_state(made)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_scores_before_an_update_equal_its_own_forward() -> None:
    made = model(DELAYED)
    update(made, 1)
    x = randn(7, 6, 70, dtype=torch.bfloat16)
    with torch.no_grad():
        scored = made(x)
    assert bits_equal(made(x).detach(), scored)


@pytest.mark.parametrize("between", [False, True])
def test_a_restored_layer_continues_bitwise(between: bool) -> None:
    """Saved after two updates, or between a backward pass and the end of its update."""
    made = model(DELAYED)
    update(made, 1)
    update(made, 3)
    if between:
        made(3 * randn(4, 6, 70, dtype=torch.bfloat16)).sum().backward()
        made.zero_grad()
    other = model(DELAYED, seed=9)
    other.load_state_dict(made.state_dict())
    fresh = model(DELAYED, seed=9)
    fresh.load_state_dict(made.state_dict())
    saved = {name: tensor.clone() for name, tensor in delayed_state(made).items()}
    load_delayed_state(other, saved)
    outputs = [[update(m, seed) for seed in (11, 13, 15)] for m in (made, other, fresh)]
    assert all(bits_equal(a, b) for a, b in zip(outputs[0], outputs[1], strict=True))
    assert not bits_equal(outputs[0][0], outputs[2][0]), "histories matter"
    first, second = delayed_state(made), delayed_state(other)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_saved_state_is_a_copy() -> None:
    made = model(DELAYED)
    update(made, 1)
    state = delayed_state(made)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    update(made, 3)
    assert all(torch.equal(state[name], kept[name]) for name in state)


def test_histories_that_do_not_fit_are_refused_and_change_nothing() -> None:
    made = model(DELAYED)
    update(made, 1)
    before, longer = delayed_state(made), model(linear_spec("tensor_delayed", history=HistorySettings(4)))
    with pytest.raises(EngineError, match=r"missing \['0\.amax_history'.*extra \[\]"):
        load_delayed_state(made, {})
    with pytest.raises(EngineError, match=r"extra \['0\.amax_history'"):
        load_delayed_state(model(BlockSpec()), before)
    with pytest.raises(EngineError, match=r"0\.amax_history: saved \(4, 3\), the recipe has \(3, 3\)"):
        load_delayed_state(made, delayed_state(longer))
    assert all(torch.equal(before[name], tensor) for name, tensor in delayed_state(made).items())
