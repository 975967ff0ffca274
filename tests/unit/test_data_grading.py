"""Verifiers: verdicts, limits, and what happens to the process that runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.data.examples import Example, GraderSpec
from tasks.data.grading import Grade, Grader, GraderError
from tasks.data.split import prompt_id

SOLVED = Grade(score=1.0, solved=True)
WRONG = Grade(score=0.0, solved=False)
TIMED_OUT = Grade(score=0.0, solved=False, timed_out=True)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc or needs RLIMIT_AS")

VERIFIER = """
import os, signal, subprocess, sys, time

def judge(completion, entry):
    if completion == "hang":
        while True:
            pass
    if completion == "hang in C":
        sum(range(10**15))
    if completion == "die":
        print("last words", file=sys.stderr)
        os._exit(3)
    if completion == "raise":
        raise LookupError("no such thing")
    if completion == "print":
        print("{}")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "print('{}')"])
    if completion == "read":
        assert sys.stdin.read() == ""
    if completion == "flood":
        print("x" * 10_000_000)
    if completion == "memory":
        bytearray(4 << 30)
    if completion.startswith("return "):
        return eval(completion.removeprefix("return "))
    if completion == "grandchild":
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(entry["metadata"]["note"], "w") as note:
            note.write(str(worker.pid))
        while True:
            pass
    return 1.0 if completion == entry["answer"] and entry["question"] == "q?" else 0.25

