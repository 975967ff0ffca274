"""The figure beside the table of recipes: accuracy and mismatch over the steps of a sweep.

    python -m tests.gpu.recipes_figure ROWS.json FIGURE.png [--sweep-id ID]

A thin line for each seed, a thick one for their mean. Runs that did not end are left out. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flows.comparison_plots import COLOURS, draw_seeds
from infra.mlflow_read import Series
from tests.gpu.recipes_table import Row, load

MISMATCH = "token_mult_prob_error"


def draw(rows: Sequence[Row]) -> Figure:
    """Two panels of the runs that ended, by recipe in the order of the rows."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    done = [row for row in rows if row.finished]
    _panel(left, done, lambda row: row.accuracy, "eval accuracy (greedy)")
    _panel(right, done, _mismatch, "token mult. prob. error")
    if done:
        left.legend(fontsize=7)
    model = ", ".join(dict.fromkeys(row.model for row in done))
    figure.suptitle(f"{model}: {len({row.seed for row in done})} seeds, mean and each")
    return figure


def _mismatch(row: Row) -> Series:
    return tuple(enumerate(row.mismatch.get(MISMATCH, ()), start=1))


def _panel(axes: Axes, rows: Sequence[Row], series_of: Callable[[Row], Series], label: str) -> None:
    for number, recipe in enumerate(dict.fromkeys(row.recipe for row in rows)):
        found = [points for row in rows if row.recipe == recipe and (points := series_of(row))]
        draw_seeds(axes, found, COLOURS[number % len(COLOURS)], recipe)
    axes.set(xlabel="step", ylabel=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figure; its format is that of the file's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--sweep-id", help="of the rows of this sweep alone")
    chosen = parser.parse_args(arguments)
    rows = [row for row in load(chosen.rows) if chosen.sweep_id in (None, row.sweep_id)]
    if not any(row.finished for row in rows):
        parser.error(f"{chosen.rows}: no run that ended among its {len(rows)} rows")
    draw(rows).savefig(chosen.figure, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
