"""Mixtures of experts in vLLM: every matrix of every expert is sent, held and read back by its checkpoint name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.compose import compose
from conf.schema import Recipe, VllmRollout
from tasks.audit import AuditError, audit
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears
from tasks.engines.protocols import EngineError, GenerateRequest, Prompt, RolloutBatch, SyncError, SyncPayload
from tests.contract.reference import decoded
from tests.engines.mixtures import (
    EXPERTS,
    PROJECTIONS,
    VOCABULARY,
    MixtureReference,
    names_of_experts,
    payload_of,
    save_mixture,
)

pytest.importorskip("vllm", reason="vLLM is not installed (extra engines-cpu)")

import vllm
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

from tasks.engines.vllm_private import LiveExperts, unpacked
from tasks.engines.vllm_rollout import VllmRolloutEngine

PADS = tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 27)
PROMPTS = tuple(
    Prompt(f"p{i}", tuple(3 + (7 * i + j * j) % 120 for j in range(5 + 3 * i)), (1 + i, 20 + i, 300 + i))
    for i in range(4)
)
REQUEST = GenerateRequest(
    weight_version=0, prompts=PROMPTS, max_new_tokens=8, temperature=1.0, eos_token_ids=(VOCABULARY,)
)


@pytest.fixture(scope="module", autouse=True)
def _fresh_groups() -> None:
    """As in a process of its own: vLLM keeps the process groups of its first model, which may have been dense."""
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _settings(folder: Path, recipe: str, *overrides: str) -> tuple[Recipe, VllmRollout]:
    small = ["rollout.kv_cache_memory_bytes=33554432", "rollout.threads=1", "rollout.max_new_tokens=8"]
    config = compose(["rollout=vllm", f"recipe={recipe}", f"model.path={folder}", *small, *overrides])
    assert isinstance(config.rollout, VllmRollout)
    return config.recipe, config.rollout


def _engine(folder: Path, name: str, *overrides: str) -> tuple[VllmRolloutEngine, SyncPayload, Recipe]:
    """An engine that holds version 0, what was sent, and the recipe of both."""
    recipe, settings = _settings(folder, name, *overrides)
    engine, payload = VllmRolloutEngine(folder, recipe, settings), payload_of(folder, recipe)
    engine.load_weights(payload)
    return engine, payload, recipe


def _audit(engine: VllmRolloutEngine, payload: SyncPayload, recipe: Recipe, folder: Path) -> None:
    expected = plan_linears(folder_shape(folder), recipe.rollout_linears).quantized
    sent = {"version": payload.version, "scales": payload.kv_scales, "fingerprints": payload.fingerprints}
    audit(engine.report(), sent, recipe, expected)


def _change(engine: VllmRolloutEngine, name: str, change: Any) -> None:
    """Reach into the live model, as a bug would."""

    def apply(model: torch.nn.Module) -> None:
        change(model.get_submodule(name))

    engine._live.apply_model(apply)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout", "fp8_e2e_kv"])
def test_each_expert_is_held_as_it_was_sent(folder: Path, recipe: str) -> None:
    engine, payload, form = _engine(folder, recipe)
    _audit(engine, payload, form, folder)
    report, scales = engine.report(), "" if recipe == "bf16" else "_scale_inv"
    assert {f"{name}.weight{scales}" for name in names_of_experts()} <= report.fingerprints.keys()
    assert "model.layers.1.mlp.gate.weight" in report.fingerprints
    experts = {name for name in report.quantized_linears if ".experts." in name}
    assert experts == (set() if recipe == "bf16" else set(names_of_experts()))
    assert not any(name.endswith("mlp.gate") for name in report.quantized_linears)


def test_a_second_sync_replaces_one_expert_and_changes_samples(folder: Path) -> None:
    engine, payload, recipe = _engine(folder, "fp8_rollout")
    before = engine.generate(REQUEST)
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    changed = replace(payload, version=1, tensors=payload.tensors | {name: 3 * payload.tensors[name]})
    engine.load_weights(changed)
    differing = {n for n, value in engine.report().fingerprints.items() if value != payload.fingerprints[n]}
    assert differing == {name}
    after = engine.generate(replace(REQUEST, weight_version=1))
    assert not torch.equal(after.logprobs.nan_to_num(), before.logprobs.nan_to_num())
    engine.load_weights(payload)
    again = engine.generate(REQUEST)
    torch.testing.assert_close(again.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)
    _audit(engine, payload, recipe, folder)


def _one_packed_weight(module: Any) -> None:
    module.w13_weight.data[2].view(torch.int16)[130, 7] ^= 1


def _swapped_experts(module: Any) -> None:
    module.w2_weight.data.copy_(module.w2_weight.data[[1, 0, 2, 3]])


def _one_code(module: Any) -> None:
    module.w2_weight.data.view(torch.uint8)[3, 5, 9] ^= 1


def _one_block_scale(module: Any) -> None:
    module.w13_weight_scale_inv.data[1, 1, 0] *= 1.5


def _router(module: Any) -> None:
    wrong = torch.zeros(module.output_size, module.input_size, dtype=torch.bfloat16)
    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, wrong, bias)


ROUTED = "model.layers.1.mlp.experts.routed_experts"


@pytest.mark.parametrize(
    "recipe, name, change, message",
    [
        ("bf16", ROUTED, _one_packed_weight, r"layers\.1\.mlp\.experts\.2\.(gate|up)_proj\.weight: fingerprint"),
        ("bf16", ROUTED, _swapped_experts, r"experts\.0\.down_proj.*\n.*experts\.1\.down_proj\.weight: fingerprint"),
        ("fp8_rollout", ROUTED, _one_code, r"layers\.1\.mlp\.experts\.3\.down_proj\.weight: fingerprint"),
        ("fp8_rollout", ROUTED, _one_block_scale, r"experts\.1\.up_proj\.weight_scale_inv: fingerprint"),
        ("fp8_rollout", "model.layers.0.mlp.gate", _router, r"layers\.0\.mlp\.gate\.weight: the product does not use"),
    ],
)
def test_one_changed_expert_is_found_by_its_name(
    folder: Path, recipe: str, name: str, change: Any, message: str
) -> None:
    engine, payload, form = _engine(folder, recipe)
    _audit(engine, payload, form, folder)
    _change(engine, name, change)
    with pytest.raises(AuditError, match=message):
        _audit(engine, payload, form, folder)


def _values(batch: RolloutBatch) -> Tensor:
    return batch.logprobs[batch.response_mask()].double()


def test_samples_are_those_of_an_independent_model(folder: Path) -> None:
    engine, payload, _ = _engine(folder, "bf16")
    batch = engine.generate(REQUEST)
    error = (_values(batch) - MixtureReference(folder, payload).logprobs(batch)).abs().mean()
    assert float(error) < 0.02


def test_fp8_experts_round_weights_and_activations(folder: Path) -> None:
    """The share of an effect is the projection of the engine's difference on it: 1 where it rounds, 0 where not."""
    engine, payload, _ = _engine(folder, "fp8_rollout")
    batch = engine.generate(REQUEST)
    plain = replace(payload, tensors={n: t.to(torch.bfloat16) for n, t in decoded(payload).items()})
    both, weights = (MixtureReference(folder, sent).logprobs(batch) for sent in (payload, plain))
    live, effect = _values(batch), both - weights
    assert float((live - both).abs().mean()) < 0.08
    assert float((effect * (live - weights)).sum() / (effect * effect).sum()) > 0.5