broken = 7
"""


def _example(answer: str = "a", **metadata) -> Example:
    return Example(id=prompt_id("q?"), prompt="q?", answer=answer, metadata=metadata)


@pytest.fixture
def spec(tmp_path, monkeypatch) -> GraderSpec:
    """A custom verifier in a module that only this test's import path knows."""
    (tmp_path / "custom_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return GraderSpec("callable", "custom_verifier:judge")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)


MATH_CASES = [
    ("1/2", "0.5", 1.0),
    ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    ("1,000", "1000", 1.0),
    ("1000", r"\boxed{1,000}", 1.0),
    ("1000", "The answer is 1,000.", 1.0),
    ("72", "48 / 2 = 24, and 48 + 24 = 72", 1.0),
    ("72", "72 or 24", 0.0),
    ("-3", "3", 0.0),
    ("42", "41", 0.0),
    ("42", "", 0.0),
    ("1/3", "0.33", 0.0),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
    (r"3\sqrt{2}", "2", 0.0),
    ("2^{10}", "1024", 1.0),
    ("2^{10}", "2", 0.0),
    ("x+1", r"\boxed{1+x}", 1.0),
    ("18 dollars", "$18", 1.0),
    ("10%", "0.1", 1.0),
    (r"10\%", r"\boxed{10\%}", 1.0),
    ("(1,2)", r"\boxed{(1, 2)}", 1.0),
    ("Paris", "Paris", 1.0),
]


def test_math_answers_are_compared_by_value():
    with Grader(GraderSpec("math_verify"), 20.0) as grader:
        grades = grader.grade([(_example(gold), f" {said}\n") for gold, said, _ in MATH_CASES])
    assert [(gold, said, grade.score) for (gold, said, _), grade in zip(MATH_CASES, grades, strict=True)] == (
        MATH_CASES
    )
    assert all(grade.solved == (grade.score == 1.0) and grade.error is None for grade in grades)


def test_reference_without_a_value_is_an_error_of_that_grade():
    with Grader(GraderSpec("math_verify"), 20.0) as grader:
        grades = grader.grade([(_example("Paris"), r"\boxed{Pairs}"), (_example("4"), "2 + 2 = 4")])
    assert grades == [
        Grade(
            score=0.0,
            solved=False,
            error="UnreadableReferenceError: math-verify reads no value from the reference answer 'Paris'",
        ),
        SOLVED,
    ]


def test_runaway_power_tower_is_bounded():
    with Grader(GraderSpec("math_verify"), 2.0) as grader:
        grades = grader.grade([(_example("5"), r"\boxed{9^{9^{9^{9}}}}"), (_example("5"), "5")])
    assert grades[0].score == 0.0
    assert grades[1] == SOLVED


def test_reasoning_gym_verifier_decides_and_partial_credit_is_a_key():
    example = Example(prompt_id("1 + 11 ="), "1 + 11 =", "12", {})
    said = ["12", " 012.0\n", "+12", "13", "", "12 13"]
    with Grader(GraderSpec("reasoning_gym", "chain_sum"), 5.0) as grader:
        strict = grader.grade([(example, text) for text in said])
    assert strict == [SOLVED, SOLVED, SOLVED, WRONG, WRONG, WRONG]
    with Grader(GraderSpec("reasoning_gym", "spell_backward", partial_credit=True), 5.0) as grader:
        word = Example(prompt_id("spell"), "spell", "olleh", {"word": "hello"})
        exact, near = grader.grade([(word, "olleh"), (word, "olleg")])
    assert exact == SOLVED
    assert 0.0 < near.score < 1.0 and not near.solved


def test_custom_verifier_gets_stripped_completion_and_entry(spec):
    with Grader(spec, 5.0) as grader:
        assert grader.grade([(_example(), "  a\n"), (_example(), "b")]) == [SOLVED, WRONG]
    partial = GraderSpec(spec.kind, spec.target, partial_credit=True)
    with Grader(partial, 5.0) as grader:
        assert grader.grade([(_example(), "b")]) == [Grade(score=0.25, solved=False)]


@pytest.mark.parametrize("way", ["hang", "hang in C"])
def test_hanging_verifier_costs_its_own_answer_only(spec, way):
    with Grader(spec, 0.5) as grader:
        assert grader.grade([(_example(), "a")]) == [SOLVED]
        started = time.monotonic()
        grades = grader.grade([(_example(), "a"), (_example(), way), (_example(), "a")])
        assert time.monotonic() - started >= 0.5
    assert grades == [SOLVED, TIMED_OUT, SOLVED]


@linux_only
def test_processes_that_a_hanging_verifier_started_end_with_it(spec, tmp_path):
    note = tmp_path / "pid"
    with Grader(spec, 2.0) as grader:
        assert grader.grade([(_example(note=str(note)), "grandchild")]) == [TIMED_OUT]
    assert _wait_gone(int(note.read_text()), 5.0)


def test_dying_and_raising_verifiers_cost_their_own_answer_only(spec):
    with Grader(spec, 5.0) as grader:
        died, after, raised, last = grader.grade(
            [(_example(), "die"), (_example(), "a"), (_example(), "raise"), (_example(), "a")]
        )
    assert died == Grade(
        score=0.0,
        solved=False,
        error="the verifier's process ended with exit status 3; end of its stderr: last words",
    )
    assert raised == Grade(score=0.0, solved=False, error="LookupError: no such thing")
    assert after == last == SOLVED


@pytest.mark.parametrize("value", ["float('nan')", "1.5", "-0.1", "None", "'x'"])
def test_verdict_that_is_no_score_is_an_error(spec, value):
    with Grader(spec, 5.0) as grader:
        (grade,) = grader.grade([(_example(), f"return {value}")])
    shown = repr(eval(value))
    assert grade == Grade(
        score=0.0,
        solved=False,
        error=f"VerifierError: the verifier returned {shown}; allowed: a number from 0 to 1",
    )


def test_output_and_input_of_a_verifier_stay_out_of_the_protocol(spec):
    with Grader(spec, 20.0) as grader:
        said = ["print", "read", "flood", "a"]
        assert grader.grade([(_example(), text) for text in said]) == [WRONG, WRONG, WRONG, SOLVED]


@linux_only
def test_memory_of_a_verifier_is_bounded(spec):
    with Grader(spec, 20.0) as grader:
        greedy, after = grader.grade([(_example(), "memory"), (_example(), "a")])
    assert greedy == Grade(score=0.0, solved=False, error="MemoryError: ")
    assert after == SOLVED


def test_metadata_that_cannot_be_sent_is_an_error_of_that_grade(spec):
    with Grader(spec, 5.0) as grader:
        odd, after = grader.grade([(_example(bag={1}), "a"), (_example(), "a")])
    assert odd.error is not None
    assert re.fullmatch(
        r"example [0-9a-f]{16} cannot be sent to its verifier: entry\.metadata\.bag is a set; allowed: .*",
        odd.error,
    )
    assert after == SOLVED


def test_large_entries_and_odd_text_pass(spec):
    with Grader(spec, 20.0) as grader:
        text = "\ud800 \u2028 \x00 " * 100_000 + "x"
        assert grader.grade([(_example(text, filler=[0] * 200_000), text)]) == [SOLVED]


def test_limit_holds_outside_the_main_thread_and_calls_take_turns(spec):
    results: dict[int, list[Grade]] = {}
    with Grader(spec, 0.5) as grader:

        def work(index: int) -> None:
            results[index] = grader.grade([(_example(), "hang" if index == 1 else "b"), (_example(), "a")])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert results == {0: [WRONG, SOLVED], 1: [TIMED_OUT, SOLVED], 2: [WRONG, SOLVED]}


def test_grader_made_in_a_thread_outlives_it(spec):
    made: list[Grader] = []
    thread = threading.Thread(target=lambda: made.append(Grader(spec, 5.0)))
    thread.start()
    thread.join()
    with made[0] as grader:
        assert grader.grade([(_example(), "a")]) == [SOLVED]


def test_constructor_does_not_wait_for_the_import(tmp_path, monkeypatch):
    (tmp_path / "slow_verifier.py").write_text("import time; time.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    started = time.monotonic()
    Grader(GraderSpec("callable", "slow_verifier:judge"), 5.0).close()
    assert time.monotonic() - started < 60.0


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (
            "callable",
            "custom_verifier:broken",
            "verifier callable custom_verifier:broken does not start: VerifierError: custom_verifier:broken: "
            "the module has no function of that name",
        ),
        (
            "callable",
            "no_such_module:judge",
            "verifier callable no_such_module:judge does not start: ModuleNotFoundError: "
            "No module named 'no_such_module'",
        ),
        (
            "reasoning_gym",
            "no_task",
            "verifier reasoning_gym no_task does not start: ValueError: Dataset 'no_task' not registered",
        ),
    ],
)
def test_verifier_that_does_not_start_is_one_clear_error(spec, kind, target, message):
    with Grader(GraderSpec(kind, target), 5.0) as grader, pytest.raises(GraderError) as caught:
        grader.grade([(_example(), "a")])
    assert str(caught.value) == message


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_time_limit_must_be_positive(limit):
    with pytest.raises(GraderError) as caught:
        Grader(GraderSpec("math_verify"), limit)
    assert str(caught.value) == f"answer_time_limit_s={limit!r}; allowed: a number > 0 (seconds)"


