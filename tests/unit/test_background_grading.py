"""Grading in the background: order, errors, what leaving the block leaves behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.background_grading import BackgroundGrading
from tasks.data.examples import Example, GraderSpec
from tasks.data.grading import Grader, GraderError
from tasks.data.split import prompt_id
from tasks.engines.protocols import FinishedGroup

VERIFIER = """
import os, time
from pathlib import Path

NOTES = Path(__file__).with_name("notes")

def judge(completion, entry):
    with NOTES.open("a") as notes:
        notes.write(completion + "\\n")
    if completion == "hang":
        time.sleep(600)
    time.sleep(0.02)
    return float(completion) / float(entry["answer"])
"""


class _Codec:
    """Stands for a tokenizer: a token is a character."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def _group(prompt: int, *texts: str) -> FinishedGroup:
    return FinishedGroup(prompt, tuple(list(text.encode()) for text in texts))


def _grading(grader: Grader) -> BackgroundGrading:
    codec: Any = _Codec()
    return BackgroundGrading(grader, codec, [Example(prompt_id(a), a, a) for a in ("10", "100")])


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GraderSpec:
    (tmp_path / "background_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return GraderSpec("callable", "background_verifier:judge", partial_credit=True)


def _await_line(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"nothing was written to {path}"
        time.sleep(0.01)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("grading")]


def test_results_are_in_the_order_of_the_request_whatever_ends_first(spec: GraderSpec, tmp_path: Path) -> None:
    before = time.perf_counter()
    with Grader(spec, 20.0) as grader, _grading(grader) as grading:
        grading.submit(_group(1, "20", "100", "3"))
        grading.submit(_group(0, "5", "10", "0"))
        grades, tokens = grading.results()
    assert [grade.score for grade in grades] == [0.5, 1.0, 0.0, 0.2, 1.0, 0.03]
    assert tokens == [1, 2, 1, 2, 3, 1]
    assert (tmp_path / "notes").read_text().split() == ["20", "100", "3", "5", "10", "0"]
    assert _threads() == []
    assert grading.seconds_before(before) == 0.0
    # Six answers of 20 ms each.
    assert 0.12 <= grading.seconds_before(float("inf")) <= time.perf_counter() - before


def test_an_answer_that_is_still_being_graded_counts_up_to_the_moment(spec: GraderSpec, tmp_path: Path) -> None:
    with Grader(spec, 1.0) as grader, _grading(grader) as grading:
        grading.submit(_group(0, "hang"))
        _await_line(tmp_path / "notes")
        moment = time.perf_counter()
        (grade,), _ = grading.results()
    assert grade.timed_out
    assert 0 < grading.seconds_before(moment) < grading.seconds_before(float("inf"))


def test_a_verifier_that_does_not_start_is_tried_once_and_says_so_in_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tmp_path / "tried"
    (tmp_path / "no_verifier.py").write_text(f"open({str(tried)!r}, 'a').write('x')\nraise OSError('no disk')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Grader(GraderSpec("callable", "no_verifier:judge"), 5.0) as grader, _grading(grader) as grading:
        grading.submit(_group(0, "1", "2", "3"))
        grading.submit(_group(1, "4"))
        with pytest.raises(GraderError, match="does not start: OSError: no disk"):
            grading.results()
    assert tried.read_text() == "x"
    assert _threads() == []


def test_leaving_drops_what_nobody_has_begun_and_waits_for_the_rest(spec: GraderSpec, tmp_path: Path) -> None:
    with Grader(spec, 2.0) as grader:
        with pytest.raises(RuntimeError, match="the rollout failed"), _grading(grader) as grading:
            grading.submit(_group(0, "hang", "1", "2"))
            grading.submit(_group(1, "3"))
            _await_line(tmp_path / "notes")
            raise RuntimeError("the rollout failed")
        assert _threads() == []
    assert (tmp_path / "notes").read_text().split() == ["hang"]
