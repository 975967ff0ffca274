"""The final report of one run, made from its journal alone: Markdown and a PNG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flows.console import closing_rows
from flows.record import PHASES
from infra.journal import Entry, Journal

_CPU_NOTE = """
## How to read this on CPU

Both engines ran on the CPU in PyTorch and share one quantiser, so the mismatch of recipes that compute in
FP8 on both sides is a lower bound: kernels of different engines disagree more. FP8 products are emulated
(quantise, decode, multiply), so times say nothing about the speed of FP8 on a GPU.
"""


def _series(entries: Sequence[Entry], kind: str, key: str) -> list[tuple[int, float]]:
    found = [(e.step, e.values[key]) for e in entries if e.kind == kind and key in e.values]
    return [(step, float(value)) for step, value in found if isinstance(value, int | float)]


def _median(entries: Sequence[Entry], key: str) -> float | None:
    values = [value for _, value in _series(entries, "step", key)]
    return statistics.median(values) if values else None


def summarize(journal: Journal) -> dict[str, float | None]:
    """The closing figures: accuracy first, last and gain, mismatch median and max, median phase times."""
    entries = journal.entries()
    accuracy = _series(entries, "eval", "eval/accuracy")
    mismatch = [value for _, value in _series(entries, "step", "mismatch/token_mult_prob_error")]
    bf16 = _series(entries, "final", "eval/accuracy_bf16")
    peaks = [value for _, value in _series(entries, "step", "memory/peak_gb")]
    summary: dict[str, float | None] = {
        "accuracy_first": accuracy[0][1] if accuracy else None,
        "accuracy_last": accuracy[-1][1] if accuracy else None,
        "gain": accuracy[-1][1] - accuracy[0][1] if accuracy else None,
        "accuracy_bf16": bf16[-1][1] if bf16 else None,
        "mismatch_median": statistics.median(mismatch) if mismatch else None,
        "mismatch_max": max(mismatch) if mismatch else None,
        "rejected_median": _median(entries, "importance/rejected_fraction"),
        "memory/peak_gb": max(peaks) if peaks else None,
    }
    names = ["time/step_s", *(f"time/{phase}_s" for phase in PHASES)]
    return summary | {name: _median(entries, name) for name in names}


def write_report(journal: Journal, folder: Path, title: str, facts: Mapping[str, str]) -> tuple[Path, Path]:
    """Write `report.md` and `report.png`; returns both paths."""
    entries, summary = journal.entries(), summarize(journal)
    lines = [
        f"# {title}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in facts.items()),
    ]
    lines += ["", "## Result", "", "| | value |", "|---|---:|"]
    lines += [f"| {label.strip()} | {value} |" for label, value in closing_rows(summary)]
    lines += ["", "## Evaluation", "", "| step | greedy accuracy |", "|---:|---:|"]
    lines += [f"| {step} | {value:.4f} |" for step, value in _series(entries, "eval", "eval/accuracy")]
    lines += ["", "![accuracy, mismatch and phase times](report.png)", _CPU_NOTE]
    markdown, picture = folder / "report.md", folder / "report.png"
    markdown.write_text("\n".join(lines))
    _plot(entries, picture, title)
    return markdown, picture


def _plot(entries: Sequence[Entry], path: Path, title: str) -> None:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    accuracy, mismatch, phases = figure.subplots(1, 3)
    _lines(
        accuracy,
        {
            "eval/accuracy": _series(entries, "eval", "eval/accuracy"),
            "reward/mean": _series(entries, "step", "reward/mean"),
        },
    )
    accuracy.set_ylabel("share solved")
    _lines(mismatch, {"token_mult_prob_error": _series(entries, "step", "mismatch/token_mult_prob_error")})
    mismatch.axhline(1.0, color="grey", linewidth=0.8)
    steps = [e.step for e in entries if e.kind == "step"]
    series = [[value for _, value in _series(entries, "step", f"time/{phase}_s")] for phase in PHASES]
    phases.stackplot(steps, series, labels=PHASES)
    phases.set_ylabel("seconds")
    phases.set_xlabel("step")
    phases.legend(fontsize=7, loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, named: Mapping[str, list[tuple[int, float]]]) -> None:
    for label, points in named.items():
        axes.plot(
            [s for s, _ in points],
            [v for _, v in points],
            label=label,
            marker="o" if len(points) < 12 else None,
        )
    axes.set_xlabel("step")
    axes.legend(fontsize=8)
