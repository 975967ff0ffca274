"""Rows of `results/recipes.json`, and the Markdown table that they make.

    python -m tests.gpu.recipes_table FILE.json ... [--merge OUT.json] [--times ID]

Times and rates are of runs that had the GPU alone; with --times of those of sweep ID, which then has no table of its
own. Several files are pieces of the same sweeps, from machines or GPUs of their own. A row is one run, or the place of
one that was not run. Nothing here needs a GPU or MLflow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from flows.comparison_tables import interval, number
from flows.record import PHASES
from tasks.numerics.comparison import Interval, accuracy_interval, paired_difference, ratio_interval

PARITY: Final = 0.03
"""Accuracy (share of eval prompts) by which a recipe may differ from the baseline: its whole interval is within."""

GATES: Final = "0.002 / 0.003 / 0.006"
"""NeMo RL's bounds on gen_kl for FP8 runs of its 8B models, for comparison."""


@dataclass(frozen=True)
class Row:
    """One run. Accuracies are shares of the eval prompts by step, times in seconds, rates in tokens/s.

    `recipe`: name of the row in its sweep, `precision`: of its recipe. `answers`: 0 or 1 for each eval prompt at the
    end, in the order of their ids, of which `prompts` is a digest. `mismatch`: by metric and step. `phases`: medians
    over steps. `status`: FINISHED, another word of MLflow, or absent; `beside`: other runs that used the GPU meanwhile,
    with which a time says nothing; `conditions`: of machine and configuration.
    """

    model: str
    sweep_id: str
    recipe: str
    precision: str
    correction: str
    seed: int
    status: str
    accuracy: tuple[tuple[int, float], ...] = ()
    accuracy_bf16: float | None = None
    answers: str = ""
    prompts: str = ""
    mismatch: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    rollout_tokens_per_s: float | None = None
    train_tokens_per_s: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    beside: int = 0
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.sweep_id, self.recipe, self.seed


def load(path: Path) -> list[Row]:
    """Rows of a file; none where there is no file."""
    return [Row(**row) for row in json.loads(path.read_text())] if path.is_file() else []


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each run, the last; one that was run to the end gives way only to another such."""
    kept: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        if row.key not in kept or row.finished or not kept[row.key].finished:
            kept[row.key] = row
    return list(kept.values())


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, one a line, merged with those of an earlier call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(row)) for row in merged((*load(path), *rows)))
    path.write_text(f"[\n{lines}\n]\n")


def table(rows: Sequence[Row], baseline: str = "bf16", times: str | None = None) -> str:
    """Markdown: a table for each sweep, and what could not be run. `times`: id of a sweep whose runs are the clock."""
    sweeps: dict[str, list[Row]] = {}
    for row in rows:
        sweeps.setdefault(row.sweep_id, []).append(row)
    clock = None if times is None else sweeps.pop(times, [])
    return "\n\n".join(_sweep(members, baseline, clock) for members in sweeps.values())


def _alone(rows: Sequence[Row], clock: Sequence[Row] | None) -> list[Row]:
    """Finished runs of the models of `rows` that had the GPU to themselves: of the clock, or without one of `rows`."""
    models = {row.model for row in rows}
    candidates = rows if clock is None else clock
    return [row for row in candidates if row.finished and not row.beside and row.model in models]


def _whose_times(rows: Sequence[Row], alone: Sequence[Row]) -> list[str]:
    """A line on runs whose times count, where they are not all of `rows`."""
    if list(alone) == [row for row in rows if row.finished]:
        return []
    if not alone:
        return ["", "No run had the GPU alone: there are no times and rates."]
    seeds = ", ".join(map(str, sorted({row.seed for row in alone})))
    steps = ", ".join(sorted({str(len(row.mismatch.get("token_mult_prob_error", ()))) for row in alone}))
    timed = {row.recipe for row in alone}
    missing = [f"`{name}`" for name in dict.fromkeys(row.recipe for row in rows) if name not in timed]
    without = f" No such run: {', '.join(missing)}." if missing else ""
    return ["", f"Times and rates are of runs that had the GPU alone: seed {seeds}, {steps} steps.{without}"]


def _sweep(rows: Sequence[Row], baseline: str, clock: Sequence[Row] | None) -> str:
    model = ", ".join(dict.fromkeys(row.model for row in rows if row.finished)) or "unknown"
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    done = {name: [row for row in rows if row.recipe == name and row.finished] for name in recipes}
    alone = _alone(rows, clock)
    lines = [_line(name, members, done.get(baseline, []), baseline, alone) for name, members in done.items() if members]
    text = [f"Model {model}; gen_kl beside NeMo RL's bounds for 8B, {GATES}:"]
    if lines:
        head = list(lines[0])
        text += ["", _cells(head), "|" + "---|" * 2 + "---:|" * (len(head) - 3) + "---|"]
        text += [_cells(list(line.values())) for line in lines]
    text += _whose_times(rows, alone)
    missing = [f"{row.recipe} seed {row.seed} ({row.status})" for row in rows if not row.finished]
    if missing:
        text += ["", f"Not run to the end: {', '.join(missing)}."]
    return "\n".join(text)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pairs(rows: Sequence[Row], base: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Runs of equal seeds."""
    return [(row, other) for row in rows for other in base if row.seed == other.seed]


