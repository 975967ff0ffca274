"""The Megatron trainer on two GPUs, in every layout, beside one GPU.

    python -m tests.gpu.check_megatron_ranks [OUT.json] [LAYOUT ...]

Needs Megatron Core, Transformer Engine, NCCL and two GPUs of one host. A process for each rank, which sees its own GPU
alone. Scores, gradient norms, and scores after two updates are compared with one rank's, and so are the first export
and the checkpoint that one rank takes over. Prints one line for each finding and exits with 1 if any does not hold.
Without GPUs the layouts that the CPU has run on gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infra.device import device_facts
from infra.provenance import versions
from tests.gpu.check_megatron import Finding, finding
from tests.gpu.megatron_bench import configure, random_batch, save_random, small, spread, write

SIZES = {
    "one": {},
    "tensor": {"ranks": 2, "tensor_parallel_size": 2},
    "pipeline": {"ranks": 2, "pipeline_parallel_size": 2},
    "context": {"ranks": 2, "context_parallel_size": 2},
    "data": {"ranks": 2},
    "expert": {"ranks": 2, "expert_parallel_size": 2},
}
LAYOUTS = tuple(SIZES)[1:]
LENGTHS = [64, 300, 128, 512, 77, 400, 33, 256]
# FP8 first: its block scales are decided when Transformer Engine is loaded.
RECIPES = ("fp8_e2e_kv", "bf16")
NOISE, MOVED = {"qwen3": 0.02, "moe": 0.05}, 0.1
"""Largest mean |difference| of a BF16 log-probability from that of one rank, whose products are summed in another
order, which sends some tokens to other experts; and of what two updates have moved it, the share that may be added
after them."""
NORMS, SCALES = {"bf16": 0.05, "fp8_e2e_kv": 0.1}, {"qwen3": 0.15, "moe": 0.25}
"""Largest relative difference of a gradient norm, and of a Q/K/V scale."""
FP8_NOISE = 1.5
"""The same in FP8, in units of what FP8 itself changes: one rank's mean |FP8 - BF16|. A sum in another order moves a
value to the next of E4M3's codes, which are 6 to 12 % apart."""


def recipes() -> tuple[str, ...]:
    return RECIPES if torch.cuda.is_available() else ("bf16",)


def _kind(layout: str) -> str:
    return "moe" if layout == "expert" else "qwen3"


def work_of_rank(place: Path, layout: str, kind: str, rank: int, rendezvous: str) -> None:
    """One process: for each recipe scores, two steps, an export, a checkpoint; rank 0 writes what it was given."""
    from tasks.engines.megatron_trainer import build

    found: dict[str, Any] = {}
    for recipe in recipes():
        settings = [f"trainer.{key}={value}" for key, value in SIZES[layout].items()]
        settings += ["trainer.tokens_per_micro_batch=1024", "algorithm.prompts_per_step=2", "algorithm.group_size=4"]
        # Small: Adam's first updates are signs, and those of the smallest gradients are noise.
        settings.append("trainer.optimizer.learning_rate=2e-5")
        config = configure(place / kind, recipe, *settings)
        trainer = build(config, place / kind, rank, rendezvous if layout != "one" else None)
        batch = random_batch(LENGTHS, 2048)
        start = trainer.export_weights(config.recipe)
        scores = trainer.score(batch)
        metrics = [trainer.train(batch, scores.logprobs, spread(len(LENGTHS))) for _ in range(2)]
        calibrated = trainer.calibrate(batch.rows()) if config.recipe.calibration.enabled else {}
        after = trainer.score(batch).logprobs
        saved = place / f"saved-{layout}-{kind}-{recipe}"
        saved.mkdir(exist_ok=True)
        trainer.save(saved)
        report = trainer.report()
        found[recipe] = {
            "start": start.fingerprints,
            "logprobs": scores.logprobs[batch.response_mask()],
            "after": after[batch.response_mask()],
            "metrics": metrics,
            "calibrated": calibrated,
            "scales": report.scales,
            "masters": report.fingerprints,
        }
    if rank == 0:
        torch.save(found, place / f"{layout}-{kind}.pt")


