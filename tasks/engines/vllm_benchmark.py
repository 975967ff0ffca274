"""Rollout throughput of vLLM under one recipe, measured in a process of its own.

Run as a module it reads a `Rung` as JSON from standard input and writes the rows that it measured to the file
named there. Weights are random: speed does not depend on them, and no model file is needed.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from conf.schema import Benchmark, Recipe, VllmRollout
from conf.schema.base import Section
from conf.schema.benchmark import Point
from tasks.engines.plan import folder_shape
from tasks.engines.vllm_arguments import engine_arguments, model_of


class Rung(Section):
    """One rung of the ladder: everything that its process must know."""

    mode: str
    """Name of the rung."""

    model_dir: str
    """Folder with the model's config.json."""

    recipe: Recipe
    """What the rollout side computes in."""

    rollout: VllmRollout
    """Settings of the engine."""

    benchmark: Benchmark
    """Loads to measure."""

    only_start: bool
    """Whether to start the engine, and measure nothing but that."""

    result: str
    """File for the rows, JSON."""


def _prompts(point: Point, vocabulary: int, number: int) -> list[dict[str, list[int]]]:
    """Random token ids, others for each `number`, so that no prefix is ever cached."""
    generator = torch.Generator().manual_seed(number)
    shape = (point.concurrency, point.prompt_tokens)
    return [{"prompt_token_ids": row} for row in torch.randint(3, vocabulary, shape, generator=generator).tolist()]


def _sampling(tokens: int, number: int) -> Any:
    from vllm import SamplingParams

    # As a rollout samples: temperature 1, and the log-probability of every sampled token.
    return SamplingParams(
        temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=number
    )


class _Engine:
    """A built engine, and what is read from it."""

    def __init__(self, rung: Rung) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        if on_cpu:
            from tasks.engines import vllm_cpu

            vllm_cpu.register()
        settings = _settings(rung)
        start = time.perf_counter()
        folder = Path(rung.model_dir)
        model = model_of(folder, folder_shape(folder), rung.recipe.rollout_linears)
        arguments = engine_arguments(model, rung.recipe, settings, "", on_cpu)
        # Preemptions are counted by vLLM's statistics; weights stay what they are.
        del arguments["weight_transfer_config"]
        self._llm = LLM(**arguments | {"disable_log_stats": False})
        self.start_s = time.perf_counter() - start
        # Counts alike in every rung, so that all get the same prompts.
        self._calls = 0
        self.vocabulary = int(self._llm.llm_engine.vllm_config.model_config.get_vocab_size())

    def randomize(self) -> None:
        """Random weights: of those that vLLM makes up, every FP8 code is 0, and a kernel of zeros says little."""
        self._llm.collective_rpc("fp8_grpo_randomize")

    def preemptions(self) -> float:
        """Requests put back for want of cache, since the start."""
        found = [m for m in self._llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return float(sum(m.value for m in found))

    def facts(self) -> dict[str, Any]:
        from tasks.engines.vllm_private import cache_tokens

        return {"kv_capacity_tokens": cache_tokens(self._llm), "start_s": round(self.start_s, 2)}

    def seconds(self, point: Point, tokens: int) -> float:
        """Wall time until all requests of the point have their `tokens`; each call has prompts of its own."""
        self._calls += 1
        prompts, sampling = _prompts(point, self.vocabulary, self._calls), _sampling(tokens, self._calls)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        made = {len(output.outputs[0].token_ids) for output in outputs}
        if made != {tokens} or len(outputs) != point.concurrency:
            raise RuntimeError(f"asked for {point.concurrency} x {tokens} tokens, got {len(outputs)} x {sorted(made)}")
        return elapsed


def _settings(rung: Rung) -> VllmRollout:
    """The rung's settings with room for the largest load."""
    benchmark = rung.benchmark
    points = (benchmark.headline, *benchmark.points)
    longest = max(
        *(p.prompt_tokens + p.response_tokens for p in points),
        *(c + benchmark.slope_tokens for c in benchmark.slope_contexts),
        2,
    )
    most = max(*(p.concurrency for p in points), benchmark.slope_concurrency if benchmark.slope_contexts else 1)
    update = {"max_model_len": rung.rollout.max_model_len or longest + 1, "batch_size": most}
    return rung.rollout.model_copy(update=update)


def measure(rung: Rung) -> list[dict[str, Any]]:
    """All rows of a rung: its headline, its points, its slopes; none when the process only warms caches up."""
    engine, benchmark = _Engine(rung), rung.benchmark
    engine.randomize()
    # Kernels that compile at first use must not fall into a measurement.
    engine.seconds(benchmark.headline, min(16, benchmark.response_tokens))
    if rung.only_start:
        return [engine.facts()]
    rows = [_row(engine, rung, benchmark.headline, benchmark.repeats, headline=True)]
    rows += [_row(engine, rung, point, 1, headline=False) for point in benchmark.points]
    rows += [_slope(engine, rung, context) for context in benchmark.slope_contexts]
    return rows


def _row(engine: _Engine, rung: Rung, point: Point, repeats: int, headline: bool) -> dict[str, Any]:
    before = engine.preemptions()
    times = [engine.seconds(point, point.response_tokens) for _ in range(repeats)]
    tokens = point.concurrency * point.response_tokens
    return engine.facts() | {
        "mode": rung.mode,
        "headline": headline,
        "prompt": point.prompt_tokens,
        "response": point.response_tokens,
        "concurrency": point.concurrency,
        "tokens_per_s": [round(tokens / t, 1) for t in times],
        "preemptions": (engine.preemptions() - before) / repeats,
    }


def _slope(engine: _Engine, rung: Rung, context: int) -> dict[str, Any]:
    """Seconds of a decode step after a prefill of `context` tokens: the prefill alone is measured and taken away."""
    more, concurrency = rung.benchmark.slope_tokens, rung.benchmark.slope_concurrency
    point = Point(prompt_tokens=context, response_tokens=more, concurrency=concurrency)
    before = engine.preemptions()
    # What compiles for these shapes compiles here, outside of both times.
    engine.seconds(point, 2)
    prefill = engine.seconds(point, 1)
    whole = engine.seconds(point, more)
    return engine.facts() | {
        "mode": rung.mode,
        "headline": False,
        "slope": True,
        "prompt": context,
        "response": more,
        "concurrency": concurrency,
        "decode_step_s": round((whole - prefill) / (more - 1), 6),
        "tokens_per_s": [round(concurrency * (more - 1) / (whole - prefill), 1)],
        "preemptions": engine.preemptions() - before,
    }


def main() -> None:
    rung = TypeAdapter(Rung).validate_json(sys.stdin.read(), strict=False)
    rows = measure(rung)
    Path(rung.result).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
