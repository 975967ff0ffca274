"""The vLLM engine on one GPU: syncs, read-back, scales that reach captured graphs, agreement with the PyTorch trainer.

    python -m tests.gpu.check_vllm_engine [OUT.json] [RECIPE ...]

Needs vLLM, torch and transformers; no tokenizer, model file or network. A small Qwen3 that learned sums on the spot;
prints one line for each finding and exits with 1 if any does not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# The block product that needs no compilation for each shape; graphs of decode steps without torch.compile.
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
import yaml
from transformers import AutoTokenizer

from conf.schema import (
    Algorithm,
    Correction,
    Recipe,
    TinyArchitecture,
    TorchRollout,
    TorchTrainer,
    VllmRollout,
    WarmStart,
)
from infra.device import device_facts
from infra.provenance import versions
from tasks.engines.protocols import EngineError, GenerateRequest, Prompt, SyncPayload
from tasks.engines.torch_trainer import TorchTrainerEngine, TrainerSpec
from tasks.engines.vllm_rollout import VllmRolloutEngine
from tasks.engines.warm_start import Demonstration, WarmStartSpec, cached_warm_start
from tasks.numerics.logprobs import sample_seed

CONF = Path(__file__).parents[2] / "conf"
SHAPE = TinyArchitecture(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_key_value_heads=2)
UPDATES, TOKENS, THREADS = 200, 8, min(8, os.cpu_count() or 1)
LIMITS = {"bf16": 0.01, "fp8_rollout": 0.05, "fp8_rollout_kv": 0.05}
"""Largest mean |d| against the trainer of the same recipe's rollout precision."""


def _trained(place: Path) -> Path:
    """A model that has seen sums: differences of random weights say little about those of a policy."""
    shown = tuple(Demonstration(f"{a} + {b} =", str(a + b)) for a in range(10, 100) for b in range(10, 100))
    schedule = WarmStart(steps=UPDATES, batch_size=64, learning_rate=2e-3, seed=0)
    folder, _ = cached_warm_start(WarmStartSpec(SHAPE, schedule, shown, THREADS), place, lambda step, loss: None)
    return Path(folder)


def _recipe(name: str) -> Recipe:
    """A recipe whose trainer computes as its rollout does, so that |d| is the engines' difference alone."""
    recipe = Recipe.model_validate(yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text()))
    return recipe.model_copy(update={"training_linears": recipe.rollout_linears})