def taken_over(place: Path, layout: str, kind: str) -> None:
    """One rank that loads what two have saved."""
    from tasks.engines.megatron_trainer import build

    found = {}
    for recipe in recipes():
        trainer = build(configure(place / kind, recipe), place / kind)
        trainer.load(place / f"saved-{layout}-{kind}-{recipe}")
        found[recipe] = trainer.report().fingerprints
    torch.save(found, place / f"over-{layout}-{kind}.pt")


def _start(*arguments: str, gpu: int = 0) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen([sys.executable, "-m", "tests.gpu.check_megatron_ranks", *arguments], env=environment)


def _launch(place: Path, layout: str, kind: str) -> bool:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    count = SIZES[layout].get("ranks", 1)
    ranks = [_start("rank", str(place), layout, kind, str(r), rendezvous, gpu=r) for r in range(count)]
    try:
        codes = [process.wait(timeout=150) for process in ranks]
    except subprocess.TimeoutExpired:
        codes = [1]
    for process in ranks:
        process.kill()
    return not any(codes)


def check(place: Path, layout: str) -> list[Finding]:
    kind = _kind(layout)
    if not _launch(place, layout, kind):
        return [finding(f"{layout}: both ranks end well", False)]
    one, two = (torch.load(place / f"{name}-{kind}.pt", weights_only=False) for name in ("one", layout))
    over = None
    if _start("over", str(place), layout, kind).wait() == 0:
        over = torch.load(place / f"over-{layout}-{kind}.pt", weights_only=False)
    return [row for recipe in two for row in _compare(layout, recipe, one, two[recipe], over)]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().double().mean())


def _compare(layout: str, recipe: str, ones: dict[str, Any], two: dict[str, Any], over: Any) -> list[Finding]:
    name, one = f"{layout}, {recipe}:", ones[recipe]
    found = [finding(f"{name} export at the start is bitwise one rank's", one["start"] == two["start"])]
    moved = _distance(one["after"], one["logprobs"])
    for key, extra in (("logprobs", 0.0), ("after", MOVED * moved)):
        noise = NOISE[_kind(layout)] if recipe == "bf16" else FP8_NOISE * _distance(one[key], ones["bf16"][key])
        figures = {"mean": _distance(one[key], two[key]), "limit": noise + extra, "moved": moved}
        figures["max"] = float((one[key] - two[key]).abs().max())
        found.append(finding(f"{name} {key} as one rank's", figures["mean"] <= figures["limit"], **figures))
    norms = [(a["optim/grad_norm"], b["optim/grad_norm"]) for a, b in zip(one["metrics"], two["metrics"], strict=True)]
    near = all(abs(b / a - 1) < NORMS[recipe] for a, b in norms)
    found.append(finding(f"{name} gradient norms within {NORMS[recipe]:.0%}", near, norms=norms))
    if two["scales"]:
        off = max(abs(two["scales"][key] / one["scales"][key] - 1) for key in one["scales"])
        holds = off < SCALES[_kind(layout)] and one["scales"].keys() == two["scales"].keys()
        found.append(finding(f"{name} scales as one rank's", holds, largest=off))
    holds = over is not None and over[recipe] == two["masters"]
    found.append(finding(f"{name} one rank takes the checkpoint over, bitwise", holds))
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["rank"]:
        work_of_rank(Path(arguments[1]), arguments[2], arguments[3], int(arguments[4]), arguments[5])
        return 0
    if arguments[:1] == ["over"]:
        taken_over(Path(arguments[1]), arguments[2], arguments[3])
        return 0
    wanted = [a for a in arguments if a in LAYOUTS] or list(LAYOUTS)
    if not torch.cuda.is_available() and "context" in wanted:
        wanted.remove("context")
    outs, found = [a for a in arguments if a.endswith(".json")], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for kind in sorted({_kind(layout) for layout in wanted}):
            save_random(small(kind), place / kind)
            found.append(finding(f"one rank, {kind}", _launch(place, "one", kind)))
        with ThreadPoolExecutor(len(wanted)) as pool:
            for rows in pool.map(lambda layout: check(place, layout), wanted):
                found += rows
    if outs:
        machine = replace(device_facts(), free_gb=0.0)
        write(Path(outs[0]), {"device": vars(machine), "versions": versions(), "findings": found})
    return 0 if all(row["holds"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
