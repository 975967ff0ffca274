"""The pre-flight of an FP8 KV cache: when it runs, what it measures, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

from conf.compose import ConfigError, compose
from conf.schema import KvPrecision, KvPreflight
from tasks.engines.protocols import TokenRows
from tasks.preflight import (
    ERROR,
    LARGEST,
    MEAN,
    TOKENS,
    Reference,
    bf16_cache,
    cache_mismatch,
    refusal,
    verdict,
    wanted,
    warning,
)

LIMITS = KvPreflight(warn=0.03, refuse=0.1)


@pytest.mark.parametrize(
    ("mean_abs", "expected"),
    [
        (0.0, "fine"),
        (0.03, "fine"),
        (math.nextafter(0.03, 1), "warn"),
        (0.1, "warn"),
        (math.nextafter(0.1, 1), "refuse"),
        (math.inf, "refuse"),
        (math.nan, "refuse"),
    ],
)
def test_a_limit_itself_is_within_it(mean_abs: float, expected: str) -> None:
    assert verdict(mean_abs, LIMITS) == expected


def test_with_equal_limits_nothing_is_only_warned_of() -> None:
    limits = KvPreflight(warn=0.1, refuse=0.1)
    assert [verdict(x, limits) for x in (0.1, math.nextafter(0.1, 1))] == ["fine", "refuse"]


def test_the_measures_of_a_batch_worked_by_hand() -> None:
    q = torch.tensor([[math.nan, -1.0, -2.0], [math.nan, math.nan, -0.5]])
    p = torch.tensor([[9.0, -1.25, -1.5], [9.0, 9.0, -0.5]])
    found = cache_mismatch(p, q, torch.isfinite(q))
    assert found[MEAN] == pytest.approx((0.25 + 0.5 + 0.0) / 3)
    assert found[LARGEST] == 0.5
    assert found[ERROR] == pytest.approx((math.exp(0.25) + math.exp(0.5) + 1) / 3)
    assert found[TOKENS] == 3


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_leaves_no_measure(side: int, value: float) -> None:
    sides = [torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])]
    sides[side][0, 1] = value
    found = cache_mismatch(*sides, torch.tensor([[True, True]]))
    assert all(math.isnan(found[name]) for name in (MEAN, LARGEST, ERROR)) and found[TOKENS] == 2
    assert verdict(found[MEAN], LIMITS) == "refuse"
    assert "mean |d| nan" in str(refusal(found, LIMITS))


def test_no_token_is_no_evidence() -> None:
    found = cache_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert math.isnan(found[MEAN]) and found[TOKENS] == 0


def test_what_is_said_names_value_key_and_way_out() -> None:
    measured = {MEAN: 0.0456, LARGEST: 1.25, ERROR: 1.05, TOKENS: 512.0}
    assert warning(measured, LIMITS) == (
        "mean |d| 0.0456 of log-probabilities between an FP8 and a BF16 KV cache (512 tokens, largest 1.25) is above "
        "rollout.kv_preflight.warn 0.03; safer: a recipe whose KV cache is BF16 (recipe=fp8_e2e, fp8_rollout or "
        "bf16), or a model with Q/K-norm"
    )
    said = str(refusal(measured | {MEAN: 0.2}, LIMITS))
    assert said.startswith("rollout.kv_preflight.refuse = 0.1: this model has mean |d| 0.2 of log-probabilities")
    assert "; allowed: up to 0.1; a recipe whose KV cache is BF16" in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["recipe=fp8_e2e_kv"], True),
        (["recipe=fp8_rollout_kv"], True),
        (["recipe=fp8_e2e"], False),
        (["recipe=bf16"], False),
        (["recipe=fp8_e2e_kv", "rollout.kv_preflight.enabled=false"], False),
        (["recipe=fp8_e2e", "rollout.kv_preflight.enabled=true"], False),
    ],
)
def test_only_a_recipe_with_an_fp8_cache_is_measured(overrides: list[str], expected: bool) -> None:
    assert wanted(compose(overrides)) is expected


def test_the_other_engine_differs_in_its_cache_alone() -> None:
    recipe = compose(["recipe=fp8_e2e_kv", "recipe.rollout_linears.keep_last_layers=1"]).recipe
    other = bf16_cache(recipe)
    assert other.kv == KvPrecision() and not other.kv.quantized
    assert other.model_copy(update={"kv": recipe.kv}) == recipe


def test_the_response_tokens_that_are_left_are_compared() -> None:
    rows = TokenRows(torch.zeros(3, 5, dtype=torch.int64), torch.tensor([5, 3, 2]))
    reference = Reference(rows, torch.tensor([3, 2, 2]), torch.zeros(3, 5), 0.0)
    assert reference.mask.to(torch.int64).tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["refuse=0.02"], "rollout.kv_preflight.refuse = 0.02: is below warn 0.03; allowed: 0.03 and more"),
        (["warn=0.2"], "rollout.kv_preflight.refuse = 0.1: is below warn 0.2; allowed: 0.2 and more"),
        (["warn=0.0"], "rollout.kv_preflight.warn = 0.0"),
        (["prompts=0"], "rollout.kv_preflight.prompts = 0"),
        (["max_new_tokens=0"], "rollout.kv_preflight.max_new_tokens = 0"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_limits_that_mean_nothing_are_refused(overrides: list[str], line: str, engine: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([f"rollout={engine}", *(f"rollout.kv_preflight.{override}" for override in overrides)])
    (problem,) = refused.value.problems
    assert problem.startswith(line)
