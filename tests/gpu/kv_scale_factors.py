"""How far FP8 attention is from the trainer by the size of its Q, K and V scales: what calibration could gain.

    python -m tests.gpu.kv_scale_factors OUT.json CACHE [KEY=VALUE ...]

The warm-started model of the configuration (kept below CACHE) samples with the rollout engine of the recipe, which has
to quantise the KV cache. Scales are the calibrated ones times a factor, all of them or one part's alone; scales of 1;
and the calibrated ones rounded up to powers of two. The PyTorch trainer scores the samples and computes its linear
layers as the rollout does, so that |d| is attention's and the kernels'. Prints a table; without a GPU it rehearses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from conf.compose import compose
from conf.schema import Correction, Recipe, RunConfig, TorchRollout, TorchTrainer
from infra.device import device_facts, gpu_count
from infra.provenance import versions
from tasks.bootstrap import demonstrations, prompt_rows
from tasks.data.examples import Dataset
from tasks.data.loading import load_dataset
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, RolloutEngine, SyncPayload
from tasks.engines.registry import build_rollout
from tasks.engines.torch_trainer import TorchTrainerEngine, TrainerSpec
from tasks.engines.warm_start import Device, WarmStartSpec, cached_warm_start
from tasks.numerics.kv_scales import PARTS, ScaleKey, Scales
from tasks.rollout import sampling_prompts
from tests.gpu.recipes import ENVIRONMENT, VLLM_ON_A_GPU

FACTORS: Final = (0.25, 0.5, 0.71, 1.0, 1.19, 1.41, 1.68, 2.0, 2.83, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0)
Change = Callable[[ScaleKey, float], float]


def changes() -> Iterator[tuple[str, Change]]:
    """What is done to each calibrated scale, by name."""
    for factor in FACTORS:
        yield f"x {factor:g}", lambda key, scale, factor=factor: scale * factor
    yield "1", lambda key, scale: 1.0
    yield "power of two", lambda key, scale: 2.0 ** math.ceil(math.log2(scale))
    for part in PARTS:
        yield f"{part} alone: 1", lambda key, scale, part=part: 1.0 if key[1] == part else scale
        yield f"{part} alone: x 4", lambda key, scale, part=part: scale * 4 if key[1] == part else scale


def _changed(scales: Scales, change: Change) -> Scales:
    found = {}
    for key, scale in scales.items():
        assert isinstance(scale, float)
        found[key] = float(torch.tensor(change(key, scale), dtype=torch.float32))
    return found


def _model(config: RunConfig, data: Dataset, cache: Path) -> Path:
    """The folder that the configuration names, or its warm-started model, made once."""
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.architecture is not None
    warm_start = config.model.warm_start
    shown = demonstrations(data, () if warm_start is None else warm_start.answer_styles)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = WarmStartSpec(config.model.architecture, warm_start, shown, config.trainer.threads, device)
    return cached_warm_start(spec, cache, lambda step, loss: None)[0]


def _trainer(config: RunConfig, recipe: Recipe, folder: Path, threads: int) -> TorchTrainerEngine:
    settings = TorchTrainer(threads=threads, micro_batch_size=64, optimizer=config.trainer.optimizer)
    rollout = TorchRollout(max_new_tokens=config.rollout.max_new_tokens)
    return TorchTrainerEngine(folder, TrainerSpec(recipe, config.algorithm, Correction(), settings, rollout))


def _measured(
    engine: RolloutEngine, trainer: TorchTrainerEngine, payload: SyncPayload, request: GenerateRequest
) -> dict[str, float]:
    engine.load_weights(payload)
    batch = engine.generate(request)
    scores = trainer.score(batch)
    d = (scores.logprobs - batch.logprobs)[batch.response_mask()].abs().double()
    shown = {name: scores.metrics[f"mismatch/{name}"] for name in ("token_mult_prob_error", "gen_kl")}
    return {"mean_abs_d": float(d.mean()), "tokens": float(d.numel()), **shown}


def rows(config: RunConfig, cache: Path, threads: int, samples: int) -> Iterator[dict[str, Any]]:
    """A row for each change, the first of them for an engine as it was calibrated."""
    recipe = config.recipe.model_copy(update={"training_linears": config.recipe.rollout_linears})
    data = load_dataset(config.data)
    folder = _model(config, data, cache)
    codec = TextCodec(folder)
    examples = data.batch(0, 0, samples)
    prompts = sampling_prompts(examples, codec, 0, 1, 4)
    trainer = _trainer(config, recipe, folder, threads)
    trainer.calibrate(prompt_rows(examples, codec))
    engine = build_rollout(config, recipe, folder)
    request = GenerateRequest(0, prompts, config.rollout.max_new_tokens, 1.0, codec.eos_token_ids)
    payload = trainer.export_weights(recipe)
    engine.load_weights(payload)
    batch = engine.generate(request)
    trainer.calibrate(batch.rows())
    payload = trainer.export_weights(recipe)
    yield {"change": "scales", "scales": {f"{layer}.{part}": s for (layer, part), s in payload.kv_scales.items()}}
    for name, change in changes():
        changed = replace(payload, kv_scales=_changed(payload.kv_scales, change))
        yield {"change": name, **_measured(engine, trainer, changed, request)}


def main() -> int:
    """The table, and all rows with their conditions in OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--threads", type=int, default=8, help="of the trainer, on the CPU (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="with 4 samples each (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_intermixed_args()
    config = compose(["recipe=fp8_rollout_kv", *(VLLM_ON_A_GPU if gpu_count() else ()), *chosen.overrides])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not config.recipe.kv.quantized:
        parser.error("recipe.kv.dtype=bf16: there are no scales; allowed: e4m3")
    conditions = {"device": device_facts().name, "versions": versions(), "overrides": chosen.overrides}
    found: list[dict[str, Any]] = [conditions]
    print("| scales | mean abs(d) | token_mult_prob_error | gen_kl | tokens |\n|---|---:|---:|---:|---:|", flush=True)
    for row in rows(config, chosen.cache, chosen.threads, chosen.prompts):
        found.append(row)
        chosen.out.write_text(json.dumps(found, indent=1))
        if "mean_abs_d" in row:
            cells = f"{row['mean_abs_d']:.5f} | {row['token_mult_prob_error']:.4f} | {row['gen_kl']:.2e}"
            print(f"| {row['change']} | {cells} | {row['tokens']:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
