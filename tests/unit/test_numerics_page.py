"""The page of numerics names every shipped option, every key and choice of its sections, and every metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from conf.compose import CONFIG_DIR, compose
from conf.overrides import groups
from conf.schema import (
    Algorithm,
    Calibration,
    Correction,
    DynamicSampling,
    LinearPrecision,
    Optimizer,
    Overlong,
    RejectionRule,
    Section,
)
from tasks.engines.protocols import RolloutBatch
from tasks.engines.step_inputs import prepare_step, score_metrics

PAGE = (Path(__file__).parents[2] / "tasks/numerics/README.md").read_text(encoding="utf-8")
CODE = set(re.findall(r"`([^`]+)`", PAGE))
# Sizes of the batch, layers left out and AdamW's usual numbers are no choices of the numerics.
ELSEWHERE = {
    Algorithm: {"name", "group_size", "prompts_per_step", "updates_per_step"},
    Correction: {"name"},
    LinearPrecision: {"keep_first_layers", "keep_last_layers", "exclude"},
    Calibration: {"enabled"},
    Optimizer: {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "warmup_steps"},
}
SECTIONS = [Algorithm, DynamicSampling, Overlong, Correction, RejectionRule, LinearPrecision, Calibration, Optimizer]


@pytest.mark.parametrize("group", ["algorithm", "correction"])
def test_every_shipped_option_has_a_row(group: str) -> None:
    rows = {match for match in re.findall(r"^\| `(\w+)`", PAGE, flags=re.MULTILINE)}
    assert set(groups(CONFIG_DIR)[group]) <= rows


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_and_choice_is_named(section: type[Section]) -> None:
    named = {word for text in CODE for word in re.findall(r"\w+", text)}
    for key, field in section.model_fields.items():
        if key not in ELSEWHERE.get(section, set()):
            assert key in named, f"{section.__name__}.{key}"
            assert _choices(field.annotation) <= named, f"{section.__name__}.{key}"


def _choices(annotation: Any) -> set[str]:
    return {choice for choice in get_args(annotation) if isinstance(choice, str)}


def test_every_metric_of_score_and_correction_is_named() -> None:
    batch = RolloutBatch(
        tokens=torch.arange(8).view(2, 4),
        prompt_lengths=torch.tensor([1, 2]),
        response_lengths=torch.tensor([3, 2]),
        logprobs=torch.full((2, 4), -1.0),
        truncated=torch.tensor([False, True]),
        weight_version=torch.zeros(2, dtype=torch.int64),
    )
    config = compose(["correction=outlier_veto", "correction.self_normalize=true"])
    p = torch.full((2, 4), -1.25)
    step = prepare_step(batch, p, torch.tensor([1.0, -1.0]), config.algorithm, config.correction, 8)
    names = {*score_metrics(batch, p, config.correction), *step.metrics}
    shown = {re.sub(r"(by_position)/.*", r"\1/FROM-TO", name) for name in names}
    shown = {re.sub(r"(rejected_fraction)_k1.*", r"\1_RULE", name) for name in shown}
    assert shown <= CODE
    assert len(shown) > 25
