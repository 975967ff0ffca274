"""The report of a sweep as one HTML page that needs no network: tables, and pictures inside it."""

from __future__ import annotations

import base64
from html import escape

from flows import comparison_plots as plots
from flows.comparison import Comparison
from flows.comparison_tables import (
    Rows,
    corridor_rows,
    headline,
    judgement_rows,
    lost_rows,
    phase_rows,
    reading,
    recipe_rows,
    run_rows,
)

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1600px; padding: 0 1em; color: #1c2430; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin: 2em 0 .6em; border-bottom: 1px solid #d5dae1; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9em; }
th, td { padding: .3em .6em; border-bottom: 1px solid #e3e7ec; text-align: left; white-space: nowrap; }
td.long { white-space: normal; min-width: 24em; }
th { background: #f3f5f8; white-space: normal; vertical-align: bottom; }
td.pass { color: #1b7a36; font-weight: 600; } td.fail { color: #b3261e; font-weight: 600; }
td.open { color: #8a5a00; font-weight: 600; }
img { max-width: 100%; }
p.note { color: #56606e; font-size: .9em; }
"""
_CLASSES = {
    "pass": "pass",
    "FAIL": "fail",
    "FINISHED": "pass",
    "FAILED": "fail",
    "KILLED": "fail",
    "absent": "fail",
    "not enough data": "open",
    "not enough history": "open",
}


def render(comparison: Comparison, source: str) -> str:
    """The page; `source`: where the prices come from."""
    variants = comparison.variants
    calibrated = [variant for variant in variants if variant.curves.scales]
    parts = [
        f"<h1>Sweep {escape(comparison.sweep_id)}</h1><p>{escape(headline(comparison))}</p>",
        "".join(f"<p class=note>{escape(note)}</p>" for note in comparison.notes),
        _section("Recipes", _table(recipe_rows(comparison))),
        _section("Gates", _table(judgement_rows(comparison))),
        _section("Regression corridor", _table(corridor_rows(comparison))),
        _section("Runs that did not finish", _table(lost_rows(comparison))),
    ]
    if variants:
        parts += [
            _section("Accuracy and reward", _picture(plots.curves(comparison), "accuracy and reward over steps")),
            _section("Mismatch", _picture(plots.mismatch(comparison), "mismatch over steps and by position")),
            _section("Time", _picture(plots.times(comparison), "phase times and throughput")),
            _table(phase_rows(comparison)),
        ]
    parts += [
        _section(
            f"Calibration of {variant.variant}, seed {variant.seeds[0]}",
            _picture(plots.calibration(variant), f"scales of Q, K and V over steps, {variant.variant}"),
        )
        for variant in calibrated
    ]
    parts.append(_section("Runs", _table(run_rows(comparison))))
    parts += [f"<p class=note>{escape(line)}</p>" for line in reading(comparison, source)]
    title = escape(f"fp8-grpo sweep {comparison.sweep_id}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _table(rows: Rows) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(_cell(text) for text in row.values())}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    kind = _CLASSES.get(text, "long" if len(text) > 60 else "")
    return f"<td class={kind}>{escape(text)}</td>" if kind else f"<td>{escape(text)}</td>"


def _picture(svg: bytes, alt: str) -> str:
    """As an image of its own: names inside two inline drawings would meet."""
    data = base64.b64encode(svg).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
