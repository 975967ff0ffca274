"""The Megatron trainer on one GPU: agreement with transformers, Transformer Engine's quantiser, resumption, offload.

    python -m tests.gpu.check_megatron [OUT.json] [PART ...]

Needs Megatron Core, Transformer Engine and transformers; no tokenizer, model file or network. Each part runs in
processes of its own; prints one line for each finding and exits with 1 if any does not hold. Without a GPU the parts
that can run on CPU do (parity, resume).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infra.device import device_facts
from infra.provenance import versions
from tasks.engines.protocols import RolloutBatch, TrainerEngine
from tests.gpu.megatron_bench import build, layers_of_8b, random_batch, save_random, small, spread, write

PARTS = ("parity", "quantiser", "resume", "offload")
KINDS = ("qwen3", "llama", "moe")
Finding = dict[str, Any]
VARIANTS = {
    "as it is": (),
    "recomputed": ("trainer.recompute=full",),
    "fp8 moments": ("trainer.optimizer.state=fp8",),
    "tensorwise": ("recipe.training_linears.scaling=tensor", "recipe.rollout_linears.scaling=tensor"),
    "delayed": ("recipe.training_linears.scaling=tensor_delayed", "recipe.rollout_linears.scaling=tensor"),
}
"""What `resume` repeats, as overrides."""

_TWO = ("algorithm.prompts_per_step=1", "algorithm.group_size=2", "trainer.optimizer.learning_rate=1e-2")


def finding(what: str, holds: bool, **figures: Any) -> Finding:
    print(f"{'ok  ' if holds else 'FAIL'} {what}: {figures}", flush=True)
    return {"what": what, "holds": holds, **figures}


def _reference(folder: Path, batch: RolloutBatch, dtype: torch.dtype, device: str) -> Tensor:
    """transformers' log-probabilities of the response tokens, fp32 `[selected]`, row by row without padding."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
    found = []
    with torch.no_grad():
        for row in range(batch.tokens.shape[0]):
            tokens = batch.tokens[row : row + 1, : int(batch.lengths[row])].to(device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            values = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            found.append(values[int(batch.prompt_lengths[row]) - 1 :].cpu())
    return torch.cat(found)


def parity(work: Path) -> list[Finding]:
    """Log-probabilities of packed rows beside transformers in BF16, both against fp32; weights bitwise."""
    found, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    for kind in KINDS:
        folder = save_random(small(kind), work / kind)
        config, trainer = build(folder, "bf16", "trainer.tokens_per_micro_batch=2048")
        batch = random_batch([7, 300, 129, 512, 64, 1000, 33, 256], 2048)
        scored = trainer.score(batch).logprobs[batch.response_mask()]
        exact = _reference(folder, batch, torch.float32, device)
        theirs = (_reference(folder, batch, torch.bfloat16, device) - exact).abs().double()
        ours = (scored - exact).abs().double()
        limit = 1.3 * float(theirs.mean()) + 1e-4
        figures = {"mean": float(ours.mean()), "max": float(ours.max())}
        figures |= {"mean_transformers": float(theirs.mean()), "max_transformers": float(theirs.max())}
        found.append(finding(f"{kind}: |d| from fp32 as transformers in BF16", figures["mean"] <= limit, **figures))
        tensors = trainer.export_weights(config.recipe).tensors
        stored = load_file(folder / "model.safetensors")
        same = tensors.keys() == stored.keys() and all(torch.equal(tensors[n].cpu(), stored[n]) for n in stored)
        found.append(finding(f"{kind}: weights come back bitwise", same, tensors=len(stored)))
    return found


def _te_quantised(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """By Hugging Face name: codes and, for every element, the decode scale, of the modules' own weight quantisers."""
    from tasks.engines.megatron_names import split

    modules = dict(model.module.named_modules())
    found = {}
    for entry in model.entries:
        owner, _, last = entry.name.rpartition(".")
        if not last.startswith("weight") or not hasattr(modules[owner], "_get_weight_quantizers"):
            continue
        quantizers = modules[owner]._get_weight_quantizers()
        quantizer = quantizers[int(last.removeprefix("weight") or 0)] if len(quantizers) > 1 else quantizers[0]
        if quantizer is None:
            continue
        weight = modules[owner].get_parameter(last).detach()
        quantizer.set_usage(rowwise=True, columnwise=False)
        held = quantizer(weight)
        rows, columns = weight.shape
        scale = held._rowwise_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        codes = split(model.plan.shape, entry, [held._rowwise_data.view(torch.uint8)])
        scales = split(model.plan.shape, entry, [scale])
        found |= {name: (codes[name], scales[name]) for name in codes}
    return found


def quantiser(work: Path) -> list[Finding]:
    """Exported codes and scales beside those of Transformer Engine's blockwise quantisers in the live modules."""
    found = []
    for kind in ("qwen3", "moe", "narrow"):
        folder = save_random(small(kind), work / kind)
        config, trainer = build(folder, "fp8_e2e", "trainer.tokens_per_micro_batch=2048", *_TWO)
        trainer.score(random_batch([256, 200], 2048))
        payload = trainer.export_weights(config.recipe)
        found += _compare(kind, payload.tensors, _te_quantised(trainer._policy.model))  # type: ignore[attr-defined]
        found.append(_kept(kind, trainer))
    return found


def _kept(kind: str, trainer: Any) -> Finding:
    """After an update and a score: what Transformer Engine keeps of its quantised weights is of the new weights."""
    batch = random_batch([256, 200], 2048)
    before = trainer.report().fingerprints
    trainer.train(batch, trainer.score(batch).logprobs, spread(2))
    trainer.score(batch)
    kept, same = 0, 0
    for module in trainer._policy.model.module.modules():
        for name, held in getattr(module, "_fp8_workspaces", {}).items():
            parameter = "weight" if hasattr(module, "weight") else f"weight{name.removeprefix('weight')}"
            quantizers = module._get_weight_quantizers()
            quantizer = quantizers[int(name.removeprefix("weight") or 0) if len(quantizers) > 1 else 0]
            fresh = quantizer(module.get_parameter(parameter).detach())
            kept += 1
            same += torch.equal(fresh._rowwise_data, held._rowwise_data)
    moved = sum(before[name] != value for name, value in trainer.report().fingerprints.items())
    text = f"{kind}: products read the weights of the last update"
    return finding(text, kept == same > 0 and moved > 0, kept=kept, same=same, moved=moved)


def _compare(kind: str, sent: dict[str, Tensor], held: dict[str, tuple[Tensor, Tensor]]) -> list[Finding]:
    wrong, worst, far = 0, 0.0, []
    for name, (codes, scales) in held.items():
        ours = sent[name].view(torch.uint8).to(codes.device)
        rows, columns = ours.shape
        spread_ours = sent[f"{name}_scale_inv"].to(codes.device)
        spread_ours = spread_ours.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        bad = (ours != codes) | (spread_ours != scales)
        wrong += int(bad.sum())
        if bad.any():
            a = ours.view(torch.float8_e4m3fn).float() * spread_ours
            b = codes.view(torch.float8_e4m3fn).float() * scales
            worst = max(worst, float((a - b).norm() / b.norm()))
            far.append(name)
    straddles = kind == "narrow"
    missing = [n for n in sent if f"{n}_scale_inv" in sent and n not in held]
    figures = {"matrices": len(held), "elements_that_differ": wrong, "largest_relative_difference": worst}
    figures |= {"differing": far[:4], "not_in_the_trainer": missing[:4]}
    only_qkv = all(".self_attn." in name for name in far)
    text = "differs in fused Q/K/V alone" if straddles else "is bitwise what Transformer Engine holds"
    holds = bool(held) and not missing and (only_qkv if straddles else not wrong)
    return [finding(f"{kind}: export {text}", holds, **figures)]


def _steps(trainer: TrainerEngine, first: int, last: int) -> None:
    for step in range(first, last):
        batch = random_batch([64 + 17 * i for i in range(16)], 2048, seed=step)
        trainer.train(batch, trainer.score(batch).logprobs, spread(16))
        trainer.calibrate(batch.rows())


def steps(work: Path, variant: str, first: int, last: int) -> None:
    """One process of `resume`: steps `first` to `last`, from what is saved unless from 0; killed when it has saved."""
    recipe = "fp8_e2e_kv" if torch.cuda.is_available() else "fp8_rollout_kv"
    overrides = ("trainer.deterministic=true", "trainer.tokens_per_micro_batch=1024", "algorithm.prompts_per_step=4")
    _, trainer = build(work / "qwen3", recipe, *overrides, "algorithm.group_size=4", *VARIANTS[variant])
    saved = work / f"saved-{variant}"
    if first:
        trainer.load(saved)
    _steps(trainer, first, last)
    if last < 4:
        saved.mkdir()
        trainer.save(saved)
        os.kill(os.getpid(), signal.SIGKILL)
    report = trainer.report()
    state = {"fingerprints": report.fingerprints, "scales": {str(k): v for k, v in report.scales.items()}}
    write(work / f"end-{variant}-{first}.json", state | {"version": report.version})


def resume(work: Path) -> list[Finding]:
    """Two steps, saved, SIGKILL, loaded, two more: bitwise four steps in one process. All variants at once."""
    save_random(small("qwen3"), work / "qwen3")
    start = _start_prints(work)
    variants = tuple(VARIANTS) if torch.cuda.is_available() else ("as it is", "fp8 moments", "recomputed")
    with ThreadPoolExecutor(len(variants)) as pool:
        return list(pool.map(lambda variant: _resumed(work, variant, start), variants))


def _resumed(work: Path, variant: str, start: dict[str, int]) -> Finding:
    codes = [_python("steps", str(work), variant, str(a), str(b)) for a, b in ((0, 4), (0, 2), (2, 4))]
    text = f"{variant}: killed and continued is bitwise the uninterrupted run"
    if codes != [0, -signal.SIGKILL, 0]:
        return finding(text, False, exit_codes=codes)
    ends = [json.loads((work / f"end-{variant}-{first}.json").read_text()) for first in (0, 2)]
    prints = [end["fingerprints"] for end in ends]
    figures = {"exit_codes": codes, "weights": len(prints[0]), "scales_equal": ends[0]["scales"] == ends[1]["scales"]}
    figures["weights_that_differ"] = sum(prints[0][name] != prints[1][name] for name in prints[0])
    return finding(text, ends[0] == ends[1] and prints[0] != start, **figures)


def _start_prints(work: Path) -> dict[str, int]:
    _, trainer = build(work / "qwen3", "bf16")
    return trainer.report().fingerprints


def offload(work: Path) -> list[Finding]:
    """20 rounds to host memory and back, a step in each; memory in use on the device, away and back."""
    folder = save_random(layers_of_8b(4, 32768), work / "wide")
    overrides = ("trainer.offload=true", "algorithm.prompts_per_step=4", "algorithm.group_size=4")
    config, trainer = build(folder, "fp8_e2e_kv", *overrides)
    batch = random_batch([512] * 16, 32768)
    rows: list[dict[str, float]] = []
    for cycle in range(21):
        trainer.train(batch, trainer.score(batch).logprobs, spread(16))
        trainer.calibrate(batch.rows())
        payload = trainer.export_weights(config.recipe)
        prints = payload.fingerprints
        del payload
        row = {"cycle": cycle, "allocated_before": float(torch.cuda.memory_allocated())}
        start, end, back = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        trainer.offload()
        end.record()
        row |= {"allocated_away": float(torch.cuda.memory_allocated()), "used_away": _used()}
        trainer._fetch(masters=True)  # type: ignore[attr-defined]
        back.record()
        torch.cuda.synchronize()
        row |= {"away_s": start.elapsed_time(end) / 1e3, "back_s": end.elapsed_time(back) / 1e3}
        row |= {"allocated_back": float(torch.cuda.memory_allocated())}
        rows.append(row)
    again = trainer.export_weights(config.recipe).fingerprints
    first, last = rows[1], rows[-1]
    found = [finding("weights are those of before", again == prints)]
    for key in ("allocated_away", "used_away", "allocated_back"):
        share = last[key] / first[key] - 1
        found.append(finding(f"{key} after 20 rounds within 1 %", abs(share) <= 0.01, first=first[key], last=last[key]))
    found.append(finding("rounds", True, rows=rows[:2] + rows[-1:]))
    return found


def _used() -> float:
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _python(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "tests.gpu.check_megatron", *arguments], check=False).returncode


def _part(name: str, work: Path, out: Path) -> None:
    write(out, globals()[name](work))


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["steps"]:
        steps(Path(arguments[1]), arguments[2], int(arguments[3]), int(arguments[4]))
        return 0
    if arguments[:1] == ["part"]:
        _part(arguments[1], Path(arguments[2]), Path(arguments[3]))
        return 0
    wanted = [a for a in arguments if a in PARTS] or list(PARTS)
    outs = [a for a in arguments if a.endswith(".json")]
    results: dict[str, list[Finding]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            work = Path(folder) / name
            work.mkdir()
            code = _python("part", name, str(work), str(work / "found.json"))
            text = (work / "found.json").read_text() if code == 0 else "[]"
            results[name] = json.loads(text) or [finding(f"{name} ended with {code}", False)]
            if outs:
                machine = replace(device_facts(), free_gb=0.0)
                write(Path(outs[0]), {"device": vars(machine), "versions": versions(), "findings": results})
    return 0 if all(row["holds"] for rows in results.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
