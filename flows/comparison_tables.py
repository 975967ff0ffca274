"""A comparison in words: rows of its tables, and the whole as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from flows.comparison import Comparison, RunFigures, VariantSummary, corridor_words
from tasks.numerics.comparison import Interval

Rows = list[dict[str, str]]

_MARK = {"pass": "pass", "fail": "FAIL", "not enough data": "not enough data", "not judged": "not judged"}


def recipe_rows(comparison: Comparison) -> Rows:
    """One row a recipe: verdict, accuracy, mismatch, speed, cost."""
    return [_recipe(variant) for variant in comparison.variants]


def _recipe(variant: VariantSummary) -> dict[str, str]:
    known = [value for value in variant.mismatch_medians if value is not None]
    return {
        "recipe": variant.variant,
        "verdict": _MARK[variant.verdict],
        "seeds": str(len(variant.seeds)),
        "accuracy": interval(variant.accuracy, ".3f"),
        "against baseline": interval(variant.difference, "+.3f"),
        "on BF16 rollout": number(variant.accuracy_bf16, ".3f"),
        "mismatch": number(max(known) if known else None, ".5f"),
        "step s": number(variant.phases["step"], ".3f"),
        "rollout tokens/s": number(variant.rollout_tokens_per_s, ",.0f"),
        "train tokens/s": number(variant.train_tokens_per_s, ",.0f"),
        "rollout speed-up": interval(variant.rollout_speedup, ".3f"),
        "step speed-up": interval(variant.step_speedup, ".3f"),
        "GPU-seconds": number(variant.gpu_seconds, ",.0f"),
        "cost USD": number(variant.cost_usd, ",.4f"),
    }


def phase_rows(comparison: Comparison) -> Rows:
    """Median seconds of each phase."""
    return [
        {"recipe": variant.variant} | {phase: number(value, ".3f") for phase, value in variant.phases.items()}
        for variant in comparison.variants
    ]


def run_rows(comparison: Comparison) -> Rows:
    """One row a run."""
    return [_run(figures) for figures in comparison.runs]


def _run(figures: RunFigures) -> dict[str, str]:
    return {
        "run": figures.name,
        "recipe": figures.variant,
        "seed": str(figures.seed),
        "status": figures.status,
        "accuracy, first": number(figures.accuracy_first, ".3f"),
        "last": number(figures.accuracy_last, ".3f"),
        "mismatch": number(figures.mismatch_median, ".5f"),
        "rollout speed-up": number(figures.rollout_speedup, ".3f"),
        "step speed-up": number(figures.step_speedup, ".3f"),
        "measured s": number(figures.spent_s, ",.1f"),
        "GPU-seconds": number(figures.gpu_seconds, ",.0f"),
        "cost USD": number(figures.cost_usd, ",.4f"),
    }


def judgement_rows(comparison: Comparison) -> Rows:
    """One row for each gate of each recipe."""
    return [
        {"recipe": variant.variant, "gate": j.gate, "outcome": _MARK[j.outcome], "why": j.reason}
        for variant in comparison.variants
        for j in variant.judgements
    ]


def corridor_rows(comparison: Comparison) -> Rows:
    """One row for each check of a corridor."""
    return [
        {
            "recipe": name,
            "metric": check.metric,
            "outcome": "FAIL" if check.failed else "pass" if check.place == "inside" else check.place,
            "value": corridor_words(check),
        }
        for name, checks in comparison.corridors.items()
        for check in checks
    ]


def lost_rows(comparison: Comparison) -> Rows:
    """Runs that did not finish."""
    return [{"run": name, "status": status} for name, status in comparison.lost.items()]


def headline(comparison: Comparison) -> str:
    """The sweep in a sentence."""
    verdicts = ", ".join(f"{variant.variant} {_MARK[variant.verdict]}" for variant in comparison.variants) or "no run"
    lost = f"; runs that did not finish: {len(comparison.lost)}" if comparison.lost else ""
    left = f"; failed checks of the corridor: {len(comparison.regressions)}" if comparison.regressions else ""
    return f"{verdicts}{lost}{left}"


def markdown(comparison: Comparison, source: str) -> str:
    """The whole comparison without pictures; `source`: of the prices."""
    parts = [
        ("Recipes", recipe_rows(comparison)),
        ("Gates", judgement_rows(comparison)),
        ("Regression corridor", corridor_rows(comparison)),
        ("Phases, median seconds", phase_rows(comparison)),
        ("Runs", run_rows(comparison)),
        ("Runs that did not finish", lost_rows(comparison)),
    ]
    lines = [f"# Sweep {comparison.sweep_id}", "", headline(comparison), ""]
    lines += [f"- {note}" for note in comparison.notes]
    for title, rows in parts:
        if rows:
            lines += ["", f"## {title}", "", *_table(rows)]
    return "\n".join([*lines, "", *(f"{line}\n" for line in reading(comparison, source))])


def reading(comparison: Comparison, source: str) -> list[str]:
    """How the figures were made."""
    return [
        f"Brackets are confidence intervals. Accuracy: bootstrap over seeds, then prompts (Student's t over seeds "
        f"where runs have no answers by prompt); difference: {comparison.baseline} of the same seeds and prompts. "
        "Speed-ups: ratio of medians over steps to the run of the same seed; geometric mean, Student's t over seeds.",
        "Mismatch: token_mult_prob_error, median over steps, of the worst seed. GPU-seconds and cost: measured phases "
        f"times the hardware that a run held, without the start of processes. Prices: {source}.",
    ]


def _table(rows: Rows) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(list(rows[0])), "|" + "---|" * len(rows[0]), *(line(list(row.values())) for row in rows)]


def interval(value: Interval | None, form: str) -> str:
    """Estimate and bounds; `-` for none, and the estimate alone where there are no bounds."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return format(value.value, form)
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def number(value: float | None, form: str) -> str:
    """A formatted number, `-` for none."""
    return "-" if value is None else format(value, form)
