"""Speed of the Megatron trainer on one GPU, BF16 beside FP8, and the cost of its calibration.

    python -m tests.gpu.megatron_step STEP.json CALIBRATION.json [LAYERS]

Layers of the Qwen3-8B shape with random weights. BF16 and FP8 run in turn, each twice in processes of its own; every
figure is the median over repeats, the ratio is of one run of this program. Prints all rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infra.device import device_facts
from infra.provenance import versions
from tasks.engines.protocols import TokenRows
from tasks.numerics.kv_scales import Scales
from tests.gpu.megatron_bench import build, layers_of_8b, random_batch, save_random, spread, write

RECIPES = ("bf16", "fp8_e2e_kv")
TOKENS, LAYERS, ROUNDS, WARM_UP, REPEATS = 16384, 8, 2, 2, 6
PACKS = {"16 x 1024": [1024] * 16, "2 x 8192": [8192] * 2}
ROW, STEPS = 1024, (128, 512)
MEASURED = {
    128: ((128, None), (32, None), (16, None), (8, None), (4, None), (16, 256), (8, 256), (4, 256)),
    512: ((512, None), (64, None), (32, None), (16, None), (8, None), (16, 256)),
}
"""Of a step with so many sequences: sequences, and tokens of each, that a calibration looks at."""


def seconds(call: Callable[[], object], warm_up: int = WARM_UP, repeats: int = REPEATS) -> float:
    """Median of GPU work and the host's part of it, seconds."""
    times = []
    for number in range(warm_up + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(folder: Path, recipe: str, calibration: bool) -> list[dict[str, Any]]:
    """All rows of one process."""
    size = {"algorithm.prompts_per_step": str(STEPS[0] // 8), "algorithm.group_size": "8"}
    overrides = [f"trainer.tokens_per_micro_batch={TOKENS}", *(f"{key}={value}" for key, value in size.items())]
    _, trainer = build(folder, recipe, *overrides)
    rows = [row for name, lengths in PACKS.items() for row in _passes(trainer, name, lengths)]
    for sequences in STEPS if calibration else STEPS[:1]:
        rows += _step(trainer, recipe, sequences, calibration)
    rows.append({"recipe": recipe, "what": "optimiser, all weights", "seconds": _optimizer_s(trainer)})
    rows.append({"recipe": recipe, "what": "peak memory, GB", "gb": torch.cuda.max_memory_allocated() / 1e9})
    return rows


def _step(trainer: Any, recipe: str, sequences: int, calibration: bool) -> list[dict[str, Any]]:
    """Scores and an update of so many sequences, then what calibrations of some of them cost beside both."""
    batch = random_batch([ROW] * sequences, trainer._policy.model.plan.shape.vocabulary)
    scored = trainer.score(batch)
    score_s = seconds(lambda: trainer.score(batch), 0, 2)
    train_s = seconds(lambda: trainer.train(batch, scored.logprobs, spread(sequences)), int(sequences == STEPS[0]), 2)
    common = {"recipe": recipe, "rows": f"{sequences} x {ROW}", "tokens": sequences * ROW}
    found = [common | {"what": "score", "seconds": score_s}, common | {"what": "train", "seconds": train_s}]
    return found + (_calibrations(trainer, batch.rows(), score_s + train_s, common) if calibration else [])


def _optimizer_s(trainer: Any) -> float:
    """Norm, clipping, AdamW and the new compute copy of every weight, from gradients that are there."""
    optimizer = trainer._optimizer
    gradients = {name: torch.randn_like(weight) for name, weight in optimizer.weights().items()}

    def update() -> None:
        optimizer._gradients._sums = dict(gradients)
        optimizer.step()

    return seconds(update, 2, 5)


def _passes(trainer: Any, name: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Forward and backward of the layers alone, and with log-probabilities and their gradient."""
    policy = trainer._policy
    batch = random_batch(lengths, policy.model.plan.shape.vocabulary)
    index = torch.arange(len(lengths))
    from tasks.engines.megatron_passes import PackedPass

    held = PackedPass(policy.passes, batch.rows(), index)
    gradient = torch.randn(held.tokens.shape[1], 1, policy.model.plan.shape.hidden, device="cuda", dtype=torch.bfloat16)

    def layers() -> None:
        # As in the first micro-batch of an update: weights are quantised anew.
        policy.weights_changed()
        policy.hidden(held).backward(gradient)
        trainer._optimizer._gradients.take()

    def whole() -> None:
        policy.weights_changed()
        logprobs, _ = policy.evaluate(batch, index, batch.response_mask(), False)
        logprobs.sum().backward()
        trainer._optimizer._gradients.take()

    @torch.no_grad()
    def forward() -> None:
        policy.hidden(held)

    common = {"recipe": trainer._spec.recipe.name, "rows": name, "tokens": sum(lengths)}

    def step() -> None:
        # Of the layers and the embedding, whose gradient comes with theirs; the output layer's has none.
        policy.weights_changed()
        policy.hidden(held).backward(gradient)
        trainer._optimizer.step()

    def later() -> None:
        policy.hidden(held).backward(gradient)
        trainer._optimizer._gradients.take()

    figures = {
        "layers, forward + backward, weights quantised before": later,
        "layers, forward": forward,
        "layers, forward + backward": layers,
        "layers, forward + backward + optimiser": step,
        "whole, forward + backward": whole,
    }
    return [common | {"what": what, "seconds": seconds(call)} for what, call in figures.items()]


def _calibrations(trainer: Any, rows: TokenRows, step_s: float, common: dict[str, Any]) -> list[dict[str, Any]]:
    found, whole = [], {}
    for count, tokens in MEASURED[rows.tokens.shape[0]]:
        limit = trainer._spec.recipe.calibration.model_copy(update={"max_tokens_per_sequence": tokens})
        spec = replace(trainer._spec, recipe=trainer._spec.recipe.model_copy(update={"calibration": limit}))
        trainer._spec = spec
        chosen = torch.arange(count) * rows.tokens.shape[0] // count
        part = TokenRows(rows.tokens[chosen], rows.lengths[chosen])
        repeats = (1, 5) if count < STEPS[0] else (0, 1)
        spent = seconds(lambda part=part: trainer.calibrate(part), *repeats)  # type: ignore[misc]
        scales = trainer.report().scales
        whole = whole or scales
        found.append(
            common
            | {"what": "calibration", "sequences": count, "tokens_per_sequence": tokens}
            | {"seconds": spent, "step_seconds": step_s, "share_of_step": spent / step_s, **_distance(scales, whole)}
        )
    return found


def _distance(scales: Scales, whole: Scales) -> dict[str, float]:
    """Of scales from those of the whole batch, relative: mean and largest, and how many are 5 % too small."""
    off = [float(scales[key]) / float(whole[key]) - 1 for key in whole]  # type: ignore[arg-type]
    return {
        "mean_error": statistics.fmean(map(abs, off)),
        "largest_error": max(map(abs, off)),
        "scales_too_small_by_5_percent": float(sum(value < -0.05 for value in off)),
        "scales": float(len(off)),
    }


def summary(rows: list[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """BF16 over FP8 for everything that has seconds in both: medians over the processes."""
    kinds = {(row["what"], row.get("rows")) for row in rows if "seconds" in row and row["what"] != "calibration"}
    found = []
    for what, packs in sorted(kinds, key=str):
        by = {
            recipe: statistics.median(
                row["seconds"] for row in rows if (row["recipe"], row["what"], row.get("rows")) == (recipe, what, packs)
            )
            for recipe in RECIPES
        }
        ratio = by[RECIPES[0]] / by[RECIPES[1]]
        found.append({"what": what, "rows": packs, "layers": layers, "bf16_s": by["bf16"], "fp8_s": by[RECIPES[1]]})
        found[-1]["bf16_over_fp8"] = ratio
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["one"]:
        write(Path(arguments[3]), measure(Path(arguments[1]), arguments[2], arguments[4] == "last"))
        return 0
    step, calibration = Path(arguments[0]), Path(arguments[1])
    layers = int(arguments[2]) if len(arguments) > 2 else LAYERS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = save_random(layers_of_8b(layers), Path(place) / "model")
        for number in range(ROUNDS):
            for recipe in RECIPES:
                out, turn = Path(place) / "rows.json", "last" if number == ROUNDS - 1 else "first"
                command = [sys.executable, "-m", "tests.gpu.megatron_step", "one", str(folder), recipe, str(out), turn]
                subprocess.run(command, check=True)
                rows += [{"process": number} | row for row in json.loads(out.read_text())]
                machine = {"device": vars(replace(device_facts(), free_gb=0.0)), "versions": versions()}
                write(step, machine | {"rows": [r for r in rows if r["what"] != "calibration"]})
                of_calibration = [r for r in rows if r["what"] == "calibration"]
                write(calibration, machine | {"layers": layers, "rows": of_calibration})
    for row in rows:
        print(row, flush=True)
    found = summary(rows, layers)
    for row in found:
        print(row, flush=True)
    write(step, machine | {"summary": found, "rows": [r for r in rows if r["what"] != "calibration"]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
