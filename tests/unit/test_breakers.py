"""Rules on a run's metrics: when they trip, what they leave, and how a run ends by them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.exceptions import TerminationSignal

from conf.compose import compose, digest
from conf.problems import ConfigError
from conf.schema import BreakerRule
from flows import exits
from flows.allocation import RunStopped
from flows.breakers import (
    BREAKERS,
    BreakerError,
    Breakers,
    NothingTrainedError,
    check_something_was_trained,
)
from flows.cli import main
from flows.failures import reason, run_failed
from flows.inputs import check_inputs, pausing_problems
from infra.journal import Entry
from infra.store import StoreError
from tasks.audit import AuditError
from tasks.calls import LateError, PhaseError
from tasks.data.examples import DataError
from tasks.numerics.breakers import Bounds, streak, trips
from tasks.rollout_link import LateSyncError

MISMATCH = "mismatch/token_mult_prob_error"


class _Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def _entry(step: int, **values: float) -> Entry:
    return Entry(step, "step", step, {key.replace("__", "/"): value for key, value in values.items()}, 0)


def _judge(
    rules: Sequence[BreakerRule], values: Sequence[float], folder: Path, known: Sequence[float] = ()
) -> tuple[list[str], str | None]:
    """What is said of warnings, and of the rule that stops."""
    said = _Said()
    entries = [Entry(at, "step", at, {MISMATCH: value}, 0) for at, value in enumerate(known, 1)]
    breakers = Breakers(tuple(rules), folder / BREAKERS, said, entries, len(known))  # type: ignore[arg-type]
    for step, value in enumerate(values, len(known) + 1):
        for trip in breakers.judge(step, {MISMATCH: value}):
            if trip.rule.action == "stop":
                return said.lines, trip.text
    return said.lines, None


def _evidence(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / BREAKERS).read_text().splitlines()]


@pytest.mark.parametrize(
    ("bounds", "value", "broken"),
    [
        (Bounds(above=1.05), 1.05, False),
        (Bounds(above=1.05), 1.0501, True),
        (Bounds(below=0.1), 0.1, False),
        (Bounds(below=0.1), 0.0999, True),
        (Bounds(above=2.0, below=1.0), 1.5, False),
        (Bounds(), 1e300, False),
        (Bounds(), math.nan, True),
        (Bounds(above=1.0), -math.inf, True),
    ],
)
def test_bounds_are_healthy_themselves_and_what_is_not_finite_never_is(
    bounds: Bounds, value: float, broken: bool
) -> None:
    assert bounds.broken_by(value) is broken


@given(st.lists(st.sampled_from([0.0, 2.0, math.nan]), max_size=12), st.integers(1, 4))
def test_a_streak_ends_at_the_last_healthy_value(values: list[float], patience: int) -> None:
    bounds = Bounds(above=1.0)
    length = streak(bounds, values)
    assert all(value != 0.0 for value in values[len(values) - length :])
    assert length == len(values) or values[len(values) - length - 1] == 0.0
    assert trips(bounds, values, patience) == (length >= patience)
    assert trips(bounds, values, patience, every=False) == (length > 0 and length % patience == 0)


def test_a_warning_comes_again_when_its_patience_has_passed_again(tmp_path: Path) -> None:
    rule = BreakerRule(metric=MISMATCH, above=1.05, patience=2)
    said, stopped = _judge([rule], [1.1, 1.0, 1.1, 1.2, 1.3, 1.4, 1.0], tmp_path)
    assert stopped is None
    text = (
        f"{MISMATCH} = 1.2 (above 1.05 or not finite) for 2 steps, the last of them 4: breakers.rules[0], action warn"
    )
    assert said == [f"warning, step 4: {text}", f"warning, step 6: {text.replace('1.2', '1.4').replace('4:', '6:')}"]
    assert [(line["step"], line["values"]) for line in _evidence(tmp_path)] == [
        (4, {"step 3": 1.1, "step 4": 1.2}),
        (6, {"step 5": 1.3, "step 6": 1.4}),
    ]


def test_a_rule_that_stops_names_itself_after_all_rules_were_looked_at(tmp_path: Path) -> None:
    stop = BreakerRule(metric=MISMATCH, above=1.5, action="stop")
    warn = BreakerRule(metric=MISMATCH, below=3.0)
    absent = BreakerRule(metric="calibration/saturated_fraction", above=0.0, action="stop")
    said, stopped = _judge([absent, stop, warn], [math.inf], tmp_path)
    assert stopped is not None and stopped.startswith(
        f"{MISMATCH} = inf (above 1.5 or not finite) at step 1: breakers.rules[1]"
    )
    assert len(said) == 1 and "breakers.rules[2], action warn" in said[0]
    assert [line["kind"] for line in _evidence(tmp_path)] == [f"1 {MISMATCH} stop", f"2 {MISMATCH} warn"]


def test_a_run_that_goes_on_judges_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    rule = BreakerRule(metric=MISMATCH, above=1.05, patience=3, action="stop")
    values = [1.1, 1.0, 1.1, 1.1, 1.1]
    ends = []
    for cut in range(len(values)):
        (tmp_path / str(cut)).mkdir()
        _, stopped = _judge([rule], values[cut:], tmp_path / str(cut), known=values[:cut])
        ends.append((stopped or "", _evidence(tmp_path / str(cut))))
    assert all(end == ends[0] for end in ends) and "the last of them 5" in ends[0][0]
    # A patience that was shortened meanwhile is over at the next step.
    (tmp_path / "shorter").mkdir()
    shorter = BreakerRule(metric=MISMATCH, above=1.05, patience=2, action="stop")
    _, stopped = _judge([shorter], [1.1], tmp_path / "shorter", known=[1.1, 1.1])
    assert stopped is not None


def test_what_is_computed_again_after_a_resume_leaves_no_second_evidence(tmp_path: Path) -> None:
    rule = BreakerRule(metric=MISMATCH, above=1.05)
    _judge([rule], [1.1, 1.2], tmp_path)
    _judge([rule], [1.2], tmp_path, known=[1.1])
    assert [line["step"] for line in _evidence(tmp_path)] == [1, 2]


def test_a_pause_needs_a_server_that_outlives_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "none.toml"))
    config = compose(["breakers.rules=[{metric: optim/grad_norm}, {metric: optim/grad_norm, action: pause}]"])
    with pytest.raises(ConfigError, match=r"breakers.rules\[1\].action = pause: nobody can resume the run"):
        check_inputs(config)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    check_inputs(config)
    (problem,) = pausing_problems(config, server=True, deployed=True)
    assert "breakers.rules[1].action = pause: a run of a deployment would lose its slot" in problem
    assert main(["submit", "breakers.rules=[{metric: optim/grad_norm, action: pause}]"]) == 2
    assert pausing_problems(compose([]), server=False, deployed=True) == []


def test_a_run_without_an_update_is_told_apart() -> None:
    nothing = [_entry(1, optim__skipped_steps=2.0), _entry(2, optim__skipped_steps=1.0, optim__empty_updates=1.0)]
    with pytest.raises(NothingTrainedError, match=r"none of 4 updates in 2 steps was made: 3 skipped.* and 1 without"):
        check_something_was_trained(nothing, 2)
    check_something_was_trained([*nothing, _entry(3, optim__skipped_steps=1.0)], 2)
    check_something_was_trained([Entry(1, "eval", 0, {"eval/accuracy": 0.5}, 0)], 2)


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (LateError("late"), "deadline", 5),
        (LateSyncError("late"), "deadline", 5),
        (PhaseError("dead"), "engine", 4),
        (AuditError("differs"), "engine", 4),
        (BreakerError(MISMATCH, "high"), "breaker", 6),
        (NothingTrainedError("none"), "nothing_trained", 7),
        (BreakerError("reward/zero_variance_fraction", "equal"), "equal_rewards", 8),
        (DataError("empty"), "config", 2),
        (StoreError("gone"), "failed", 1),
    ],
)
def test_each_kind_of_end_has_a_word_and_a_code(
    error: Exception, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason(error) == said
    assert run_failed(error) == code
    assert capsys.readouterr().err == f"fp8-grpo: {type(error).__name__}: {error}\n"


def test_codes_are_distinct_and_what_ends_a_run_early_is_no_failure_of_it() -> None:
    codes = [value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)]
    assert len(codes) == len(set(codes)) == 10
    assert reason(RunStopped(3)) == "allocation"
    assert reason(KeyboardInterrupt()) == reason(SystemExit(1)) == reason(TerminationSignal(15)) == "interrupted"
    assert reason(ConfigError(["wrong"])) == "config"


def test_breakers_change_no_result_and_may_change_when_a_run_goes_on() -> None:
    assert digest(compose(["breakers=strict"])) == digest(compose(["breakers=off"])) == digest(compose([]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "breakers.rules=[{metric: gen_kl, above: 1}]",
            "breakers.rules[0].metric = gen_kl: not one of the choices; allowed: one of mismatch/token_mult_prob_error",
        ),
        (
            "breakers.rules=[{metric: mismatch/gen_kl, above: 1, below: 2}]",
            "breakers.rules[0].below = 2.0: no value is healthy, since it lies over above 1; allowed: at most 1, or nu",
        ),
        (
            "breakers.rules=[{metric: mismatch/gen_kl, patience: 0}]",
            "breakers.rules[0].patience = 0: too small; allowed: an integer >= 1 and <= 1000",
        ),
        (
            "breakers.rules=[{metric: mismatch/gen_kl, action: die}]",
            "breakers.rules[0].action = die: not one of the choices; allowed: one of warn, pause, bf16_rollout, stop",
        ),
        ("breakers.rules=[{metric: mismatch/gen_kl, above: .inf}]", "breakers.rules[0].above = "),
        ("breakers=none", "breakers = none: no such option; allowed: one of off, strict, warn"),
    ],
)
def test_a_wrong_rule_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([override])
    assert said in str(refused.value)
