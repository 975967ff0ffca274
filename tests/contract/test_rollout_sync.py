"""Syncs: what the rollout engine takes, what it refuses, and what it then says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tasks.engines.plan import plan_run
from tasks.engines.precision_plan import block_spec
from tasks.engines.protocols import SyncError, SyncPayload, WeightVersionError
from tasks.numerics.fingerprint import fingerprint
from tests.contract.engines import KV_RECIPES, LAYERS, Workbench, assert_same, linears_of

NORM = "model.norm.weight"
LINEAR = "model.layers.1.mlp.up_proj.weight"
SCALES = f"{LINEAR}_scale_inv"


def _without(name: str) -> Callable[[SyncPayload], SyncPayload]:
    return lambda p: replace(p, tensors={n: t for n, t in p.tensors.items() if n != name})


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[SyncPayload], SyncPayload]:
    return lambda p: replace(p, tensors=p.tensors | {name: change(p.tensors.get(name, torch.ones(3)))})


def _scale(key: tuple[int, str], value: float | None) -> Callable[[SyncPayload], SyncPayload]:
    def change(p: SyncPayload) -> SyncPayload:
        scales = {k: s for k, s in p.kv_scales.items() if k != key}
        return replace(p, kv_scales=scales if value is None else scales | {key: value})

    return change


BROKEN = {
    "missing tensor": (_without(NORM), "model.norm.weight"),
    "extra tensor": (_with("model.layers.7.mlp.up_proj.weight", lambda t: t), "model.layers.7.mlp.up_proj.weight"),
    "wrong shape": (_with(LINEAR, lambda t: t[:-128]), r"layers\.1\.mlp\.up_proj\.weight: sent \(128, 128\)"),
    "transposed": (_with(LINEAR, lambda t: t.t().contiguous()), r"up_proj\.weight: sent \(128, 256\)"),
    "wrong dtype": (_with(NORM, lambda t: t.to(torch.float32)), "model.norm.weight: sent .* torch.float32"),
}
BROKEN_LINEARS = {
    "missing block scales": (_without(SCALES), SCALES),
    "codes in BF16": (_with(LINEAR, lambda t: t.to(torch.bfloat16)), "torch.bfloat16"),
    "one block scale too few": (_with(SCALES, lambda t: t[:-1]), SCALES),
}
BROKEN_SCALES = {
    "missing scale": (_scale((1, "k"), None), r"missing \[\(1, 'k'\)\]"),
    "scale of a layer too many": (_scale((LAYERS, "q"), 1.0), r"extra \[\(2, 'q'\)\]"),
    "zero scale": (_scale((0, "v"), 0.0), "layer 0 v: scale 0.0"),
    "negative scale": (_scale((1, "q"), -0.5), "layer 1 q: scale -0.5"),
    "infinite scale": (_scale((0, "k"), float("inf")), "layer 0 k: scale inf"),
    "NaN scale": (_scale((0, "k"), float("nan")), "layer 0 k: scale nan"),
}


def _cases(table: dict[str, tuple[object, str]]) -> list[object]:
    return [pytest.param(*case, id=name) for name, case in table.items()]


def _refuses(bench: Workbench, recipe: str, change: Callable[[SyncPayload], SyncPayload], message: str) -> None:
    """The broken sync is refused, the engine is dirty, and a good sync brings it back to the same samples."""
    engine, good = bench.rollout(recipe), bench.payload(recipe)
    before = engine.generate(bench.request())
    with pytest.raises(SyncError, match=message):
        engine.load_weights(change(good))
    assert engine.report().version is None
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds None"):
        engine.generate(bench.request())
    engine.load_weights(good)
    after = engine.generate(bench.request())
    assert engine.report().fingerprints == good.fingerprints
    assert torch.equal(after.tokens, before.tokens)
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_sampled_before_the_first_sync(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.empty_rollout(recipe)
    assert engine.report().version is None
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds None"):
        engine.generate(rollouts.request())


@pytest.mark.parametrize("version", [-1, 1])
def test_only_the_held_version_is_sampled(rollouts: Workbench, version: int) -> None:
    engine = rollouts.rollout("fp8_rollout_kv")
    with pytest.raises(WeightVersionError, match=f"expects version {version}, the engine holds 0"):
        engine.generate(rollouts.request(weight_version=version))
    assert engine.generate(rollouts.request()).weight_version.tolist() == [0] * 12


def test_samples_carry_the_version_that_was_synced(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.rollout(recipe)
    engine.load_weights(replace(rollouts.payload(recipe), version=41))
    assert engine.report().version == 41
    batch = engine.generate(rollouts.request(weight_version=41))
    assert batch.weight_version.dtype == torch.int64
    assert batch.weight_version.tolist() == [41] * 12
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds 41"):
        engine.generate(rollouts.request())


@pytest.mark.parametrize("change, message", _cases(BROKEN))
def test_a_sync_brings_every_tensor_whole(
    rollouts: Workbench, change: Callable[[SyncPayload], SyncPayload], message: str
) -> None:
    _refuses(rollouts, "bf16", change, message)


@pytest.mark.parametrize("change, message", _cases(BROKEN | BROKEN_LINEARS | BROKEN_SCALES))
def test_a_sync_brings_codes_and_every_scale(
    rollouts: Workbench, change: Callable[[SyncPayload], SyncPayload], message: str
) -> None:
    _refuses(rollouts, "fp8_e2e_kv", change, message)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout", "fp8_e2e"])
def test_scales_without_an_fp8_cache_are_refused(rollouts: Workbench, recipe: str) -> None:
    _refuses(rollouts, recipe, _scale((0, "k"), 1.0), r"extra \[\(0, 'k'\)\]")


@pytest.mark.parametrize("recipe", KV_RECIPES)
def test_an_uncalibrated_trainer_cannot_feed_an_fp8_cache(rollouts: Workbench, recipe: str) -> None:
    _refuses(rollouts, recipe, lambda p: replace(p, kv_scales={}), r"missing \[\(0, 'k'\), \(0, 'q'\), \(0, 'v'\)\]")


def test_a_sync_for_another_recipe_is_refused(rollouts: Workbench) -> None:
    engine = rollouts.empty_rollout("bf16")
    with pytest.raises(SyncError, match=r"extra .*_scale_inv"):
        engine.load_weights(rollouts.payload("fp8_rollout"))
    engine = rollouts.empty_rollout("fp8_rollout")
    with pytest.raises(SyncError, match=r"missing .*_scale_inv"):
        engine.load_weights(rollouts.payload("bf16"))


def test_the_report_is_what_the_recipe_says(rollouts: Workbench, recipe: str) -> None:
    report, payload = rollouts.rollout(recipe).report(), rollouts.payload(recipe)
    fp8_linears, fp8_cache = recipe != "bf16", recipe in KV_RECIPES
    assert report.engine == rollouts.rollout_engine.name
    assert report.version == 0
    assert report.quantized_linears == (linears_of(0, 1) if fp8_linears else ())
    assert report.linear_dtype == ("float8_e4m3fn" if fp8_linears else "bfloat16")
    assert report.kv_dtype == report.query_dtype == ("float8_e4m3fn" if fp8_cache else "bfloat16")
    assert report.problems == ()
    assert report.block_specs == ((block_spec(rollouts.recipe(recipe).rollout_linears),) if fp8_linears else ())
    assert report.scales == payload.kv_scales
    assert {layer for layer, _ in report.scales} == ({0, 1} if fp8_cache else set())
    assert report.fingerprints == payload.fingerprints
    assert report.fingerprints == {name: fingerprint(tensor) for name, tensor in payload.tensors.items()}


@pytest.mark.parametrize("recipe", KV_RECIPES)
def test_scales_in_use_have_every_bit_that_was_sent(rollouts: Workbench, recipe: str) -> None:
    engine, payload = rollouts.rollout(recipe), rollouts.payload(recipe)
    nearest = {k: float(torch.nextafter(torch.tensor(s), torch.tensor(9.0))) for k, s in payload.kv_scales.items()}
    engine.load_weights(replace(payload, kv_scales=nearest))
    held = engine.report().scales
    assert {k: s.hex() for k, s in held.items()} == {k: s.hex() for k, s in nearest.items()}
    assert all(held[k] != s for k, s in payload.kv_scales.items())


def test_scales_that_are_never_measured_reach_the_engine_as_one(rollouts: Workbench) -> None:
    held = {
        refresh: rollouts.rollout("fp8_rollout_kv", f"recipe.calibration.refresh={refresh}").report().scales
        for refresh in ("step", "once", "never")
    }
    keys = {(layer, part) for layer in range(LAYERS) for part in "qkv"}
    assert held["never"] == dict.fromkeys(keys, 1.0)
    assert held["once"] == held["step"] and not any(scale == 1.0 for scale in held["step"].values())


def test_an_engine_that_forgot_is_a_fresh_one(rollouts: Workbench, recipe: str) -> None:
    """Another run had it: other weights, other scales, a later version, prompts in its cache, half a sync."""
    fresh, payload = rollouts.batch(recipe), rollouts.payload(recipe)
    other = replace(_with(NORM, lambda t: 2 * t)(payload), version=7, kv_scales={k: 3.0 for k in payload.kv_scales})
    engine = rollouts.empty_rollout(recipe)
    engine.load_weights(other)
    engine.generate(rollouts.request(weight_version=7))
    engine.begin_sync(other.header)
    engine.forget()
    for version in (0, 7):
        with pytest.raises(WeightVersionError, match=f"expects version {version}, the engine holds None"):
            engine.generate(rollouts.request(weight_version=version))
    engine.load_weights(payload)
    assert_same(engine.generate(rollouts.request()), fresh)
    # The same version, and a kept engine that was not synced: nothing stands in for the weights of the next run.
    engine.forget()
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds None"):
        engine.generate(rollouts.request())


def test_queries_may_stay_bf16_beside_an_fp8_cache(rollouts: Workbench) -> None:
    report = rollouts.rollout("fp8_rollout_kv", "recipe.kv.quantize_query=false").report()
    assert (report.kv_dtype, report.query_dtype) == ("float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize(
    "override, quantized",
    [
        ("keep_first_layers=1", linears_of(1)),
        ("keep_last_layers=1", linears_of(0)),
        ("exclude=[model.layers.0.mlp.down_proj]", linears_of(0)[:-1] + linears_of(1)),
    ],
)
def test_layers_that_the_recipe_keeps_stay_bf16(rollouts: Workbench, override: str, quantized: tuple[str, ...]) -> None:
    key = f"recipe.rollout_linears.{override}"
    engine, payload = rollouts.rollout("fp8_rollout", key), rollouts.payload("fp8_rollout", key)
    assert engine.report().quantized_linears == quantized
    codes = {n.removesuffix(".weight") for n, t in payload.tensors.items() if t.dtype == torch.float8_e4m3fn}
    assert codes == set(quantized)
    assert engine.report().fingerprints == payload.fingerprints
    assert engine.generate(rollouts.request()).tokens.shape[0] == 12


def test_equal_syncs_give_equal_fingerprints(rollouts: Workbench, recipe: str) -> None:
    engine, payload = rollouts.rollout(recipe), rollouts.payload(recipe)
    first = engine.report()
    engine.load_weights(payload)
    assert engine.report() == first
    assert rollouts.rollout(recipe).report().fingerprints == first.fingerprints


def test_fingerprints_are_read_from_the_engine_not_from_the_message(rollouts: Workbench, recipe: str) -> None:
    engine, payload = rollouts.rollout(recipe), rollouts.payload(recipe)
    changed = payload.tensors[NORM].clone()
    changed[5] += 1
    lying = replace(payload, tensors=payload.tensors | {NORM: changed})
    engine.load_weights(lying)
    held = engine.report().fingerprints
    assert held[NORM] == fingerprint(changed) != payload.fingerprints[NORM]
    assert {n: f for n, f in held.items() if n != NORM} == {n: f for n, f in payload.fingerprints.items() if n != NORM}


def test_the_engine_keeps_a_copy_of_what_was_sent(rollouts: Workbench, recipe: str) -> None:
    payload = rollouts.payload(recipe)
    own = replace(
        payload, tensors={n: t.clone() for n, t in payload.tensors.items()}, kv_scales=dict(payload.kv_scales)
    )
    engine = rollouts.empty_rollout(recipe)
    engine.load_weights(own)
    before = engine.generate(rollouts.request())
    for tensor in own.tensors.values():
        tensor.view(torch.uint8).zero_()
    own.kv_scales.clear()
    assert engine.report().fingerprints == payload.fingerprints
    assert engine.report().scales == payload.kv_scales
    assert torch.equal(engine.generate(rollouts.request()).tokens, before.tokens)


def test_memory_of_the_weights_is_what_the_plan_foretold(rollouts: Workbench, recipe: str) -> None:
    memory = rollouts.rollout(recipe).report().memory
    held = sum(t.numel() * t.element_size() for t in rollouts.payload(recipe).tensors.values())
    assert memory["memory/weights_gb"] == held / 1e9
    assert plan_run(rollouts.config(recipe)).rollout.weight_bytes == held


def test_cache_capacity_is_reported_after_sampling(rollouts: Workbench) -> None:
    engine = rollouts.rollout("bf16")
    engine.generate(rollouts.request())
    needed = sum(3 * (len(p.token_ids) + 8) for p in rollouts.prompts())
    assert engine.report().memory["memory/kv_capacity_tokens"] >= needed
