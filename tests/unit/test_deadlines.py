"""Deadlines of phases: every wait for an engine has one, from the configuration."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import Deadlines
from tasks.calls import Engines
from tasks.deadlines import Clock, Limit, LimitName, limit_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("flows", "tasks") for path in (ROOT / folder).glob("*.py"))
RAY = {"get", "wait"}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _has_timeout(call: ast.Call) -> bool:
    """A timeout that is written there, and not as None."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    value = given.get("timeout")
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def unbounded(source: str) -> list[str]:
    """Waits for other processes that could last for ever, of the kinds that this project has.

    Ray's own, futures, and iteration over a stream of references outside `Engines.following`.
    """
    found = []
    tree = ast.parse(source)
    for call in _calls(tree):
        name = _name(call)
        if name in {f"ray.{verb}" for verb in RAY} | {"wait_for"} and not _has_timeout(call):
            found.append(f"{call.lineno}: {name} without a timeout")
        if name == "wait" and len(call.args) < 3:
            found.append(f"{call.lineno}: wait without a clock")
        if name.endswith(".answer") and len(call.args) < 4:
            found.append(f"{call.lineno}: answer without a clock")
        streams = [ast.unparse(argument) for argument in call.args]
        if name in ("next", "list") and any("stream" in text for text in streams):
            found.append(f"{call.lineno}: {name} over a stream")
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension))
    found += [f"a loop over {ast.unparse(loop.iter)}" for loop in loops if "stream" in ast.unparse(loop.iter)]
    return found


def test_what_waits_without_end_is_seen() -> None:
    assert unbounded("ray.get(ref)") == ["1: ray.get without a timeout"]
    assert unbounded("ray.get(ref, timeout=None)") and unbounded("ray.wait([ref])") and unbounded("wait_for(futures)")
    assert unbounded('wait("train", ref)') and unbounded('engines.answer("train", "trainer", ref)')
    assert unbounded("list(stream)") and unbounded("next(stream)") and unbounded("[x for x in stream]")
    assert unbounded("for x in engine.stream(): pass")
    assert (
        unbounded('ray.get(ref, timeout=3)\nwait("train", ref, clock)\nengines.answer("a", "trainer", ref, clock)')
        == []
    )


def test_no_call_of_an_engine_waits_for_ever() -> None:
    found = {path.name: unbounded(path.read_text(encoding="utf-8")) for path in SOURCES}
    # The one place that reads a stream; it has waited for the item with a timeout.
    (read,) = found.pop("calls.py")
    assert read.endswith("next over a stream")
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(found) > 50


def test_the_one_place_that_reads_a_stream_has_waited_before() -> None:
    tree = ast.parse((ROOT / "tasks/calls.py").read_text(encoding="utf-8"))
    (following,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "following")
    names = [_name(call) for call in _calls(following)]
    assert "ray.wait" in names and "next" in names


def test_actor_methods_are_asked_through_the_engines_alone() -> None:
    """A reference of a `.remote(` call goes to `answer` or `following`, or stays a reference: no `.result()` on it."""
    for path in SOURCES:
        for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            assert ".remote(" not in _name(call), f"{path.name}:{call.lineno}"


def test_every_limit_is_a_key_and_every_key_a_limit() -> None:
    assert set(get_args(LimitName)) == set(Deadlines.model_fields)
    assert compose([]).deadlines == Deadlines()
    assert limit_of(Deadlines(train_s=2.5), "train_s") == Limit("deadlines.train_s", 2.5)


@pytest.mark.parametrize("name", sorted(Deadlines.model_fields))
def test_a_deadline_is_a_time_to_come(name: str) -> None:
    for value in ("0", "-1"):
        with pytest.raises(ConfigError, match=f"deadlines.{name} = {value}.*: too small; allowed: a number > 0"):
            compose([f"deadlines.{name}={value}"])
    with pytest.raises(
        ConfigError, match=f"deadlines.{name} = 10000000000.0: too large; allowed: a number > 0 and <= 10000000"
    ):
        compose([f"deadlines.{name}=1e10"])


def test_the_key_of_before_names_the_new_one() -> None:
    moved = "cluster.sync_timeout_s = 30: is called deadlines.sync_s now; allowed: deadlines.sync_s=30"
    with pytest.raises(ConfigError) as caught:
        compose(["cluster.sync_timeout_s=30"])
    assert caught.value.problems == (moved,)


def test_no_collective_is_shorter_than_a_phase_of_the_ranks() -> None:
    for name in ("build_s", "restore_s", "sync_s", "score_s", "train_s", "calibrate_s", "checkpoint_s", "sleep_s"):
        assert Deadlines.model_validate({name: 1e6}).ranks_s == 1e6
    assert Deadlines(generate_s=1e6, warm_start_s=1e6).ranks_s == Deadlines().train_s


def test_a_clock_runs_from_its_making_and_says_what_it_is_set_by() -> None:
    clock = Clock(Limit("deadlines.sync_s", 0.2), times=2)
    assert 0.3 < clock.left() <= 0.4
    time.sleep(0.45)
    assert clock.left() == 0.0
    within = "no answer within 2 x deadlines.sync_s = 0.2 s"
    assert clock.missed() == f"{within}; allowed: a larger deadlines.sync_s, if it is only slow"


def test_the_leader_of_several_ranks_is_waited_for_a_little_longer() -> None:
    """It has the same deadline, and knows which of its ranks is late."""
    actor: object = object()
    alone = Engines(actor, actor, Deadlines(train_s=1.0))  # type: ignore[arg-type]
    led = Engines(actor, actor, Deadlines(train_s=1.0), None, [actor])  # type: ignore[arg-type, list-item]
    assert alone.clock("train_s").left() <= 1.0 < 9.0 < led.clock("train_s").left() <= 11.0
    # What it does in several calls takes the limit as often: else it would be ended before it can say who is late.
    led = Engines(actor, actor, Deadlines(build_s=100.0, restore_s=100.0), None, [actor])  # type: ignore[arg-type, list-item]
    assert 205.0 < led.clock("build_s").left() <= 210.0 and 305.0 < led.clock("restore_s").left() <= 310.0
