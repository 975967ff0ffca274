"""Before the first step: the model, its engines, and scales that come from its own prompts and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from conf.schema import Recipe, RunConfig
from conf.schema.trainers import trains_on_gpus
from infra.store_files import absolute_url
from tasks.calls import Engines, stopwatch
from tasks.data.examples import DataError, Dataset, Example
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, TokenRows
from tasks.engines.registry import rollout_kind
from tasks.engines.warm_start import Demonstration, Device, WarmStartSpec
from tasks.phase_task import phase_task
from tasks.rollout import generate, put_to_sleep, sampling_prompts
from tasks.sync import sync

_PROGRESS_S = 0.5
"""Time between two looks at how far the warm start is."""

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


@phase_task("prepare-model")
def prepare_model(
    engines: Engines,
    config: RunConfig,
    dataset: Dataset,
    folder: Path,
    progress: Callable[[int, float], None],
) -> dict[str, Any]:
    """Folder of the starting model: the configured one, or a warm start (cached under `folder`).

    It trains on a GPU where the trainer does. Returns `model_dir`, `cached` and `time/warm_start_s`.
    """
    if config.model.path is not None:
        return {"model_dir": str(Path(config.model.path).resolve()), "cached": True, "time/warm_start_s": 0.0}
    assert config.model.architecture is not None
    warm_start = config.model.warm_start
    shown = demonstrations(dataset, () if warm_start is None else warm_start.answer_styles)
    if warm_start is not None and not shown:
        raise DataError(
            f"model.warm_start: none of {len(dataset.train)} train prompts has a reference answer to learn from; "
            "allowed: null, or other data"
        )
    device: Device = "cuda" if trains_on_gpus(config.trainer) else "cpu"
    spec = WarmStartSpec(config.model.architecture, warm_start, shown, config.trainer.threads, device)
    with stopwatch() as watch:
        reports = folder.parent / f"{folder.name}.progress"
        ref = engines.trainer.warm_start.remote(spec, str(folder), str(reports))
        seen, clock = 0, engines.clock("warm_start_s")
        while clock.left() and not ray.wait([ref], timeout=min(_PROGRESS_S, clock.left()))[0]:
            state = _read_progress(reports)
            if state is not None and state["step"] > seen:
                seen = state["step"]
                progress(seen, state["loss"])
        model_dir, cached = engines.answer("warm start", "trainer", ref, clock)
        reports.unlink(missing_ok=True)
    return {"model_dir": model_dir, "cached": cached, "time/warm_start_s": watch.seconds}


def _read_progress(path: Path) -> dict[str, Any] | None:
    """The last report of the warm start; None while there is none or it is half written."""
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return state


@phase_task("build-engines")
def build_engines(engines: Engines, config: RunConfig, rollout_recipe: Recipe, model_dir: str) -> None:
    """Build both engines, at the same time where they share no GPU; each is empty or at its starting weights."""
    trainer = engines.trainer.build.remote(config, model_dir, engines.followers)
    clock = engines.clock("build_s")
    if engines.share_gpu:
        engines.answer("build (trainer)", "trainer", trainer, clock)
        _build_beside(engines, config, rollout_recipe, model_dir, "rollout")
        return
    rollout = _built(engines, config, rollout_recipe, model_dir)
    engines.answer("build (trainer)", "trainer", trainer, clock)
    engines.answer("build (rollout)", "rollout", rollout, clock)


def _built(engines: Engines, config: RunConfig, recipe: Recipe, model_dir: str) -> Any:
    """The build of a rollout engine under way; one of the same kind that is kept only forgets what it held.

    vLLM gets a new process: one that held an engine on a GPU can hold no other.
    """
    if engines.choose_rollout(rollout_kind(config, recipe, Path(model_dir)), in_place=config.rollout.engine != "vllm"):
        return engines.rollout.forget.remote()
    return engines.rollout.build.remote(config, recipe, model_dir, absolute_url(config.storage.url))


def _build_beside(engines: Engines, config: RunConfig, recipe: Recipe, model_dir: str, what: str) -> None:
    """Build the rollout engine on the trainer's GPU, and put it to sleep until its first sync.

    The trainer is away meanwhile: vLLM takes its share of what is free, and takes for its own whatever memory comes
    into use while it measures.
    """
    engines.answer("put the trainer away", "trainer", engines.trainer.offload.remote(), engines.clock("sleep_s"))
    built = _built(engines, config, recipe, model_dir)
    engines.answer(f"build ({what})", "rollout", built, engines.clock("build_s"))
    put_to_sleep(engines, config)


def rebuild_rollout(engines: Engines, config: RunConfig, recipe: Recipe, model_dir: str, what: str = "rollout") -> None:
    """Go on with a rollout engine of `recipe`, empty until a sync; a failure names `what`."""
    if engines.keeps:
        put_to_sleep(engines, config)
    if engines.share_gpu:
        _build_beside(engines, config, recipe, model_dir, what)
        return
    built = _built(engines, config, recipe, model_dir)
    engines.answer(f"build ({what})", "rollout", built, engines.clock("build_s"))


def prompt_rows(examples: tuple[Example, ...], codec: TextCodec) -> TokenRows:
    """Prompts with their reference answers where the data has them, right-padded."""
    rows = [codec.encode(e.prompt) + (codec.encode(e.answer) if e.has_answer else ()) for e in examples]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return TokenRows(tokens, torch.tensor([len(row) for row in rows]))


@phase_task("bootstrap")
def bootstrap(
    engines: Engines, config: RunConfig, dataset: Dataset, codec: TextCodec, expected_linears: tuple[str, ...]
) -> dict[str, float]:
    """Give the rollout engine weights and, for an FP8 cache, scales measured on what it will hold.

    Calibrate on prompts and references, sync, generate one discarded batch, calibrate on its tokens, sync
    again; scales that are never measured are set and synced. Returns `time/bootstrap_s`.
    """
    policy = config.recipe.calibration
    with stopwatch() as watch:
        if policy.enabled:
            count = min(policy.max_sequences, len(dataset.train))
            examples = dataset.batch(config.seed, 0, count)
            ref = engines.trainer.calibrate.remote(prompt_rows(examples, codec))
            engines.answer("bootstrap (calibrate)", "trainer", ref, engines.clock("calibrate_s"))
        if policy.enabled and policy.refresh != "never":
            sync.fn(engines, config.recipe, expected_linears, config.cluster)
            prompts = sampling_prompts(examples, codec, config.seed, _BOOTSTRAP_STEP, 1)
            request = GenerateRequest(
                0, prompts, config.rollout.max_new_tokens, config.rollout.temperature, codec.eos_token_ids
            )
            _, batch = generate("bootstrap (generate)", engines, request, engines.clock("generate_s"))
            put_to_sleep(engines, config)
            ref = engines.trainer.calibrate_on_batch.remote(batch, policy.max_sequences)
            engines.answer("bootstrap (calibrate)", "trainer", ref, engines.clock("calibrate_s"))
        sync.fn(engines, config.recipe, expected_linears, config.cluster)
    return {"time/bootstrap_s": watch.seconds}
