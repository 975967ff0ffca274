"""The console of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.console import Console

_PROGRAM = """
import sys
from rich.console import Console as RichConsole
from flows.console import Console, outlive_readers
console = Console()
if sys.argv[2] == "logging":
    outlive_readers()
    console = RichConsole(stderr=True)
    console.say = console.print
sys.stdin.readline()
for line in range(3):
    console.say("a line")
open(sys.argv[1], "w").write("went on")
"""


@pytest.mark.parametrize("who", ["run", "logging"])
def test_a_run_goes_on_when_nobody_reads_its_output(who: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(done), who],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == 0 and done.read_text() == "went on"


def test_lines_go_to_the_log_where_there_is_one() -> None:
    lines: list[str] = []
    console = Console(log=lines.append)
    console.say("one")
    console.advance("train", 1, 2, "note")
    console.advance("train", 2, 2, line=False)
    assert lines == ["one", "train 1/2  note"]