def _rollout() -> VllmRollout:
    settings = yaml.safe_load((CONF / "rollout" / "vllm.yaml").read_text())
    on_gpu = torch.cuda.is_available()
    settings |= {"max_new_tokens": TOKENS, "batch_size": 64, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    if on_gpu:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        settings |= {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        settings |= {"engine_args": {"compilation_config": graphs}}
    return VllmRollout.model_validate(settings)


def _trainer(folder: Path, recipe: Recipe) -> TorchTrainerEngine:
    settings = yaml.safe_load((CONF / "trainer" / "torch.yaml").read_text())
    spec = TrainerSpec(
        recipe,
        Algorithm(group_size=4, prompts_per_step=4),
        Correction(),
        TorchTrainer.model_validate(settings | {"threads": THREADS}),
        TorchRollout(max_new_tokens=TOKENS),
    )
    return TorchTrainerEngine(folder, spec)


class Findings:
    """Prints and keeps what was found."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, recipe: str, what: str, holds: bool, **figures: Any) -> None:
        self.rows.append({"recipe": recipe, "what": what, "holds": holds, **figures})
        print(f"{'ok  ' if holds else 'FAIL'} {recipe:15} {what}: {figures}", flush=True)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def check(name: str, folder: Path, prompts: tuple[Prompt, ...], eos: int, found: Findings) -> None:
    """All findings of one recipe."""
    recipe = _recipe(name)
    trainer = _trainer(folder, recipe)
    if recipe.calibration.enabled:
        trainer.calibrate(_rows(prompts))
    payload = trainer.export_weights(recipe)
    start = time.perf_counter()
    engine = VllmRolloutEngine(folder, recipe, _rollout())
    print(f"     {name:15} engine in {time.perf_counter() - start:.1f} s", flush=True)
    request = GenerateRequest(0, prompts, TOKENS, 1.0, (eos,))
    times, prints = [], []
    for _ in range(3):
        times.append(_timed(lambda: engine.load_weights(payload)))
        prints.append(engine.report().fingerprints)
    report = engine.report()
    found.note(name, "two syncs in a row give equal digests", prints[0] == prints[1] == prints[2], seconds=times)
    found.note(name, "holds what was sent", report.fingerprints == payload.fingerprints)
    found.note(name, "no inconsistency", report.problems == (), problems=report.problems[:3], memory=report.memory)
    formats = {"linear": report.linear_dtype, "kv": report.kv_dtype, "query": report.query_dtype}
    found.note(name, "formats", report.quantized_linears != () or name == "bf16", **formats)
    batch = engine.generate(request)
    again = engine.generate(request)
    found.note(name, "a seed decides a sample", torch.equal(batch.tokens, again.tokens))
    metrics = trainer.score(batch).metrics
    mask = batch.response_mask()
    d = (trainer.score(batch).logprobs - batch.logprobs)[mask].abs().double()
    mean = float(d.mean())
    shown = {k: round(metrics[f"mismatch/{k}"], 6) for k in ("token_mult_prob_error", "gen_kl")}
    found.note(name, "agrees with the trainer", mean <= LIMITS[name], mean_abs_d=mean, tokens=int(mask.sum()), **shown)
    if recipe.kv.quantized:
        _scales(name, engine, payload, request, found)
    changed = replace(payload, version=1, tensors=_shaken(payload), fingerprints={})
    engine.load_weights(changed)
    other = engine.generate(replace(request, weight_version=1))
    first = [int(p) for p in batch.prompt_lengths]
    moved = max(abs(float(batch.logprobs[i, at] - other.logprobs[i, at])) for i, at in enumerate(first))
    found.note(name, "changed weights change the first token of a cached prompt", moved > 1e-3, largest=moved)
    engine.close()


def _scales(
    name: str, engine: VllmRolloutEngine, payload: SyncPayload, request: GenerateRequest, found: Findings
) -> None:
    """Arbitrary scales are read back exactly; each kind changes what captured graphs compute."""
    base = engine.generate(request)
    for part in ("q", "k", "v"):
        scales = dict(payload.kv_scales)
        for n, key in enumerate(k for k in scales if k[1] == part):
            value = scales[key]
            assert isinstance(value, float)
            scales[key] = float(torch.tensor(value * (5.3 + 0.37 * n), dtype=torch.float32))
        engine.load_weights(replace(payload, kv_scales=scales))
        report = engine.report()
        found.note(name, f"{part} scales are read back exactly", report.scales == scales and report.problems == ())
        out = engine.generate(request)
        mask = base.response_mask()
        differ = not torch.equal(out.logprobs[mask], base.logprobs[mask])
        found.note(name, f"{part} scales change the output", differ, query=report.query_dtype)
    engine.load_weights(payload)
    back = engine.generate(request)
    found.note(name, "the first scales give the first output again", torch.equal(back.tokens, base.tokens))


def _shaken(payload: SyncPayload) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    return payload.tensors | {name: payload.tensors[name] * 1.5}


def _rows(prompts: tuple[Prompt, ...]) -> Any:
    from tasks.engines.protocols import TokenRows

    width = max(len(p.token_ids) for p in prompts)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
    return TokenRows(tokens, torch.tensor([len(p.token_ids) for p in prompts]))


def _one(name: str, folder: Path) -> list[dict[str, Any]]:
    """One recipe in this process."""
    found = Findings()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [f"{a} + {b} =" for a in range(11, 90, 13) for b in range(12, 90, 7)]
    prompts = tuple(
        Prompt(f"p{i}", tuple(tokenizer.encode(t)), (sample_seed(0, 1, f"p{i}", 0), 2**64 - 1))
        for i, t in enumerate(texts)
    )
    try:
        check(name, folder, prompts, int(tokenizer.eos_token_id), found)
    except EngineError as error:
        found.note(name, "ran", False, error=str(error))
    return found.rows


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        _, name, folder, out = arguments
        Path(out).write_text(json.dumps(_one(name, Path(folder)), default=str))
        return 0
    target = Path(arguments[0]) if arguments else None
    names, rows = arguments[1:] or list(LIMITS), []
    with tempfile.TemporaryDirectory() as place:
        folder = _trained(Path(place) / "model")
        print("     the model has learned", flush=True)
        outs = {name: Path(place) / f"{name}.json" for name in names}
        # A process each: CUDA graphs of a second engine cannot be captured in the process of a first.
        command = [sys.executable, "-m", "tests.gpu.check_vllm_engine", "--one"]
        running = [subprocess.Popen([*command, name, str(folder), str(out)]) for name, out in outs.items()]
        for process in running:
            process.wait()
        for name, out in outs.items():
            ended = [{"recipe": name, "what": "ran to the end", "holds": False}]
            rows += json.loads(out.read_text()) if out.is_file() else ended
    conditions = {"gpu": device_facts().name, "versions": versions(), "shape": SHAPE.model_dump(), "updates": UPDATES}
    if target is not None:
        target.write_text(json.dumps([row | conditions for row in rows], indent=1))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
