"""Pictures of a comparison, as SVG or PNG bytes; nothing is written and no window opened."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flows.comparison import Comparison, VariantSummary
from flows.record import PHASES
from infra.mlflow_read import Series

COLOURS = ("#4472c4", "#ed7d31", "#70ad47", "#7030a0", "#c00000", "#00b0b9", "#7f7f7f", "#bf9000")


def overview(comparison: Comparison, form: str = "svg") -> bytes:
    """Accuracy, mismatch and phase times side by side: the picture of the artifact."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    accuracy, mismatch, phases = figure.subplots(1, 3)
    _curves(accuracy, comparison, "accuracy", "eval accuracy")
    _curves(mismatch, comparison, "mismatch", "token mult. prob. error")
    _phases(phases, comparison.variants)
    figure.suptitle(f"sweep {comparison.sweep_id}")
    return _bytes(figure, form)


def curves(comparison: Comparison) -> bytes:
    """Accuracy and reward over steps: a thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, comparison, "accuracy", "eval accuracy")
    _curves(right, comparison, "reward", "mean reward")
    return _bytes(figure, "svg")


def mismatch(comparison: Comparison) -> bytes:
    """Mismatch over steps and by position in the response."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, comparison, "mismatch", "token mult. prob. error")
    names = sorted({name for variant in comparison.variants for name, _ in variant.by_position})
    place = {name: number for number, name in enumerate(names)}
    for variant, colour in _coloured(comparison):
        points = variant.by_position
        x, y = [place[name] for name, _ in points], [value for _, value in points]
        right.plot(x, y, marker="o", color=colour, label=variant.variant)
    right.set_xticks(range(len(names)), [_span(name) for name in names], rotation=45, fontsize=7)
    right.set(xlabel="position in the response, tokens", ylabel="mean |d|, nats")
    return _bytes(figure, "svg")


def times(comparison: Comparison) -> bytes:
    """Median seconds of each phase, and rollout throughput."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _phases(left, comparison.variants)
    for number, (variant, colour) in enumerate(_coloured(comparison)):
        right.barh(number, variant.rollout_tokens_per_s or 0.0, color=colour)
    right.set_yticks(range(len(comparison.variants)), [variant.variant for variant in comparison.variants], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("rollout tokens/s (median)")
    return _bytes(figure, "svg")


def calibration(variant: VariantSummary) -> bytes:
    """Scales of Q, K and V over steps, a line for each layer, of the first seed."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, part in zip(figure.subplots(1, 3), "qkv", strict=True):
        lines = {slot: points for slot, points in variant.curves.scales.items() if slot.split()[2] == part}
        for slot in sorted(lines, key=lambda name: int(name.split()[1])):
            axes.plot([s for s, _ in lines[slot]], [v for _, v in lines[slot]], label=f"layer {slot.split()[1]}")
        axes.set(title=f"scale of {part.upper()}", xlabel="step")
        if 0 < len(lines) <= 8:
            axes.legend(fontsize=7)
    return _bytes(figure, "svg")


def _curves(axes: Axes, comparison: Comparison, which: str, label: str) -> None:
    for variant, colour in _coloured(comparison):
        by_seed: Mapping[int, Series] = getattr(variant.curves, which)
        draw_seeds(axes, list(by_seed.values()), colour, variant.variant)
    axes.set(xlabel="step", ylabel=label)
    if comparison.variants:
        axes.legend(fontsize=7)


def draw_seeds(axes: Axes, by_seed: Sequence[Series], colour: str, label: str) -> None:
    """A thin line for each seed, a thick one for their mean, which has the label."""
    for series in by_seed:
        axes.plot([s for s, _ in series], [v for _, v in series], color=colour, linewidth=0.7, alpha=0.4)
    mean = _mean(by_seed)
    axes.plot([s for s, _ in mean], [v for _, v in mean], color=colour, linewidth=2, label=label)


def _mean(series: Sequence[Series]) -> Series:
    """At the steps that all seeds have."""
    if not series:
        return ()
    common = set.intersection(*({step for step, _ in points} for points in series))
    return tuple((step, sum(dict(points)[step] for points in series) / len(series)) for step in sorted(common))


def _phases(axes: Axes, variants: Sequence[VariantSummary]) -> None:
    for number, variant in enumerate(variants):
        left = 0.0
        for phase, colour in zip(PHASES, COLOURS, strict=False):
            seconds = variant.phases[phase] or 0.0
            axes.barh(number, seconds, left=left, color=colour, label=phase if number == 0 else None)
            left += seconds
    axes.set_yticks(range(len(variants)), [variant.variant for variant in variants], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (medians)")
    if variants:
        axes.legend(fontsize=7, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _coloured(comparison: Comparison) -> list[tuple[VariantSummary, str]]:
    return [(variant, COLOURS[number % len(COLOURS)]) for number, variant in enumerate(comparison.variants)]


def _span(name: str) -> str:
    first, _, last = name.partition("-")
    return f"{int(first)}+" if last == "up" else f"{int(first)}-{int(last)}"


def _bytes(figure: Figure, form: str) -> bytes:
    stream = io.BytesIO()
    # Without the date, the same comparison gives nearly the same bytes.
    figure.savefig(stream, format=form, dpi=100, metadata={"Date": None} if form == "svg" else None)
    return stream.getvalue()
