"""FP8 in the rollout engine is real: its samples are those of an independent model that rounds as the recipe says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tasks.engines.protocols import RolloutBatch, SyncPayload
from tests.contract.engines import KV_RECIPES, Workbench
from tests.contract.reference import Reference, decoded, effect_share

ONLY_KV = "recipe.rollout_linears.format=bf16"


def _expected(bench: Workbench, batch: RolloutBatch, payload: SyncPayload, **rounding: object) -> Tensor:
    """Log-probabilities of the response tokens by a BF16 reference; `rounding` as `Reference` takes it."""
    reference = Reference(bench.model_dir, payload, dtype=torch.bfloat16, **rounding)  # type: ignore[arg-type]
    with torch.no_grad():
        return reference.logprobs(batch)[batch.response_mask()].double()


def _near(bench: Workbench, batch: RolloutBatch, expected: Tensor) -> bool:
    """Whether the samples are those of the reference, as closely as the engine owes."""
    error = (batch.logprobs[batch.response_mask()] - expected).abs().mean()
    return float(error) < bench.rollout_engine.fp8_error


def _share(batch: RolloutBatch, rounded: Tensor, unrounded: Tensor) -> float:
    """How much of the effect of a rounding is in the samples."""
    return effect_share(batch.logprobs[batch.response_mask()], rounded, unrounded)


@pytest.mark.parametrize("recipe", ["fp8_rollout", "fp8_e2e"])
def test_fp8_linears_round_weights_and_activations(rollouts: Workbench, recipe: str) -> None:
    batch, payload = rollouts.batch(recipe), rollouts.payload(recipe)
    both, neither = _expected(rollouts, batch, payload), _expected(rollouts, batch, rollouts.payload("bf16"))
    assert _near(rollouts, batch, both)
    assert _share(batch, both, neither) > 0.5
    assert _share(batch, both, _expected(rollouts, batch, _decoded_weights(payload))) > 0.3


def test_bf16_linears_round_neither(rollouts: Workbench) -> None:
    batch, payload = rollouts.batch("bf16"), rollouts.payload("fp8_rollout")
    both, neither = _expected(rollouts, batch, payload), _expected(rollouts, batch, rollouts.payload("bf16"))
    assert abs(_share(batch, both, neither)) < 0.1


def _decoded_weights(payload: SyncPayload) -> SyncPayload:
    """The same weights without codes: linears then compute in BF16."""
    return replace(payload, tensors={n: t.to(torch.bfloat16) for n, t in decoded(payload).items()})


@pytest.mark.parametrize("query", [True, False])
def test_an_fp8_cache_rounds_keys_values_and_where_asked_queries(rollouts: Workbench, query: bool) -> None:
    overrides = (ONLY_KV, f"recipe.kv.quantize_query={str(query).lower()}")
    batch = rollouts.batch("fp8_rollout_kv", *overrides)
    payload = rollouts.payload("fp8_rollout_kv", *overrides)
    scales = payload.kv_scales
    rounded, plain = (_expected(rollouts, batch, payload, kv_scales=scales, query=asked) for asked in (True, False))
    all_of_it = rounded if query else plain
    assert _near(rollouts, batch, all_of_it)
    share = _share(batch, rounded, plain)
    assert share > 0.5 if query else abs(share) < 0.35
    for dropped in ("k", "v"):
        kept = {key: scale for key, scale in scales.items() if key[1] != dropped}
        without = _expected(rollouts, batch, payload, kv_scales=kept, query=query)
        assert _share(batch, all_of_it, without) > 0.5, dropped


@pytest.mark.parametrize("recipe", KV_RECIPES)
def test_linears_and_cache_round_together(rollouts: Workbench, recipe: str) -> None:
    batch, payload = rollouts.batch(recipe), rollouts.payload(recipe)
    both = _expected(rollouts, batch, payload, kv_scales=payload.kv_scales)
    assert float((batch.logprobs[batch.response_mask()] - both).abs().mean()) < 2 * rollouts.rollout_engine.fp8_error
    assert _share(batch, both, _expected(rollouts, batch, rollouts.payload("bf16"))) > 0.5
    assert _share(batch, both, _expected(rollouts, batch, payload)) > 0.3


@pytest.mark.parametrize("recipe", KV_RECIPES)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_every_scale_is_used(rollouts: Workbench, recipe: str, part: str) -> None:
    """A scale far too small saturates its tensor, and the samples' log-probabilities show it."""
    engine, payload = rollouts.rollout(recipe), rollouts.payload(recipe)
    before = engine.generate(rollouts.request(greedy=True, max_new_tokens=4))
    for layer in (0, 1):
        wrong = payload.kv_scales | {(layer, part): payload.kv_scales[(layer, part)] / 20}
        engine.load_weights(replace(payload, kv_scales=wrong))
        after = engine.generate(rollouts.request(greedy=True, max_new_tokens=4))
        first = (torch.arange(len(before.tokens)), before.prompt_lengths)
        changed = (after.logprobs[first] - before.logprobs[first]).abs()
        assert float(changed.max()) > 0.02, f"layer {layer} {part}"
    engine.load_weights(payload)
    again = engine.generate(rollouts.request(greedy=True, max_new_tokens=4))
    torch.testing.assert_close(again.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)


def test_block_scales_may_be_powers_of_two(rollouts: Workbench) -> None:
    override = "recipe.rollout_linears.scale=power_of_two"
    payload, batch = rollouts.payload("fp8_rollout", override), rollouts.batch("fp8_rollout", override)
    plain = rollouts.payload("fp8_rollout")
    for name, scales in payload.tensors.items():
        if name.endswith("_scale_inv"):
            assert (torch.frexp(scales).mantissa == 0.5).all(), name
            ratio = scales / plain.tensors[name]
            assert ((ratio >= 1) & (ratio < 2)).all(), name
    mask, unrounded = batch.response_mask(), _expected(rollouts, batch, rollouts.payload("bf16"))
    assert 0.01 < float((batch.logprobs[mask] - unrounded).abs().mean()) < 0.3


def test_a_larger_weight_changes_the_samples(rollouts: Workbench, recipe: str) -> None:
    """Sensitivity of the whole path: codes or BF16 values that arrive are the ones that multiply."""
    engine, payload = rollouts.rollout(recipe), rollouts.payload(recipe)
    before = engine.generate(rollouts.request(max_new_tokens=1))
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        zero = torch.zeros_like(payload.tensors[name])
        engine.load_weights(replace(payload, tensors=payload.tensors | {name: zero}))
        after = engine.generate(rollouts.request(max_new_tokens=1))
        first = (torch.arange(12), before.prompt_lengths)
        assert float((after.logprobs[first] - before.logprobs[first]).abs().max()) > 0.1, name
