"""FP8 in the rollout engine is real: its samples are those of an independent model that rounds as the recipe says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tasks.engines.protocols import RolloutBatch, SyncPayload
from tests.contract.engines import KV_RECIPES, Workbench
from tests.contract.reference import Reference, decoded

ONLY_KV = "recipe.rollout_linears.format=bf16"


def _distance(bench: Workbench, batch: RolloutBatch, payload: SyncPayload, **rounding: object) -> float:
    """Mean |log-probability - that of a BF16 reference|; `rounding` as `Reference` takes it."""
    reference = Reference(bench.model_dir, payload, dtype=torch.bfloat16, **rounding)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = reference.logprobs(batch)
    return float((batch.logprobs - expected)[batch.response_mask()].abs().mean())


@pytest.mark.parametrize("recipe", ["fp8_rollout", "fp8_e2e"])
def test_fp8_linears_round_weights_and_activations(rollouts: Workbench, recipe: str) -> None:
    batch, payload = rollouts.batch(recipe), rollouts.payload(recipe)
    near = _distance(rollouts, batch, payload)
    only_weights = _distance(rollouts, batch, _decoded_weights(payload))
    unrounded = _distance(rollouts, batch, rollouts.payload("bf16"))
    assert near < rollouts.rollout_engine.fp8_error
    assert near < 0.5 * only_weights
    assert near < 0.5 * unrounded


def _decoded_weights(payload: SyncPayload) -> SyncPayload:
    """The same weights without codes: linears then compute in BF16."""
    return replace(payload, tensors={n: t.to(torch.bfloat16) for n, t in decoded(payload).items()})


@pytest.mark.parametrize("query", [True, False])
def test_an_fp8_cache_rounds_keys_values_and_where_asked_queries(rollouts: Workbench, query: bool) -> None:
    overrides = (ONLY_KV, f"recipe.kv.quantize_query={str(query).lower()}")
    batch = rollouts.batch("fp8_rollout_kv", *overrides)
    payload = rollouts.payload("fp8_rollout_kv", *overrides)
    near = _distance(rollouts, batch, payload, kv_scales=payload.kv_scales, query=query)
    other = _distance(rollouts, batch, payload, kv_scales=payload.kv_scales, query=not query)
    assert near < rollouts.rollout_engine.fp8_error
    assert near < 0.8 * other
    for dropped in ("k", "v"):
        kept = {key: scale for key, scale in payload.kv_scales.items() if key[1] != dropped}
        assert near < 0.8 * _distance(rollouts, batch, payload, kv_scales=kept, query=query), dropped


@pytest.mark.parametrize("recipe", KV_RECIPES)
def test_linears_and_cache_round_together(rollouts: Workbench, recipe: str) -> None:
    batch, payload = rollouts.batch(recipe), rollouts.payload(recipe)
    near = _distance(rollouts, batch, payload, kv_scales=payload.kv_scales)
    assert near < 2 * rollouts.rollout_engine.fp8_error
    assert near < 0.8 * _distance(rollouts, batch, rollouts.payload("bf16"))


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
    error = _distance(rollouts, batch, rollouts.payload("bf16"))
    assert 0.01 < error < 0.3


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
