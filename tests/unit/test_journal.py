"""The journal: exact values back, one entry per (kind, step), every kind of damage by name."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from infra.journal import Entry, Journal, JournalError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.jsonl"


def write_three(path: Path) -> None:
    with Journal(path) as journal:
        for step in range(3):
            journal.append("step", step, {"loss/policy": step / 7}, time_ms=1000 + step)


def test_entries_come_back_exactly(path: Path) -> None:
    values = {
        "a": 0.1 + 0.2,
        "tiny": 5e-324,
        "minus": -0.0,
        "n": 2**60,
        "flag": True,
        "none": None,
        "s": "\n",
    }
    with Journal(path) as journal:
        written = journal.append("step", 3, values, time_ms=1234)
    assert written == Entry(1, "step", 3, values, 1234)
    (read,) = Journal(path).entries()
    assert read == written
    assert math.copysign(1.0, read.values["minus"]) == -1.0
    assert type(read.values["flag"]) is bool and type(read.values["n"]) is int


def test_non_finite_values_come_back(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("step", 0, {"nan": math.nan, "up": math.inf, "down": -math.inf})
    values = Journal(path).entries()[0].values
    assert math.isnan(values["nan"]) and values["up"] == math.inf and values["down"] == -math.inf
    assert '"nan":NaN' in path.read_text() and '"down":-Infinity' in path.read_text()


def test_one_line_an_entry_numbered_from_one(path: Path) -> None:
    write_three(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["seq"] for row in rows] == [1, 2, 3]
    assert rows[2] == {"seq": 3, "kind": "step", "step": 2, "values": {"loss/policy": 2 / 7}, "time_ms": 1002}


def test_time_is_now_unless_given(path: Path) -> None:
    before = time.time_ns() // 1_000_000
    entry = Journal(path).append("step", 0, {})
    assert before <= entry.time_ms <= time.time_ns() // 1_000_000


def test_a_time_that_could_not_be_read_back_is_refused(path: Path) -> None:
    with pytest.raises(JournalError, match=r"time_ms=1\.5: not an integer >= 0"):
        Journal(path).append("step", 0, {}, time_ms=1.5)


def test_last_find_and_since(path: Path) -> None:
    journal = Journal(path)
    assert journal.last("step") is None and journal.find("step", 0) is None and len(journal) == 0
    journal.append("step", 0, {"x": 1.0})
    journal.append("eval", 0, {"y": 2.0})
    journal.append("step", 1, {"x": 3.0})
    assert journal.last("step").step == 1 and journal.last("eval").values == {"y": 2.0}
    assert journal.find("eval", 0).seq == 2 and journal.find("eval", 1) is None
    assert [entry.seq for entry in journal.since(1)] == [2, 3] and journal.since(3) == ()


def test_same_kind_and_step_is_refused_and_nothing_is_written(path: Path) -> None:
    write_three(path)
    journal = Journal(path)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"a step entry of step 1 exists \(seq 2\)"):
        journal.append("step", 1, {"loss/policy": 0.5})
    assert path.read_bytes() == before
    assert journal.append("eval", 1, {}).seq == 4


@pytest.mark.parametrize(
    ("kind", "step", "values", "message"),
    [
        ("Step", 0, {}, "kind='Step'"),
        ("step", -1, {}, "step=-1: a step is an integer >= 0"),
        ("step", True, {}, "step=True"),
        ("step", 0, {"a": [1]}, r"step entry of step 0: a=\[1\] is a list; allowed are float, int, str"),
        ("step", 0, {1: 2.0}, "key 1 is not a string"),
    ],
)
def test_bad_entries_are_named(path: Path, kind: str, step: int, values: dict, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        Journal(path).append(kind, step, values)
    assert not path.exists()


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_cut_off_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    write_three(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:kept])
    with caplog.at_level(logging.WARNING):
        journal = Journal(path)
    assert [entry.step for entry in journal.entries()] == [0, 1]
    assert "the last line is torn" in caplog.text
    assert path.read_bytes() == lines[0] + lines[1]
    journal.append("step", 2, {"loss/policy": 2 / 7}, time_ms=1002)
    assert path.read_bytes() == b"".join(lines)


def test_a_last_line_of_zeros_is_torn_too(path: Path) -> None:
    write_three(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 100 + b"\n")
    assert len(Journal(path)) == 3
    assert path.read_bytes() == whole


def corrupt(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seq": 2, "ki', r"journal\.jsonl, line 2: not JSON"),
        ('{"seq":2}', "line 2: not an entry: an entry has the keys kind, seq, step, time_ms, values"),
        ('{"seq":5,"kind":"step","step":1,"values":{},"time_ms":1}', "line 2: seq=5, expected 2"),
        ('{"seq":2,"kind":"step","step":0,"values":{},"time_ms":1}', "line 2: a second step entry of step 0"),
        ('{"seq":2,"kind":"step","step":1.5,"values":{},"time_ms":1}', r"line 2: kind='step', step=1\.5"),
        ('{"seq":2,"kind":"step","step":1,"values":{"a":{}},"time_ms":1}', "line 2: values: a={} is a dict"),
    ],
)
def test_damage_in_the_middle_names_the_line(path: Path, text: str, message: str) -> None:
    write_three(path)
    corrupt(path, 2, text)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=message):
        Journal(path)
    assert path.read_bytes() == before


def test_a_sigkilled_writer_leaves_whole_entries_and_no_lock(path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from infra.journal import Journal
        journal = Journal(sys.argv[1])
        for step in range(10**6):
            journal.append("step", step, {"x": step / 3})
            print(step, flush=True)
        """
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in writer.stdout.read().splitlines()]
    writer.wait()
    with Journal(path) as journal:
        steps = [entry.step for entry in journal.entries()]
        assert steps[: len(acknowledged)] == acknowledged
        assert journal.append("step", len(steps), {}).seq == len(steps) + 1


