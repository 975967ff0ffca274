"""When the rollout engine gives the device's memory back, where the trainer shares it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.compose import compose
from conf.schema import Deadlines, RunConfig
from flows import steps
from flows.steps import Stepper
from tasks import bootstrap as beginning
from tasks.calls import Engines
from tasks.engines.protocols import TokenRows

Course = list[str]
SHARED = ("rollout=vllm", "rollout.sleep_level=2", "recipe=fp8_rollout_kv")


class _Actor:
    """As Ray's handle: notes the method that is asked for, which answers at once."""

    def __init__(self, course: Course, name: str) -> None:
        self._course, self._name = course, name

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._course.append(self._name + method))


def _engines(course: Course, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Engines, "answer", lambda *_: None)
    rollout, trainer = _Actor(course, ""), _Actor(course, "")
    return Engines(rollout, trainer, Deadlines())  # type: ignore[arg-type]


def _evaluated(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Course:
    course: Course = []
    engines = _engines(course, monkeypatch)
    monkeypatch.setattr(steps, "sync", lambda *_: course.append("sync") or {"scales": {}})
    found = {"metrics": {"eval/accuracy": 0.5}, "solved": []}
    monkeypatch.setattr(steps, "evaluate", lambda *_: course.append("evaluate") or found)
    for part in ("Sampler", "input_digests"):
        monkeypatch.setattr(steps, part, lambda *_, **__: None)
    session: Any = SimpleNamespace(config=config, engines=engines, dataset=SimpleNamespace(eval=()), grader=None)
    session.eval_results = SimpleNamespace(add=lambda *_: None)
    stepper = Stepper(session, None, "", (), 0)  # type: ignore[arg-type]
    assert stepper.evaluate(3) == {"eval/accuracy": 0.5}
    return course


def test_after_an_evaluation_the_device_is_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _evaluated(compose(SHARED), monkeypatch) == ["sync", "evaluate", "sleep"]


@pytest.mark.parametrize("overrides", [("rollout=vllm",), ()])
def test_without_a_sleep_level_nothing_is_asked(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _evaluated(compose(overrides), monkeypatch) == ["sync", "evaluate"]


def test_the_first_scales_are_measured_while_the_rollout_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    course: Course = []
    engines = _engines(course, monkeypatch)
    rows = TokenRows(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    monkeypatch.setattr(beginning, "sync", SimpleNamespace(fn=lambda *_: course.append("sync")))
    monkeypatch.setattr(beginning, "generate", lambda *_: course.append("generate") or ({}, None))
    monkeypatch.setattr(beginning, "prompt_rows", lambda *_: rows)
    monkeypatch.setattr(beginning, "sampling_prompts", lambda *_: ())
    dataset: Any = SimpleNamespace(train=(None,), batch=lambda *_: ())
    beginning.bootstrap.fn(engines, compose(SHARED), dataset, SimpleNamespace(eos_token_ids=()), ())  # type: ignore[arg-type]
    assert course == ["calibrate", "sync", "generate", "sleep", "calibrate_on_batch", "sync"]
