"""Refusals: each names the key, the value, what is allowed and the nearest existing name."""

from __future__ import annotations

import pickle

import pytest

from conf.compose import ConfigError, compose
from conf.overrides import FREE_MAPS
from conf.problems import nearest_key

TOP = (
    "recipe, algorithm, correction, model, data, rollout, trainer, cluster, deadlines, breakers, tracking, storage, "
    "benchmark, sweep, steps, seed, eval_every, checkpoint_every, runs_dir, allocation_s, run_name, resume"
)
ALGORITHM = (
    "name, group_size, prompts_per_step, updates_per_step, advantage_baseline, advantage_scale, advantage_eps, ratio, "
    "surrogate, clip_low, clip_high, dual_clip, normalization, normalization_length, kl_coef, kl_estimator, "
    "kl_gradient, entropy_coef, dynamic_sampling, overlong"
)
RECIPES = "one of bf16, fp8_e2e, fp8_e2e_kv, fp8_rollout, fp8_rollout_kv"
NAME = "letters, digits, `.`, `_`, `-`, no leading dot"
REMOVABLE = f"~ before {' or '.join(FREE_MAPS)} only"
QUOTING = "a value with spaces or signs is quoted within the override: 'key=\"a value\"'"


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stepz=3", f"stepz = 3: unknown key; allowed: {TOP}; did you mean steps?"),
        ("+stepz=3", f"stepz = 3: unknown key; allowed: {TOP}; did you mean steps?"),
        ("++stepz=3", f"stepz = 3: unknown key; allowed: {TOP}; did you mean steps?"),
        ("qqq=null", f"qqq = null: unknown key; allowed: {TOP}"),
        ("recpe=bf16", f"recpe = bf16: unknown key; allowed: {TOP}; did you mean recipe?"),
        ("recipe@x=bf16", f"recipe@x = bf16: unknown key; allowed: {TOP}; did you mean recipe?"),
        ("hydra.verbose=true", f"hydra.verbose = true: unknown key; allowed: {TOP}"),
        ("group_size=4", f"group_size = 4: unknown key; allowed: {TOP}; did you mean algorithm.group_size?"),
        (
            "learning_rate=1",
            f"learning_rate = 1: unknown key; allowed: {TOP}; "
            "did you mean model.warm_start.learning_rate or trainer.optimizer.learning_rate?",
        ),
        (
            "algorithm.group_sise=8",
            f"algorithm.group_sise = 8: unknown key; allowed: {ALGORITHM}; did you mean algorithm.group_size?",
        ),
        (
            "recip.kv.dtype=e4m3",
            f"recip.kv.dtype = e4m3: unknown key; allowed: {TOP}; did you mean recipe.kv.dtype?",
        ),
        (
            "recipe.kv.dtyp=e4m3",
            "recipe.kv.dtyp = e4m3: unknown key; allowed: dtype, quantize_query; did you mean recipe.kv.dtype?",
        ),
    ],
)
def test_unknown_key(override: str, line: str) -> None:
    assert problems([override]) == [line]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("recipe=fp8_e2", f"recipe = fp8_e2: no such option; allowed: {RECIPES}; did you mean fp8_e2e?"),
        ("recipe=null", f"recipe = null: no such option; allowed: {RECIPES}"),
        ("recipe={name: x}", f'recipe = {{"name": "x"}}: no such option; allowed: {RECIPES}'),
        ("+storage=s4", "storage = s4: no such option; allowed: one of local, s3; did you mean s3?"),
        ("rollout=sglang", "rollout = sglang: no such option; allowed: one of torch, vllm"),
        (
            "~recipe",
            f"~recipe = null: a key cannot be removed; allowed: {REMOVABLE}",
        ),
        (
            "~steps",
            f"~steps = null: a key cannot be removed; allowed: {REMOVABLE}",
        ),
        (
            "steps=1,2",
            "steps = 1,2: several values, and one run takes one; allowed: one value; "
            "a list is written [a,b], text with commas is quoted",
        ),
        (
            "steps",
            f"steps: cannot be read (missing EQUAL at '<EOF>'); allowed: key=value, group=option; {QUOTING}",
        ),
        ("=3", f"=3: cannot be read (no key); allowed: key=value, group=option; {QUOTING}"),
        (
            "steps=${nowhere}",
            "steps = ${nowhere}: Interpolation key 'nowhere' not found; "
            "allowed: a plain value, or ${key} of an existing key",
        ),
        (
            "recipe.rollout_linears.weight_block.7=3",
            "recipe.rollout_linears.weight_block[7] = 3: list index out of range; "
            "allowed: a plain value, or ${key} of an existing key",
        ),
        (
            "~data.parameters.nothing",
            "Could not delete from config. 'data.parameters.nothing' does not exist.",
        ),
    ],
)
def test_options_and_forms(override: str, line: str) -> None:
    assert problems([override]) == [line]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("steps=1.5", "steps = 1.5: not an integer; allowed: an integer >= 1"),
        ("steps=3.0", "steps = 3.0: not an integer; allowed: an integer >= 1"),
        ("steps=abc", "steps = abc: not an integer; allowed: an integer >= 1"),
        ("steps='3'", "steps = 3: not an integer; allowed: an integer >= 1"),
        ("steps=null", "steps = null: not an integer; allowed: an integer >= 1"),
        ("steps=0", "steps = 0: too small; allowed: an integer >= 1"),
        ("steps.foo=3", 'steps = {"foo": 3}: not an integer; allowed: an integer >= 1'),
        ("seed=-1", "seed = -1: too small; allowed: an integer >= 0 and <= 4294967295"),
        (
            "algorithm.group_size=true",
            "algorithm.group_size = true: not an integer; allowed: an integer >= 2",
        ),
        ("algorithm.group_size=1", "algorithm.group_size = 1: too small; allowed: an integer >= 2"),
        ("algorithm.clip_low=1.1", "algorithm.clip_low = 1.1: too large; allowed: a number > 0 and <= 1"),
        ("rollout.temperature=true", "rollout.temperature = true: not a number; allowed: a number > 0"),
        ("rollout.temperature=nan", "rollout.temperature = NaN: not a finite number; allowed: a number > 0"),
        (
            "recipe.calibration.percentile=100.5",
            "recipe.calibration.percentile = 100.5: too large; allowed: a number > 0 and <= 100",
        ),
        (
            "recipe.calibration.margin=0.99",
            "recipe.calibration.margin = 0.99: too small; allowed: a number >= 1",
        ),
        ("correction.cap=1.0", "correction.cap = 1.0: too small; allowed: a number > 1 or null"),
        (
            "correction.allow_uncorrected=1",
            "correction.allow_uncorrected = 1: neither true nor false; allowed: true or false",
        ),
        (
            "recipe.kv.dtype=e4m2",
            "recipe.kv.dtype = e4m2: not one of the choices; allowed: one of bf16, e4m3; did you mean e4m3?",
        ),
        (
            "recipe.kv=3",
            "recipe.kv = 3: not a section; allowed: a section with the keys dtype, quantize_query",
        ),
        (
            "recipe.rollout_linears.weight_block=[1,2,3]",
            "recipe.rollout_linears.weight_block = [1, 2, 3]: too many items; "
            "allowed: a list of 2, each an integer >= 1",
        ),
        (
            "recipe.rollout_linears.weight_block=[1]",
            "recipe.rollout_linears.weight_block = [1]: too few items; allowed: a list of 2, each an integer >= 1",
        ),
        (
            "recipe.rollout_linears.weight_block=[128,0]",
            "recipe.rollout_linears.weight_block[1] = 0: too small; allowed: a list of 2, each an integer >= 1",
        ),
        (
            "recipe.rollout_linears.exclude=lm_head",
            "recipe.rollout_linears.exclude = lm_head: not a list; allowed: a list, each item text that is not empty",
        ),
        ("data.parameters=3", "data.parameters = 3: not a map; allowed: a map"),
        (
            "storage.options.x=[1,nan]",
            "storage.options.x = NaN: not a finite number; allowed: any plain value",
        ),
        (
            "data.kind=jsonk",
            "data.kind = jsonk: not one of the choices; allowed: one of reasoning_gym, jsonl, synthetic; "
            "did you mean jsonl?",
        ),
        ("run_name=a/b", f"run_name = a/b: not of the required form; allowed: a name ({NAME}) or null"),
        ("run_name=.x", f"run_name = .x: not of the required form; allowed: a name ({NAME}) or null"),
        (
            "run_name=12",
            f"run_name = 12: not text; allowed: a name ({NAME}) or null (quoted to be text: 'run_name=\"12\"')",
        ),
        (
            "run_name=auto",
            "run_name = auto: resume=auto means something else; allowed: any other name, or null",
        ),
        (
            "resume=../x",
            f"resume = ../x: not of the required form; allowed: never, auto or the name of a run ({NAME})",
        ),
        (
            "model.architecture.hidden_size=100",
            "model.architecture.hidden_size = 100: not a multiple of 128; "
            "allowed: an integer >= 128 and multiple of 128",
        ),
    ],
)
def test_types_and_bounds(override: str, line: str) -> None:
    assert problems([override]) == [line]


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        [
            "recipe=fp8_e2",
            "recipe.calibration.enabled=false",
            "correction=none",
            "algorithm.group_size=1",
            "rollout.top_p=0.5",
            "steps=abc",
            "stepz=3",
            "data.pool=5",
            "1x",
        ]
    )
    assert [line.partition(":")[0] for line in found] == [
        "recipe = fp8_e2",
        "1x",
        "recipe.calibration.enabled = false",
        "algorithm.group_size = 1",
        "data.pool = 5",
        "rollout.top_p = 0.5",
        "steps = abc",
        "stepz = 3",
    ]


