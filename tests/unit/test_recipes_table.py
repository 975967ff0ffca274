"""The table of the recipes on a GPU: figures from rows, pairs by seed, and what may be called parity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.numerics.comparison import Interval, paired_difference
from tests.gpu.recipes_figure import draw
from tests.gpu.recipes_figure import main as figure_main
from tests.gpu.recipes_table import Row, load, main, save, table, verdict

ANSWERS = {"bf16": ("1110", "1100"), "fp8_e2e": ("1110", "1100"), "bare": ("0000", "1000")}


def _row(recipe: str, seed: int, **changes: object) -> Row:
    row = Row(
        model="small",
        sweep_id="s",
        recipe=recipe,
        precision="fp8_rollout" if recipe == "bare" else recipe,
        correction="none" if recipe == "bare" else "token_truncation",
        seed=seed,
        status="FINISHED",
        accuracy=((0, 0.25), (10, 0.75)),
        answers=ANSWERS[recipe][seed] * 50,
        prompts="digest",
        mismatch={"token_mult_prob_error": (1.01, 1.03, 1.02), "gen_kl": (0.001, 0.002, 0.009)},
        phases={"train": 0.5, "sync": 0.25, "calibrate": 0.0, "step": 2.0 if recipe == "bf16" else 1.0 + seed},
        rollout_tokens_per_s=1000.0 + seed,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def _cells(text: str, recipe: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (lines[0], next(line for line in lines if line.startswith(f"| `{recipe}` |")))
    )
    return dict(zip(head, row, strict=True))


def test_a_row_has_its_figures_and_its_difference_to_the_baseline() -> None:
    rows = [_row(recipe, seed) for recipe in ("bf16", "fp8_e2e", "bare") for seed in (0, 1)]
    text = table(rows)
    bf16, fp8, bare = (_cells(text, recipe) for recipe in ("bf16", "fp8_e2e", "bare"))
    assert bf16["parity"] == "" and bf16["accuracy - `bf16`"] == "-" and bf16["speed-up, step"] == "-"
    assert bf16["eval accuracy"].startswith("0.625 [") and bf16["train ms"] == "500"
    assert (fp8["mismatch, median"], fp8["max"], fp8["gen_kl, median"]) == ("1.0200", "1.0300", "2.0e-03")
    assert (fp8["rollout tokens/s"], fp8["sync s"], fp8["calibrate s"], fp8["step s"]) == (
        "1,000",
        "0.250",
        "0.000",
        "1.50",
    )
    # 2 / 1 and 2 / 2: their geometric mean.
    assert fp8["speed-up, step"].startswith("1.41 [") and fp8["seeds"] == "2"
    assert fp8["parity"] == "parity" and fp8["accuracy - `bf16`"] == "+0.000 [+0.000, +0.000]"
    expected = paired_difference(
        [[int(a) for a in ANSWERS["bare"][s] * 50] for s in (0, 1)],
        [[int(a) for a in ANSWERS["bf16"][s] * 50] for s in (0, 1)],
    )
    assert bare["accuracy - `bf16`"] == f"{expected.value:+.3f} [{expected.low:+.3f}, {expected.high:+.3f}]"
    assert (bare["correction"], bare["parity"]) == ("none", "not resolved")
    assert "0.002 / 0.003 / 0.006" in text


def test_the_accuracy_in_bf16_is_the_mean_over_runs_that_all_have_it() -> None:
    rows = [_row("bf16", 0, accuracy_bf16=0.5), _row("bf16", 1, accuracy_bf16=0.7), _row("fp8_e2e", 0)]
    text = table([*rows, _row("fp8_e2e", 1, accuracy_bf16=0.6)])
    assert _cells(text, "bf16")["in BF16"] == "0.600" and _cells(text, "fp8_e2e")["in BF16"] == "-"


def test_what_was_not_run_is_listed_and_in_no_figure() -> None:
    rows = [_row("bf16", 0), _row("bf16", 1), _row("fp8_e2e", 0), _row("fp8_e2e", 1, status="FAILED", answers="")]
    rows.append(Row("small", "s", "bare", "unknown", "unknown", 0, "absent"))
    text = table(rows)
    assert "Not run to the end: fp8_e2e seed 1 (FAILED), bare seed 0 (absent)." in text
    assert "`bare`" not in text
    fp8 = _cells(text, "fp8_e2e")
    assert fp8["seeds"] == "1" and fp8["parity"] == "not resolved (1 seed)" and fp8["speed-up, step"] == "2.00"


def test_a_run_beside_others_counts_for_accuracy_and_not_for_speed() -> None:
    rows = [_row(recipe, seed, beside=seed) for recipe in ("bf16", "fp8_e2e") for seed in (0, 1)]
    text = table(rows)
    fp8 = _cells(text, "fp8_e2e")
    assert (fp8["seeds"], fp8["parity"]) == ("2", "parity")
    # Seed 0 alone: 2 s in BF16 and 1 s in FP8.
    assert (fp8["step s"], fp8["speed-up, step"], fp8["rollout tokens/s"]) == ("1.00", "2.00", "1,000")
    assert "Times and rates are of runs that had the GPU alone: seed 0, 3 steps." in text
    assert "No such run" not in text
    fp8_shared = table([replace(row, beside=int(row.recipe != "bf16")) for row in rows])
    assert "alone: seed 0, 1, 3 steps. No such run: `fp8_e2e`." in fp8_shared
    shared = table([replace(row, beside=1) for row in rows])
    assert _cells(shared, "fp8_e2e")["step s"] == "-" and "No run had the GPU alone" in shared
    assert "the GPU alone" not in table([replace(row, beside=0) for row in rows])


def test_times_can_be_those_of_another_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row(recipe, seed, beside=1) for recipe in ("bf16", "fp8_e2e") for seed in (0, 1)]
    clock = [_row(recipe, 1, sweep_id="clock", phases={"step": s}) for recipe, s in (("bf16", 3.0), ("fp8_e2e", 2.0))]
    foreign = _row("fp8_e2e", 0, sweep_id="clock", model="large", phases={"step": 9.0})
    save(tmp_path / "rows.json", [*rows, *clock, foreign])
    assert main([str(tmp_path / "rows.json"), "--times", "clock"]) == 0
    text = capsys.readouterr().out
    fp8 = _cells(text, "fp8_e2e")
    assert (fp8["seeds"], fp8["step s"], fp8["speed-up, step"], fp8["train ms"]) == ("2", "2.00", "1.50", "-")
    assert text.count("Model small") == 1 and "alone: seed 1, 3 steps." in text
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.json"), "--times", "watch"])
    assert "--times watch: no such sweep; there are s, clock" in capsys.readouterr().err


def test_other_prompts_are_no_pair() -> None:
    text = table([_row("bf16", 0), _row("fp8_e2e", 0, prompts="another")])
    assert _cells(text, "fp8_e2e")["accuracy - `bf16`"] == "-"
    assert _cells(text, "fp8_e2e")["parity"] == "not resolved"


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (None, "not resolved"),
        (Interval(0.0, -0.03, 0.03, 3), "parity"),
        (Interval(0.0, -0.031, 0.02, 3), "not resolved"),
        (Interval(0.02, 0.01, 0.031, 3), "not resolved"),
        (Interval(-0.1, -0.12, -0.08, 3), "not resolved"),
        (Interval(0.0, None, None, 1), "not resolved"),
        (Interval(0.0, -0.01, 0.01, 1), "not resolved (1 seed)"),
    ],
)
def test_parity_is_claimed_of_whole_intervals_alone(difference: Interval | None, said: str) -> None:
    assert verdict(difference) == said


def test_a_later_piece_replaces_what_it_knows_better(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "recipes.json"
    save(path, [_row("bf16", 0), Row("unknown", "s", "fp8_e2e", "unknown", "unknown", 0, "absent")])
    save(path, [_row("fp8_e2e", 0), _row("bf16", 0, sweep_id="other")])
    rows = load(path)
    assert [(row.sweep_id, row.recipe, row.status) for row in rows] == [
        ("s", "bf16", "FINISHED"),
        ("s", "fp8_e2e", "FINISHED"),
        ("other", "bf16", "FINISHED"),
    ]
    assert table(rows[:2]) == table([_row("bf16", 0), _row("fp8_e2e", 0)])


def test_pieces_of_several_files_make_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A place of a run that another file has counts nothing, wherever it stands."""
    first, second, out = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "merged.json"
    absent = _row("bf16", 1, status="absent", accuracy=(), answers="")
    save(first, [_row("bf16", 0), absent])
    save(second, [_row("bf16", 1), _row("bf16", 0, status="absent", answers="")])
    assert main([str(first), str(second), "--merge", str(out)]) == 0
    assert [(row.seed, row.status) for row in load(out)] == [(0, "FINISHED"), (1, "FINISHED")]
    shown = capsys.readouterr().out
    assert _cells(shown, "bf16")["seeds"] == "2" and "Not run" not in shown
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "none.json")])
    assert caught.value.code == 2


def test_the_figure_has_a_line_for_each_seed_and_for_each_mean(tmp_path: Path) -> None:
    rows = [_row(recipe, seed) for recipe in ("bf16", "bare") for seed in (0, 1)]
    accuracy, mismatch = draw([*rows, _row("fp8_e2e", 0, status="FAILED")]).axes
    assert [line.get_label() for line in accuracy.lines if not str(line.get_label()).startswith("_")] == [
        "bf16",
        "bare",
    ]
    assert len(accuracy.lines) == len(mismatch.lines) == 6
    assert [list(line.get_xydata()[0]) for line in mismatch.lines] == [[1.0, 1.01]] * 6  # type: ignore[index]
    save(tmp_path / "rows.json", rows)
    assert figure_main([str(tmp_path / "rows.json"), str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        figure_main([str(tmp_path / "rows.json"), str(tmp_path / "figure.png"), "--sweep-id", "other"])
