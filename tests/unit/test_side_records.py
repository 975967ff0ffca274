"""Lines beside the journal: once for each kind and step, and whole after a crash."""

from __future__ import annotations

import json
from pathlib import Path

from flows.side_records import StepLines, layer_scales


def _lines(path: Path) -> list[tuple[str, int, dict[str, float]]]:
    return [(d["kind"], d["step"], d["values"]) for d in map(json.loads, path.read_text().splitlines())]


def test_a_line_for_each_kind_and_step_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = StepLines(path)
    lines.add("a", 1, {"x": 1})
    lines.add("b", 1, {"x": 0})
    again = StepLines(path)
    again.add("a", 1, {"x": 5})
    again.add("a", 2, {"y": 0.5})
    assert _lines(path) == [("a", 1, {"x": 1}), ("b", 1, {"x": 0}), ("a", 2, {"y": 0.5})]


def test_a_line_that_a_crash_cut_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    StepLines(path).add("a", 1, {"x": 1})
    whole = path.read_text()
    path.write_text(whole + '{"kind": "a", "step": 2, "val')
    again = StepLines(path)
    assert path.read_text() == whole
    again.add("a", 2, {"x": 2})
    assert [step for _, step, _ in _lines(path)] == [1, 2]


def test_no_file_for_no_values(tmp_path: Path) -> None:
    StepLines(tmp_path / "lines.jsonl").add("step", 1, layer_scales({}))
    assert not (tmp_path / "lines.jsonl").exists()


def test_scales_of_heads_are_one_number_a_layer() -> None:
    scales = {(1, "k"): (0.5, 0.75), (0, "q"): 0.25}
    assert layer_scales(scales) == {"layer 0 q": 0.25, "layer 1 k": 0.75}
