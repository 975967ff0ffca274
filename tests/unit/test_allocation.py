"""What still fits into an allocation, and what does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flows.allocation import Allocation, Pace, first_step_s, process_age_s
from infra.journal import Journal


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_step_fits_while_the_longest_one_so_far_would() -> None:
    clock = Clock()
    pace = Pace(100.0, used=10.0, clock=clock)
    assert pace.allows("step")
    for seconds in (20.0, 5.0):
        with pace.measured("step"):
            clock.now += seconds
    pace.note("eval", 15.0)
    # 65 of 90 seconds are left.
    assert pace.allows("step", "step", "eval")
    clock.now += 10
    assert not pace.allows("step", "step", "eval") and pace.allows("step", "eval")
    assert Pace(None, clock=clock).allows("step")


def test_a_slow_first_step_is_forgotten() -> None:
    pace = Pace(50.0, clock=Clock())
    for seconds in (60.0, 1.0, 2.0, 1.0, 1.0):
        pace.note("step", seconds)
        assert not pace.allows("step")
    pace.note("step", 1.0)
    assert pace.allows("step")


def test_a_continued_run_knows_its_journal(tmp_path: Path) -> None:
    clock = Clock()
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("step", 1, {"time/step_s": 7.0})
        journal.append("step", 2, {"time/step_s": 6.0})
        journal.append("eval", 2, {"time/eval_s": 2.0, "eval/accuracy": 90.0})
        journal.append("checkpoint", 2, {"time/checkpoint_s": 1.0})
        entries = journal.entries()
    for seconds, fits in ((10.5, True), (9.5, False)):
        pace = Pace(seconds, clock=clock)
        pace.learn(entries)
        assert pace.allows("step", "eval", "checkpoint") == fits


def test_a_sweep_begins_what_has_time_for_a_first_step(tmp_path: Path) -> None:
    clock = Clock()
    allocation = Allocation(400.0, used=100.0, clock=clock)
    assert (allocation.for_a_run, allocation.until_ended) == (255.0, 270.0)
    assert allocation.begins()
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("step", 3, {}, time_ms=int(4e5))
        journal.append("bootstrap", 0, {}, time_ms=int(5.1e5))
        journal.append("step", 4, {}, time_ms=int(5.9e5))
        journal.append("step", 5, {}, time_ms=int(9e5))
    allocation.learn(tmp_path / "journal.jsonl", began_s=500.0)
    clock.now += 165
    assert allocation.begins()
    clock.now += 10
    assert not allocation.begins()
    assert allocation.for_a_run == 80.0


def test_the_first_run_of_a_call_is_begun_while_there_is_any_time() -> None:
    clock = Clock()
    allocation = Allocation(1.0, clock=clock)
    assert allocation.begins()
    clock.now += 0.9
    assert not allocation.begins() and allocation.until_ended == 0.0
    endless = Allocation(None, clock=clock)
    assert endless.begins() and math.isinf(endless.for_a_run) and math.isinf(endless.until_ended)


def test_the_first_step_counts_from_the_begin(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert first_step_s(path, 0.0) is None
    with Journal(path) as journal:
        journal.append("step", 1, {}, time_ms=4000)
        assert first_step_s(path, 5.0) is None
        journal.append("step", 2, {}, time_ms=7500)
    assert first_step_s(path, 5.0) == pytest.approx(2.5)


def test_a_process_has_an_age() -> None:
    assert 0 < process_age_s() < 86400