def test_rules_between_sections_hold_while_other_sections_are_wrong() -> None:
    found = problems(["correction=none", "steps=abc", "trainer.micro_batch_size=7"])
    assert [line.partition(":")[0] for line in found] == [
        "correction.weight = none",
        "trainer.micro_batch_size = 7",
        "steps = abc",
    ]


def test_the_message_is_complete_and_survives_pickling() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["steps=0", "seed=x"])
    text = (
        "the configuration is refused for 2 reasons:\n"
        "  steps = 0: too small; allowed: an integer >= 1\n"
        "  seed = x: not an integer; allowed: an integer >= 0 and <= 4294967295"
    )
    assert str(refused.value) == text
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


def test_a_refusal_does_not_spoil_the_next_composition() -> None:
    problems(["recipe=nothing"])
    problems(["steps=${nowhere}"])
    assert compose(["steps=5"]).steps == 5


def test_secrets_do_not_show_in_the_chain_of_errors() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["storage.options.secret=hunter2"])
    assert "hunter2" not in str(refused.value) + str(refused.value.__cause__)


def test_nearest_key_prefers_siblings() -> None:
    known = ["a.name", "b.name", "b.size"]
    assert nearest_key("b.nam", known) == "b.name"
    assert nearest_key("c.size", known) == "b.size"
    assert nearest_key("name", known) == "a.name or b.name"
    assert nearest_key("zzz", known) is None
