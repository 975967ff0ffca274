"""The audit after a sync: every kind of difference is an error that names it, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import Recipe
from tasks.audit import AuditError, audit
from tasks.engines.protocols import EngineReport
from tasks.numerics.fp8_linear import BlockSpec

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
LINEARS = (UP, DOWN)
SCALES = {(layer, part): 0.01 * (layer + 1) for layer in (0, 1) for part in "qkv"}
FINGERPRINTS = {f"{UP}.weight": 2**64 - 1, f"{UP}.weight_scale_inv": 5, "model.norm.weight": 0}


def _recipe(name: str) -> Recipe:
    return compose([f"recipe={name}"]).recipe


@pytest.fixture
def recipe() -> Recipe:
    return _recipe("fp8_e2e_kv")


@pytest.fixture
def report() -> EngineReport:
    return EngineReport(
        engine="torch",
        version=3,
        quantized_linears=LINEARS,
        linear_dtype="float8_e4m3fn",
        kv_dtype="float8_e4m3fn",
        query_dtype="float8_e4m3fn",
        scales=dict(SCALES),
        fingerprints=dict(FINGERPRINTS),
    )


@pytest.fixture
def sent() -> dict[str, Any]:
    return {"version": 3, "scales": dict(SCALES), "fingerprints": dict(FINGERPRINTS)}


def _problems(report: EngineReport, sent: dict[str, Any], recipe: Recipe, linears: tuple[str, ...]) -> list[str]:
    with pytest.raises(AuditError) as caught:
        audit(report, sent, recipe, linears)
    head, *lines = str(caught.value).splitlines()
    assert head == "the rollout engine is not what it should be:"
    return lines


def test_an_engine_as_sent_passes(report: EngineReport, sent: dict[str, Any], recipe: Recipe) -> None:
    audit(report, sent, recipe, LINEARS)
    audit(replace(report, quantized_linears=LINEARS[::-1]), sent, recipe, LINEARS)


@pytest.mark.parametrize(
    "name, linears, dtypes",
    [
        ("bf16", (), ("bfloat16", "bfloat16")),
        ("fp8_rollout", LINEARS, ("float8_e4m3fn", "bfloat16")),
        ("fp8_rollout_kv", LINEARS, ("float8_e4m3fn", "float8_e4m3fn")),
        ("fp8_e2e", LINEARS, ("float8_e4m3fn", "bfloat16")),
    ],
)
def test_no_false_alarm_under_any_recipe(
    report: EngineReport, sent: dict[str, Any], name: str, linears: tuple[str, ...], dtypes: tuple[str, str]
) -> None:
    scales = SCALES if dtypes[1] == "float8_e4m3fn" else {}
    held = replace(
        report,
        quantized_linears=linears,
        linear_dtype=dtypes[0],
        kv_dtype=dtypes[1],
        query_dtype=dtypes[1],
        scales=scales,
    )
    audit(held, sent | {"scales": scales}, _recipe(name), linears)


def test_a_bf16_query_beside_an_fp8_cache_is_what_the_recipe_may_ask(
    report: EngineReport, sent: dict[str, Any]
) -> None:
    recipe = compose(["recipe=fp8_e2e_kv", "recipe.kv.quantize_query=false"]).recipe
    audit(replace(report, query_dtype="bfloat16"), sent, recipe, LINEARS)
    assert _problems(report, sent, recipe, LINEARS) == [
        "attention query: recipe fp8_e2e_kv says bfloat16, the engine runs float8_e4m3fn"
    ]


@pytest.mark.parametrize(
    "change, line",
    [
        (
            {"quantized_linears": (UP,)},
            f"{DOWN}: recipe fp8_e2e_kv quantises it, the engine holds it in high precision",
        ),
        (
            {"quantized_linears": (*LINEARS, "lm_head")},
            "lm_head: quantised in the engine, but not by recipe fp8_e2e_kv",
        ),
        (
            {"linear_dtype": "float8_e5m2"},
            "linear weights: recipe fp8_e2e_kv says float8_e4m3fn, the engine runs float8_e5m2",
        ),
        (
            {"linear_dtype": "bfloat16/float8_e4m3fn"},
            "linear weights: recipe fp8_e2e_kv says float8_e4m3fn, the engine runs bfloat16/float8_e4m3fn",
        ),
        ({"kv_dtype": "bfloat16"}, "KV cache: recipe fp8_e2e_kv says float8_e4m3fn, the engine runs bfloat16"),
        (
            {"query_dtype": "bfloat16"},
            "attention query: recipe fp8_e2e_kv says float8_e4m3fn, the engine runs bfloat16",
        ),
        ({"version": 2}, "weight version in the engine 2, sent 3"),
        ({"version": None}, "weight version in the engine None, sent 3"),
        ({"scales": SCALES | {(1, "k"): 1.0}}, "layer 1 k: scale in the engine 1.0, sent 0.02"),
        (
            {"scales": SCALES | {(0, "v"): 0.010000000000000002}},
            "layer 0 v: scale in the engine 0.010000000000000002, sent 0.01",
        ),
        ({"scales": SCALES | {(0, "q"): float("nan")}}, "layer 0 q: scale in the engine nan, sent 0.01"),
        (
            {"scales": {k: s for k, s in SCALES.items() if k != (0, "q")}},
            "layer 0 q: scale in the engine nothing, sent 0.01",
        ),
        ({"scales": SCALES | {(2, "q"): 0.5}}, "layer 2 q: scale in the engine 0.5, sent nothing"),
        (
            {"fingerprints": FINGERPRINTS | {"model.norm.weight": 1}},
            "model.norm.weight: fingerprint in the engine 1, sent 0",
        ),
        (
            {"fingerprints": FINGERPRINTS | {"model.extra.weight": 9}},
            "model.extra.weight: fingerprint in the engine 9, sent nothing",
        ),
        (
            {"fingerprints": {n: f for n, f in FINGERPRINTS.items() if n != f"{UP}.weight_scale_inv"}},
            f"{UP}.weight_scale_inv: fingerprint in the engine nothing, sent 5",
        ),
    ],
)
def test_a_difference_is_named_with_its_values(
    report: EngineReport, sent: dict[str, Any], recipe: Recipe, change: dict[str, Any], line: str
) -> None:
    assert _problems(replace(report, **change), sent, recipe, LINEARS) == [line]


HEAD_SCALES = {key: (scale, scale / 2) for key, scale in SCALES.items()}


def test_scales_of_heads_are_compared_one_by_one(report: EngineReport, sent: dict[str, Any]) -> None:
    recipe = compose(["recipe=fp8_e2e_kv", "recipe.calibration.granularity=head"]).recipe
    held = replace(report, scales=dict(HEAD_SCALES))
    audit(held, sent | {"scales": dict(HEAD_SCALES)}, recipe, LINEARS)
    other = HEAD_SCALES | {(1, "k"): (0.02, 0.03)}
    assert _problems(held, sent | {"scales": other}, recipe, LINEARS) == [
        "layer 1 k head 1: scale in the engine 0.01, sent 0.03"
    ]
    fewer = HEAD_SCALES | {(0, "v"): (0.01,)}
    assert _problems(held, sent | {"scales": fewer}, recipe, LINEARS) == [
        "layer 0 v head 1: scale in the engine 0.005, sent nothing"
    ]


@pytest.mark.parametrize(
    "granularity, scales, line",
    [
        ("layer", HEAD_SCALES, "recipe fp8_e2e_kv says one a layer, the engine holds one a KV head"),
        ("head", SCALES, "recipe fp8_e2e_kv says one a KV head, the engine holds one a layer"),
    ],
)
def test_scales_of_another_granularity_are_named_even_if_sent_so(
    report: EngineReport, sent: dict[str, Any], granularity: str, scales: dict[tuple[int, str], Any], line: str
) -> None:
    recipe = compose(["recipe=fp8_e2e_kv", f"recipe.calibration.granularity={granularity}"]).recipe
    problems = _problems(replace(report, scales=dict(scales)), sent | {"scales": dict(scales)}, recipe, LINEARS)
    assert problems == [f"Q/K/V scales: {line}"]


def test_an_fp8_engine_under_the_bf16_recipe_is_found(report: EngineReport, sent: dict[str, Any]) -> None:
    assert _problems(report, sent, _recipe("bf16"), ()) == [
        f"{DOWN}: quantised in the engine, but not by recipe bf16",
        f"{UP}: quantised in the engine, but not by recipe bf16",
        "KV cache: recipe bf16 says bfloat16, the engine runs float8_e4m3fn",
        "attention query: recipe bf16 says bfloat16, the engine runs float8_e4m3fn",
    ]


def test_all_differences_are_told_together(report: EngineReport, sent: dict[str, Any], recipe: Recipe) -> None:
    wrong = replace(report, version=2, quantized_linears=(UP,), fingerprints=FINGERPRINTS | {"model.norm.weight": 1})
    assert _problems(wrong, sent, recipe, LINEARS) == [
        f"{DOWN}: recipe fp8_e2e_kv quantises it, the engine holds it in high precision",
        "weight version in the engine 2, sent 3",
        "model.norm.weight: fingerprint in the engine 1, sent 0",
    ]


def test_a_long_list_is_cut_and_counted(report: EngineReport, sent: dict[str, Any], recipe: Recipe) -> None:
    many = {f"tensor.{i:02}": i for i in range(23)}
    lines = _problems(report, sent | {"fingerprints": FINGERPRINTS | many}, recipe, LINEARS)
    assert len(lines) == 21
    assert lines[0] == "tensor.00: fingerprint in the engine nothing, sent 0"
    assert lines[-1] == "... and 3 more"


def test_other_block_shapes_are_named(report: EngineReport, sent: dict[str, Any], recipe: Recipe) -> None:
    right, wrong = BlockSpec(), BlockSpec(group=64)
    audit(replace(report, block_specs=(right,)), sent, recipe, LINEARS)
    (line,) = _problems(replace(report, block_specs=(right, wrong)), sent, recipe, LINEARS)
    assert line == f"linear blocks: recipe fp8_e2e_kv says {right}, the engine runs {wrong}"


def test_what_the_engine_itself_finds_wrong_counts(report: EngineReport, sent: dict[str, Any], recipe: Recipe) -> None:
    found = f"{UP}: the product does not use the weights that are held"
    assert _problems(replace(report, problems=(found,)), sent, recipe, LINEARS) == [found]