def test_two_writers_are_refused_but_reading_is_not(path: Path) -> None:
    first = Journal(path)
    first.append("step", 0, {})
    second = Journal(path)
    assert len(second) == 1
    with pytest.raises(JournalError, match="another process is writing this journal"):
        second.append("step", 1, {})
    first.append("step", 1, {})
    first.close()
    with pytest.raises(JournalError, match="another process has written it since it was opened"):
        second.append("step", 2, {})


def test_a_reader_does_not_cut_the_tail_of_a_live_writer(path: Path) -> None:
    with Journal(path) as writer:
        writer.append("step", 0, {})
        with path.open("ab") as half:
            half.write(b'{"seq":2')
        assert len(Journal(path)) == 1
        assert path.read_bytes().endswith(b'{"seq":2')


def test_a_failed_append_leaves_the_file_and_the_object_as_they_were(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    journal.append("step", 0, {"x": 1.0})
    before = path.read_bytes()

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(JournalError, match=r"cannot append: .*No space left on device"):
            journal.append("step", 1, {"x": 2.0})
    assert path.read_bytes() == before and journal.find("step", 1) is None
    assert journal.append("step", 1, {"x": 2.0}).seq == 2


def test_import_copy_into_an_empty_journal(path: Path, tmp_path: Path) -> None:
    write_three(path)
    elsewhere = Journal(tmp_path / "other" / "journal.jsonl")
    elsewhere.import_copy(path)
    assert elsewhere.path.read_bytes() == path.read_bytes()
    assert elsewhere.append("step", 3, {}).seq == 4


def test_import_copy_ignores_the_torn_tail_of_the_copy(path: Path, tmp_path: Path) -> None:
    write_three(path)
    torn = path.read_bytes()[:-5]
    path.write_bytes(torn)
    elsewhere = Journal(tmp_path / "journal.jsonl")
    elsewhere.import_copy(path)
    assert len(elsewhere) == 2 and path.read_bytes() == torn


def test_import_copy_completes_a_beginning_and_keeps_a_continuation(path: Path, tmp_path: Path) -> None:
    write_three(path)
    copy = path.read_bytes()
    other = tmp_path / "journal.jsonl"
    other.write_bytes(copy.splitlines(keepends=True)[0])
    with Journal(other) as journal:
        journal.import_copy(path)
        assert other.read_bytes() == copy
        journal.append("step", 3, {})
        longer = other.read_bytes()
        journal.import_copy(path)
        assert other.read_bytes() == longer


def test_import_copy_refuses_other_history(path: Path, tmp_path: Path) -> None:
    write_three(path)
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("step", 0, {"loss/policy": 9.0}, time_ms=1000)
        with pytest.raises(JournalError, match=r"entry 1 \(step, step 0\) differs from entry 1 of"):
            journal.import_copy(path)
        assert len(journal) == 1
        with pytest.raises(JournalError, match=r"missing\.jsonl: no such journal to import"):
            journal.import_copy(tmp_path / "missing.jsonl")


def test_appends_from_several_threads_are_whole_and_numbered(path: Path) -> None:
    with Journal(path) as journal:
        threads = [
            threading.Thread(target=lambda k=k: [journal.append(f"k{k}", i, {"x": i}) for i in range(20)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = Journal(path).entries()
    assert [entry.seq for entry in read] == list(range(1, 81))
    assert {(entry.kind, entry.step) for entry in read} == {(f"k{k}", i) for k in range(4) for i in range(20)}


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot read the journal"):
        Journal(tmp_path)