def test_a_sync_without_one_expert_is_refused(folder: Path) -> None:
    engine, payload, _ = _engine(folder, "bf16")
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    fewer = {n: t for n, t in payload.tensors.items() if n != name}
    with pytest.raises(SyncError, match=f"missing .*{name}"):
        engine.load_weights(replace(payload, tensors=fewer))


def test_power_of_two_scales_reach_the_experts(folder: Path) -> None:
    engine, payload, recipe = _engine(folder, "fp8_rollout", "recipe.rollout_linears.scale=power_of_two")
    _audit(engine, payload, recipe, folder)
    (spec,) = engine.report().block_specs
    assert spec.power_of_two


def test_layers_that_stay_bf16_keep_their_experts_in_bf16(folder: Path) -> None:
    engine, payload, recipe = _engine(folder, "fp8_rollout", "recipe.rollout_linears.keep_first_layers=1")
    _audit(engine, payload, recipe, folder)
    assert {name.split(".")[2] for name in engine.report().quantized_linears} == {"1"}


def test_experts_of_one_layer_have_one_precision(folder: Path) -> None:
    name = "model.layers.1.mlp.experts.2"
    exclude = ",".join(f"{name}.{part}" for part in PROJECTIONS)
    recipe, settings = _settings(folder, "fp8_rollout", f"recipe.rollout_linears.exclude=[{exclude}]")
    with pytest.raises(EngineError, match=rf"{name}\.gate_proj stays BF16 while others of model\.layers\.1"):
        VllmRolloutEngine(folder, recipe, settings)


