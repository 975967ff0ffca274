"""Records beside the journal that are no metrics: one line for each evaluation and for the scales of each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tasks.numerics.kv_scales import Scales, scale_values, slot_name

EVAL_RESULTS = "eval_results.jsonl"
"""Lines of kind `eval/accuracy` or `eval/accuracy_bf16`: 0 or 1 for each eval prompt by its id."""

CALIBRATION_SCALES = "calibration_scales.jsonl"
"""Lines of kind `step`: the FP8 scales of Q, K and V with which the step's rollout ran, by `layer N q`, `k`, `v`."""


class StepLines:
    """Appends one JSON line `{"kind", "step", "values"}`, once for each kind and step; no line for no values.

    A line that a crash cut short is removed when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = {(found["kind"], found["step"]) for found in map(json.loads, whole_lines(path))}

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write the line unless it is there, as after a resume that computes a step again."""
        if not values or (kind, step) in self._known:
            return
        line = {"kind": kind, "step": step, "values": dict(values)}
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(line) + "\n")
        self._known.add((kind, step))


def layer_scales(scales: Scales) -> dict[str, float]:
    """One number for each layer and each of q, k, v: with a scale for each head, the largest."""
    return {slot_name(key): max(scale_values(scale)) for key, scale in sorted(scales.items())}


def whole_lines(path: Path) -> list[str]:
    """Lines of a JSON-lines file, none where there is no file; a line that a crash cut short is removed from it."""
    if not path.exists():
        return []
    # Texts may hold any separator that splitlines() knows; JSON leaves only the line feed to the file.
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines
