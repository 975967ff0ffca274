"""One rank of a Megatron trainer on CPU, in its own process: `python -m tests.engines.megatron_rank_worker JOB RANK`.

JOB is a JSON file: `cases` (`name`, `folder`, `overrides`, `dtype`, `poisoned`), `layout` (keys of the trainer),
`rendezvous`, `out`. Each case is a trainer that scores and trains `STEPS` times; under `out` the rank writes
`NAME.RANK.pt`: what it was given back, and what it holds in the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.compose import compose
from conf.schema import MegatronTrainer, RunConfig
from tasks.engines.megatron_config import Layout
from tasks.engines.protocols import RolloutBatch
from tests.engines.megatron_models import VOCABULARY

STEPS, SAMPLES, WIDTH = 2, 12, 28
SETTINGS: Mapping[str, Any] = {
    "recipe": "bf16",
    "trainer": "megatron",
    "trainer.device": "cpu",
    "trainer.threads": 1,
    "trainer.tokens_per_micro_batch": 60,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 3,
    "algorithm.updates_per_step": 1,
    "algorithm.kl_coef": 0.0,
    "trainer.optimizer.learning_rate": 1e-2,
    "trainer.optimizer.warmup_steps": 0,
    # Far above the noise of a gradient in fp32, so that Adam does not turn that into an update.
    "trainer.optimizer.eps": 1e-4,
}


def rollout_batch() -> RolloutBatch:
    """Random rows of many lengths, and log-probabilities for them."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, 9, (SAMPLES,), generator=generator)
    responses = torch.randint(2, WIDTH - 9, (SAMPLES,), generator=generator)
    position = torch.arange(WIDTH)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, WIDTH), generator=generator)
    tokens = torch.where(position < (prompts + responses).unsqueeze(1), tokens, 0)
    batch = RolloutBatch(
        tokens,
        prompts,
        responses,
        -5 + torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.zeros(SAMPLES, dtype=torch.bool),
        torch.zeros(SAMPLES, dtype=torch.int64),
    )
    batch.logprobs[~batch.response_mask()] = float("nan")
    return batch


def configured(case: Mapping[str, Any], layout: Mapping[str, Any]) -> RunConfig:
    settings = {**SETTINGS, "model.path": case["folder"], **{f"trainer.{key}": size for key, size in layout.items()}}
    return compose([*(f"{key}={value}" for key, value in settings.items()), *case["overrides"]])


def layout(config: RunConfig, rank: int) -> Layout:
    from tasks.engines.megatron_trainer import layout_of

    assert isinstance(config.trainer, MegatronTrainer)
    return layout_of(config.trainer, rank)


def build(config: RunConfig, folder: Path, dtype: str, rank: int) -> Any:
    """An engine as `megatron_trainer.build` makes it, but for the compute type."""
    from tasks.engines.megatron_engine import MegatronSpec, MegatronTrainerEngine

    trainer, recipe = config.trainer, config.recipe
    assert isinstance(trainer, MegatronTrainer)
    spec = MegatronSpec(recipe, config.algorithm, config.correction, trainer, config.rollout, getattr(torch, dtype))
    return MegatronTrainerEngine(folder, spec, layout(config, rank))


def weights(engine: Any) -> dict[str, Tensor]:
    """Hugging Face tensors of the rank's layers and experts, and its copy of a tied embedding as `tied`."""
    from tests.engines.live_tensors import hf_tensors

    model = engine._policy.model
    found = {name: tensor.detach().clone() for name, tensor in hf_tensors(model)}
    if model.plan.shape.tied and not model.part.first:
        found["tied"] = model.module.output_layer.weight.detach()[: model.plan.shape.vocabulary].clone()
    return found


@contextmanager
def poisoned(engine: Any, active: bool) -> Iterator[None]:
    """The gradient of a norm becomes infinite, on this rank alone."""
    weight = engine._policy.model.module.decoder.layers[0].input_layernorm.weight
    handle = weight.register_hook(lambda gradient: gradient * float("inf")) if active else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def results(case: Mapping[str, Any], config: RunConfig, rank: int) -> dict[str, Any]:
    engine, batch = build(config, Path(case["folder"]), case["dtype"], rank), rollout_batch()
    found: dict[str, Any] = {"start": weights(engine), "scores": [], "metrics": [], "middle": []}
    for step in range(STEPS):
        scores = engine.score(batch)
        with poisoned(engine, step == 0 and case["poisoned"] and rank == 1):
            metrics = engine.train(batch, scores.logprobs, torch.linspace(-1.5, 1.5, SAMPLES))
        found["scores"].append(scores.logprobs)
        found["metrics"].append(scores.metrics | metrics)
        found["middle"].append(weights(engine))
    optimizer = engine._optimizer
    state = {name: t for name, t in optimizer.state_tensors().items() if not name.endswith(".step")}
    return found | {
        "weights": weights(engine),
        "owned": sorted(optimizer.weights()),
        "computed": {name: p.numel() for name, p in engine._policy.model.module.named_parameters()},
        "memory": optimizer.memory(),
        "master_bytes": sum(weight.nbytes for weight in optimizer.weights().values()),
        "state_bytes": sum(tensor.nbytes for tensor in state.values()),
    }


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    from tasks.engines import megatron_cpu

    megatron_cpu.install()
    from tasks.engines.megatron_model import start_groups, stop_groups

    configs = [configured(case, job["layout"]) for case in job["cases"]]
    start_groups(layout(configs[0], rank), False, job["rendezvous"], timeout_s=60, seed=1)
    for case, config in zip(job["cases"], configs, strict=True):
        torch.save(results(case, config, rank), Path(job["out"]) / f"{case['name']}.{rank}.pt")
    stop_groups()


if __name__ == "__main__":
    main()
