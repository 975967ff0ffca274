"""What is said of a resume: values that came out otherwise, none to be found, and what an interrupt leaves for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from flows import cli
from flows.record import Record
from flows.training import _differing, _nothing_to_resume
from infra.journal import Journal


def test_values_that_came_out_otherwise_are_named(tmp_path: Path) -> None:
    class Writer:
        def notify(self) -> None:
            pass

    with Journal(tmp_path / "journal.jsonl") as journal:
        record = Record(journal, Writer())  # type: ignore[arg-type]
        record.add("step", 6, {"reward/mean": 0.5, "loss/policy": 1.0, "time/step_s": 1.0})
        record.add("step", 6, {"reward/mean": 0.5, "loss/policy": 1.5, "time/step_s": 2.0})
        assert record.replay_differences == ["loss/policy of step 6"]
    assert _differing(["a of step 1"]).startswith(
        "1 value of repeated steps differs from the journal (a of step 1): this machine"
    )
    many = [f"{name} of step 2" for name in "abcde"]
    assert "5 values of repeated steps differ from the journal (a of step 2, b of step 2, c of step 2 and 2 more)" in (
        _differing(many)
    )
    assert "(a of step 2, b of step 2, c of step 2):" in _differing(many[:3])


def test_a_resume_of_nothing_is_told(tmp_path: Path) -> None:
    store = f"storage.url={tmp_path}/store"
    assert _nothing_to_resume(compose([store])) == ()
    said = f"resume: no checkpoint of this configuration at {tmp_path}/store; a new run"
    assert _nothing_to_resume(compose([store, "resume=auto"])) == (said,)
    said = f"resume: no checkpoint of the run mine at {tmp_path}/store; a new run"
    assert _nothing_to_resume(compose([store, "resume=auto", "run_name=mine"])) == (said,)


@pytest.mark.parametrize(
    ("command", "then"),
    [
        (
            ["train"],
            "; the same command with resume=auto goes on from the last checkpoint, and begins anew where there is none",
        ),
        (["sweep"], "; the same command with --sweep-id and the id of this sweep goes on"),
        (["submit", "--watch"], "; what was submitted goes on"),
        (["doctor"], ""),
        (["benchmark"], ""),
        (["export", "run", "folder"], ""),
    ],
)
def test_an_interrupt_is_told_by_command(
    command: list[str], then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(parsed: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(command) == cli.INTERRUPTED
    assert capsys.readouterr().err == f"fp8-grpo: interrupted{then}\n"