def _line(name: str, rows: Sequence[Row], base: Sequence[Row], baseline: str, alone: Sequence[Row]) -> dict[str, str]:
    difference = None if name == baseline else _difference(_pairs(rows, base))
    return {
        **_accuracies(name, rows),
        **_times(name, alone, baseline),
        f"accuracy - `{baseline}`": interval(difference, "+.3f"),
        "parity": "" if name == baseline else verdict(difference),
    }


def _accuracies(name: str, rows: Sequence[Row]) -> dict[str, str]:
    errors, divergence = (_medians(rows, metric) for metric in ("token_mult_prob_error", "gen_kl"))
    worst = [max(row.mismatch["token_mult_prob_error"]) for row in rows if row.mismatch.get("token_mult_prob_error")]
    return {
        "recipe": f"`{name}`",
        "correction": ", ".join(dict.fromkeys(row.correction for row in rows)),
        "seeds": str(len(rows)),
        "eval accuracy": interval(_accuracy(rows), ".3f"),
        "in BF16": number(_mean_in_bf16(rows), ".3f"),
        "mismatch, median": number(errors, ".4f"),
        "max": number(max(worst) if worst else None, ".4f"),
        "gen_kl, median": number(divergence, ".1e"),
    }


def _mean_in_bf16(rows: Sequence[Row]) -> float | None:
    """Mean accuracy of the trained weights behind a BF16 rollout engine; None unless each run has it."""
    known = [row.accuracy_bf16 for row in rows if row.accuracy_bf16 is not None]
    return statistics.fmean(known) if len(known) == len(rows) else None


def _times(name: str, alone: Sequence[Row], baseline: str) -> dict[str, str]:
    rows = [row for row in alone if row.recipe == name]
    pairs = [] if name == baseline else _pairs(rows, [row for row in alone if row.recipe == baseline])
    train = _over(rows, lambda row: row.phases.get("train"))
    return {
        "rollout tokens/s": number(_over(rows, lambda row: row.rollout_tokens_per_s), ",.0f"),
        "train ms": number(None if train is None else 1000 * train, ",.0f"),
        "sync s": number(_over(rows, lambda row: row.phases.get("sync")), ".3f"),
        "calibrate s": number(_over(rows, lambda row: row.phases.get("calibrate")), ".3f"),
        "step s": number(_over(rows, lambda row: row.phases.get("step")), ".2f"),
        "speed-up, step": interval(_speedup(pairs), ".2f"),
    }


def verdict(difference: Interval | None) -> str:
    """`parity` when the whole interval lies within +-`PARITY` and more than one seed was run, else `not resolved`."""
    if difference is None or difference.low is None or difference.high is None:
        return "not resolved"
    if difference.seeds < 2:
        return "not resolved (1 seed)"
    return "parity" if difference.low >= -PARITY and difference.high <= PARITY else "not resolved"


def _answers(rows: Sequence[Row]) -> list[list[int]]:
    return [list(map(int, row.answers)) for row in rows]


def _accuracy(rows: Sequence[Row]) -> Interval | None:
    same = {row.prompts for row in rows}
    return accuracy_interval(_answers(rows)) if len(same) == 1 and "" not in same else None


def _difference(pairs: Sequence[tuple[Row, Row]]) -> Interval | None:
    same = {row.prompts for pair in pairs for row in pair}
    if len(same) != 1 or "" in same:
        return None
    return paired_difference(_answers([ours for ours, _ in pairs]), _answers([theirs for _, theirs in pairs]))


def _speedup(pairs: Sequence[tuple[Row, Row]]) -> Interval | None:
    """Geometric mean over seeds of the ratio of median steps; above 1 is faster."""
    times = [(ours.phases.get("step"), theirs.phases.get("step")) for ours, theirs in pairs]
    ratios = [theirs / ours for ours, theirs in times if ours and theirs]
    return ratio_interval(ratios) if ratios else None


def _medians(rows: Sequence[Row], metric: str) -> float | None:
    return _over(rows, lambda row: statistics.median(row.mismatch[metric]) if row.mismatch.get(metric) else None)


def _over(rows: Sequence[Row], figure: Callable[[Row], float | None]) -> float | None:
    """Median over seeds of a figure of each run."""
    known = [value for row in rows if (value := figure(row)) is not None]
    return statistics.median(known) if known else None


PHASE_METRICS: Final = {name: f"time/{name}_s" for name in (*PHASES, "step", "eval", "checkpoint")}
"""Metrics by the names that `Row.phases` has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of all files' rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--times", metavar="ID", help="sweep whose runs had the GPU alone")
    parser.add_argument("--merge", type=Path, help="write the rows of all files here, too")
    chosen = parser.parse_args(arguments)
    for path in chosen.files:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    rows = merged(row for path in chosen.files for row in load(path))
    if chosen.merge is not None:
        save(chosen.merge, rows)
    if chosen.times is not None and all(row.sweep_id != chosen.times for row in rows):
        known = ", ".join(dict.fromkeys(row.sweep_id for row in rows))
        parser.error(f"--times {chosen.times}: no such sweep; there are {known}")
    print(table(rows, times=chosen.times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