def test_experts_narrower_than_a_kernel_wants_are_read_without_the_padding(tmp_path: Path) -> None:
    folder = save_mixture(tmp_path, moe_intermediate_size=40)
    engine, payload, recipe = _engine(folder, "bf16")
    if PADS:
        _audit(engine, payload, recipe, folder)
    else:
        with pytest.raises(AuditError, match="CPUFusedMOE keeps experts in a form that cannot be read back"):
            _audit(engine, payload, recipe, folder)


def test_packing_is_undone_bit_by_bit() -> None:
    """All 65,536 patterns of BF16, NaN and subnormals among them, at sides that are no powers of two."""
    patterns = torch.arange(2 * 96 * 352).reshape(2, 96, 352).to(torch.uint16).view(torch.bfloat16)
    packed = cpu_prepack_moe_weight(patterns, "vec")
    assert not torch.equal(packed.view(torch.int16), patterns.view(torch.int16))
    assert torch.equal(unpacked(packed, "vec").view(torch.int16), patterns.view(torch.int16))


def test_names_slices_and_scales_of_ragged_experts() -> None:
    """192 rows and 160 columns: blocks end inside a projection, and gate and up have block rows of their own."""
    rows, columns = 192, 160
    count = torch.arange(EXPERTS * 2 * rows * columns) % 448
    w13 = count.to(torch.float8_e4m3fn).reshape(EXPERTS, 2 * rows, columns)
    w2 = count[: EXPERTS * rows * columns].flip(0).to(torch.float8_e4m3fn).reshape(EXPERTS, columns, rows)
    s13, s2 = torch.arange(EXPERTS * 8.0).reshape(EXPERTS, 4, 2), torch.arange(EXPERTS * 4.0).reshape(EXPERTS, 2, 2)
    layer = LiveExperts(
        "model.layers.3.mlp.experts",
        SimpleNamespace(
            w13_weight=w13,
            w2_weight=w2,
            w13_weight_scale_inv=s13,
            w2_weight_scale_inv=s2,
            weight_block_size=[128, 128],
            moe_config=SimpleNamespace(intermediate_size=rows, num_logical_experts=EXPERTS, num_experts=EXPERTS),
            quant_method=SimpleNamespace(experts_cls=type("TritonExperts", (), {})),
        ),
    )
    assert (layer.problem, layer.block, layer.activation_group) == (None, (128, 128), 128)
    found = {name: (weight, scales) for name, weight, scales in layer.matrices()}
    assert list(found) == [f"model.layers.3.mlp.experts.{e}.{part}" for e in range(EXPERTS) for part in PROJECTIONS]
    for expert in range(EXPERTS):
        expected = {
            "gate_proj": (w13[expert, :192], s13[expert, :2]),
            "up_proj": (w13[expert, 192:], s13[expert, 2:]),
            "down_proj": (w2[expert], s2[expert]),
        }
        for part, (codes, scales) in expected.items():
            held, held_scales = found[f"model.layers.3.mlp.experts.{expert}.{part}"]
            assert held_scales is not None and torch.equal(held_scales, scales)
            assert torch.equal(held.view(torch.uint8), codes.view(torch.uint8))
            assert held_scales.shape == (-(-held.shape[0] // 128), -(-held.shape[1] // 128))


@pytest.mark.parametrize(
    "kernel, logical, message",
    [
        ("FlashInferExperts", EXPERTS, "FlashInferExperts keeps experts in a form that cannot be read back"),
        ("TritonExperts", 2 * EXPERTS, f"{EXPERTS} experts of {2 * EXPERTS} are held here"),
    ],
)
def test_what_cannot_be_read_is_a_problem(kernel: str, logical: int, message: str) -> None:
    module = SimpleNamespace(
        w13_weight=torch.zeros(EXPERTS, 4, 2),
        moe_config=SimpleNamespace(num_logical_experts=logical, num_experts=logical),
        quant_method=SimpleNamespace(experts_cls=type(kernel, (), {})),
    )
    assert str(LiveExperts("experts", module).problem).startswith(f"experts: {message}")
