"""Before the first step: the model, its engines, and scales that come from its own prompts and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from prefect import task

from conf.schema import Recipe, RunConfig
from infra.store_files import absolute_url
from tasks.calls import TASK_OPTIONS, Engines, stopwatch, wait
from tasks.data.examples import Dataset, Example
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, TokenRows
from tasks.engines.warm_start import Demonstration, WarmStartSpec
from tasks.rollout import generate, put_to_sleep, sampling_prompts
from tasks.sync import sync

_BOOTSTRAP_STEP = 0
"""Step number in the seeds of the discarded batch; training steps count from 1."""


def demonstrations(dataset: Dataset, styles: tuple[str, ...]) -> tuple[Demonstration, ...]:
    """Every train example with a reference, its answer written in each style."""
    return tuple(
        Demonstration(e.prompt, style.replace("{answer}", e.answer))
        for e in dataset.train
        if e.has_answer
        for style in styles or ("{answer}",)
    )


@task(name="prepare-model", **TASK_OPTIONS)
def prepare_model(
    engines: Engines,
    config: RunConfig,
    dataset: Dataset,
    folder: Path,
    progress: Callable[[int, float], None],
) -> dict[str, Any]:
    """Folder of the starting model: the configured one, or a warm start (cached under `folder`).

    Returns `model_dir`, `cached` and `time/warm_start_s`.
    """
    if config.model.path is not None:
        return {"model_dir": str(Path(config.model.path).resolve()), "cached": True, "time/warm_start_s": 0.0}
    assert config.model.architecture is not None
    warm_start = config.model.warm_start
    shown = demonstrations(dataset, () if warm_start is None else warm_start.answer_styles)
    spec = WarmStartSpec(config.model.architecture, warm_start, shown, config.trainer.threads)
    with stopwatch() as watch:
        reports = folder.parent / f"{folder.name}.progress"
        ref = engines.trainer.warm_start.remote(spec, str(folder), str(reports))
        seen = 0
        while not ray.wait([ref], timeout=0.5)[0]:
            state = _read_progress(reports)
            if state is not None and state["step"] > seen:
                seen = state["step"]
                progress(seen, state["loss"])
        model_dir, cached = wait("warm start", ref)
        reports.unlink(missing_ok=True)
    return {"model_dir": model_dir, "cached": cached, "time/warm_start_s": watch.seconds}


def _read_progress(path: Path) -> dict[str, Any] | None:
    """The last report of the warm start; None while there is none or it is half written."""
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return state


@task(name="build-engines", **TASK_OPTIONS)
def build_engines(engines: Engines, config: RunConfig, rollout_recipe: Recipe, model_dir: str) -> None:
    """Build both engines at the same time; each is empty or at its starting weights."""
    trainer = engines.trainer.build.remote(config, model_dir, engines.followers)
    rollout = _built(engines, config, rollout_recipe, model_dir)
    wait("build (trainer)", trainer)
    wait("build (rollout)", rollout)


def _built(engines: Engines, config: RunConfig, recipe: Recipe, model_dir: str) -> Any:
    return engines.rollout.build.remote(config, recipe, model_dir, absolute_url(config.storage.url))


def rebuild_rollout(engines: Engines, config: RunConfig, recipe: Recipe, model_dir: str, what: str = "rollout") -> None:
    """Replace the rollout engine by one of `recipe`, empty until a sync; a failure names `what`.

    vLLM gets a new process: one that held an engine on a GPU can hold no other.
    """
    if config.rollout.engine == "vllm":
        engines.replace_rollout()
    wait(f"build ({what})", _built(engines, config, recipe, model_dir))


def prompt_rows(examples: tuple[Example, ...], codec: TextCodec) -> TokenRows:
    """Prompts with their reference answers where the data has them, right-padded."""
    rows = [codec.encode(e.prompt) + (codec.encode(e.answer) if e.has_answer else ()) for e in examples]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return TokenRows(tokens, torch.tensor([len(row) for row in rows]))


@task(name="bootstrap", **TASK_OPTIONS)
def bootstrap(
    engines: Engines, config: RunConfig, dataset: Dataset, codec: TextCodec, expected_linears: tuple[str, ...]
) -> dict[str, float]:
    """Give the rollout engine weights and, for an FP8 cache, scales measured on what it will hold.

    Calibrate on prompts and references, sync, generate one discarded batch, calibrate on its tokens, sync
    again. Returns `time/bootstrap_s`.
    """
    policy = config.recipe.calibration
    with stopwatch() as watch:
        if policy.enabled:
            count = min(policy.max_sequences, len(dataset.train))
            examples = dataset.batch(config.seed, 0, count)
            wait("bootstrap (calibrate)", engines.trainer.calibrate.remote(prompt_rows(examples, codec)))
            sync.fn(engines, config.recipe, expected_linears, config.cluster)
            prompts = sampling_prompts(examples, codec, config.seed, _BOOTSTRAP_STEP, 1)
            request = GenerateRequest(
                0, prompts, config.rollout.max_new_tokens, config.rollout.temperature, codec.eos_token_ids
            )
            _, batch = generate("bootstrap (generate)", engines, request)
            put_to_sleep(engines, config)
            wait(
                "bootstrap (calibrate)",
                engines.trainer.calibrate_on_batch.remote(batch, policy.max_sequences),
            )
        sync.fn(engines, config.recipe, expected_linears, config.cluster)
    return {"time/bootstrap_s": watch.seconds}
