"""The form of the flow: what Prefect shows of it, and what it stands for."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema

from conf.compose import CONFIG_DIR, compose
from conf.overrides import groups
from flows.evaluate_checkpoint import evaluate
from flows.form import CHOICES, OVERRIDE_PATTERN, form_fields, form_overrides
from flows.janitor import janitor
from flows.rollout_benchmark import rollout_benchmark
from flows.train import fp8_grpo


def _properties(flow: Any) -> dict[str, Any]:
    properties: dict[str, Any] = parameter_schema(flow).model_dump()["properties"]
    return properties


def test_choices_are_the_shipped_files() -> None:
    shipped = groups(CONFIG_DIR)
    assert {group: set(options) for group, options in CHOICES.items()} == {
        group: set(shipped[group]) for group in CHOICES
    }
    assert set(_properties(evaluate)["recipe"]["enum"]) == {"own", *shipped["recipe"]}


def test_the_form_has_drop_downs_a_pattern_and_bounds() -> None:
    fields = _properties(fp8_grpo)
    for group in ("recipe", "algorithm", "correction", "model"):
        assert fields[group]["enum"] == list(CHOICES[group])
    assert fields["overrides"]["type"] == "array"
    assert fields["overrides"]["items"] == {"type": "string", "pattern": OVERRIDE_PATTERN}
    assert {"type": "integer", "minimum": 1} in fields["steps"]["anyOf"]
    assert {"type": "integer", "minimum": 0, "maximum": 2**32 - 1} in fields["seed"]["anyOf"]


@pytest.mark.parametrize("flow", [fp8_grpo, evaluate, rollout_benchmark, janitor], ids=lambda flow: flow.name)
def test_every_field_is_described(flow: Any) -> None:
    fields = _properties(flow)
    assert fields.keys() == inspect.signature(flow.fn).parameters.keys()
    assert all(len(field.get("description", "")) > 20 for field in fields.values()), fields


def test_an_untouched_form_is_the_configuration() -> None:
    defaults = {name: field["default"] for name, field in _properties(fp8_grpo).items() if name != "overrides"}
    assert compose(form_overrides(defaults, [])) == compose([])


def test_overrides_win_over_fields() -> None:
    config = compose(form_overrides({"recipe": "bf16", "steps": 3, "seed": 4}, ["recipe=fp8_e2e", "++steps=7"]))
    assert (config.recipe.name, config.steps, config.seed) == ("fp8_e2e", 7, 4)


def test_a_command_line_fills_the_form() -> None:
    texts = ["recipe=bf16", "seed=3", "steps=x", "model.path=/m", "correction=absent", "rollout=vllm"]
    rest = ["steps=x", "model.path=/m", "correction=absent", "rollout=vllm"]
    assert form_fields(texts) == {"recipe": "bf16", "seed": 3, "overrides": rest}


@pytest.mark.parametrize("text", ["steps=3", "+a.b=[1, 2]", "++data.parameters.x=null", "~data.parameters", "a=\n"])
def test_what_an_override_looks_like(text: str) -> None:
    assert re.search(OVERRIDE_PATTERN, text) and fp8_grpo.validate_parameters({"overrides": [text]})


@pytest.mark.parametrize("text", ["", "steps", "a space=3", "=3", "--steps=3", "1=2"])
def test_what_it_does_not_look_like(text: str) -> None:
    assert not re.search(OVERRIDE_PATTERN, text)
    with pytest.raises(ParameterTypeError, match=r"overrides\.0"):
        fp8_grpo.validate_parameters({"overrides": [text]})


def test_a_refusal_names_the_field_and_what_is_allowed() -> None:
    with pytest.raises(ParameterTypeError, match=r"recipe: Input should be 'bf16', .*fp8_rollout_kv"):
        fp8_grpo.validate_parameters({"recipe": "fp4"})


def test_a_value_said_twice_is_the_last_one_and_an_option_is_left_to_the_flow() -> None:
    assert form_fields(["recipe=bf16", "steps=4", "eval_every=4", "steps=2"]) == {
        "recipe": "bf16",
        "steps": 2,
        "overrides": ["eval_every=4"],
    }
    assert form_fields(["recipe=bf16", "recipe=fp8_e2e"]) == {"overrides": ["recipe=bf16", "recipe=fp8_e2e"]}
