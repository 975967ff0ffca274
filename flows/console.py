"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from flows.record import PHASES

_EVERY_LINE = 10
"""A run of up to so many steps prints a line for each."""


def outlive_readers() -> None:
    """From here on no console of this process ends it because whoever read its output is gone.

    Prefect's logging writes through rich, which exits the program then: a killed worker would take its runs along.
    """
    RichConsole.on_broken_pipe = _go_quiet  # type: ignore[method-assign]


def _go_quiet(self: RichConsole) -> None:
    self.quiet = True
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, self.file.fileno())
    os.close(devnull)


class _LastingConsole(RichConsole):
    """A run does not end because nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        _go_quiet(self)


class Console:
    """Progress and results of one run. On a terminal one live display; elsewhere a line for each event.

    `log` takes each line instead: a deployed run's lines belong on its page.
    """

    def __init__(self, console: RichConsole | None = None, log: Callable[[str], None] | None = None) -> None:
        self._log = log
        self._rich = console or _LastingConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show bars until the block ends (terminal only)."""
        if not self._rich.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._rich) as self._live:
            try:
                yield
            finally:
                self._live, self._bars = None, {}

    def say(self, text: str) -> None:
        """One line of information."""
        if self._log is not None:
            self._log(text)
            return
        (self._live.console if self._live else self._rich).print(text, markup=False)

    def advance(self, name: str, done: int, total: int, note: str = "", line: bool = True) -> None:
        """`done` of `total` in the phase `name`; as a line only if `line`."""
        if self._live is not None:
            if name not in self._bars:
                self._bars[name] = self._live.add_task(name, total=total, note="")
            self._live.update(self._bars[name], completed=done, note=note)
        elif line:
            self.say(f"{name} {done}/{total}  {note}".rstrip())

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One finished training step."""
        note = (
            f"reward {metrics['reward/mean']:.3f}  mismatch {metrics['mismatch/token_mult_prob_error']:.4f}  "
            f"step {metrics['time/step_s']:.2f} s"
        )
        self.advance(
            "train", step, total, note, line=total <= _EVERY_LINE or step == 1 or step % 5 == 0 or step == total
        )

    def closing(self, recipe: str, summary: Mapping[str, float | None]) -> None:
        """The closing table."""
        table = Table(title=f"{recipe}: what this run did", title_justify="left")
        table.add_column("")
        table.add_column("value", justify="right")
        for label, value in closing_rows(summary):
            table.add_row(label, value)
        self._rich.print(table)


def closing_rows(summary: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Label and text of each line of the closing table; what the run does not have reads `-`."""

    def show(key: str, form: str) -> str:
        value = summary.get(key)
        return "-" if value is None else format(value, form)

    rows = [
        ("eval accuracy, before", show("accuracy_first", ".3f")),
        ("eval accuracy, after", show("accuracy_last", ".3f")),
        ("gain", show("gain", "+.3f")),
        ("eval accuracy on a BF16 rollout engine, after", show("accuracy_bf16", ".3f")),
        ("mismatch: token mult. prob. error, median", show("mismatch_median", ".5f")),
        ("mismatch: token mult. prob. error, max", show("mismatch_max", ".5f")),
        ("tokens rejected by the correction, median share", show("rejected_median", ".3f")),
        ("step, median s", show("time/step_s", ".3f")),
    ]
    rows += [(f"  {phase}, median s", show(f"time/{phase}_s", ".3f")) for phase in PHASES]
    rows.append(("memory of the largest process, peak GB", show("memory/peak_gb", ".2f")))
    return rows