@linux_only
def test_closed_grader_has_no_child_and_says_so(spec):
    before = _children()
    grader = Grader(spec, 5.0)
    assert grader.grade([(_example(), "a")]) == [SOLVED]
    assert len(_children() - before) == 1
    grader.close()
    grader.close()
    assert _children() == before
    with pytest.raises(GraderError, match=r"^the grader is closed$"):
        grader.grade([(_example(), "a")])


def _children() -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(entry.parent.name))
    return found


DRIVER = """
import sys, threading
from tasks.data.examples import Example, GraderSpec
from tasks.data.grading import Grader

grader = Grader(GraderSpec("callable", "custom_verifier:judge"), 1.0)
example = Example("0" * 16, "q?", "a", {})
grader.grade([(example, "a")])
print(grader._child.pid, flush=True)
if sys.argv[1] == "busy":
    grader._time_limit_s = 600.0
    grader.grade([(example, "hang in C")])
threading.Event().wait()
"""


@linux_only
@pytest.mark.parametrize(("state", "within_s"), [("idle", 5.0), ("busy", 20.0)])
def test_child_does_not_outlive_a_driver_that_is_killed(spec, state, within_s):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, state],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    if state == "busy":
        time.sleep(0.5)
    assert _alive(child)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    assert _wait_gone(child, within_s)
