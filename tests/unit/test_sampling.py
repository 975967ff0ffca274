"""Sampling a step: which prompts are drawn, when it goes on and when it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flows.sampling
from conf.compose import compose
from conf.schema import RunConfig
from flows.sampling import Sampler
from tasks.background_grading import BackgroundGrading
from tasks.data.examples import Dataset, Example, GraderSpec
from tasks.data.split import prompt_id


class _Rewards:
    """Stands for engines and verifier: a prompt in `mixed` has unequal rewards."""

    def __init__(self, mixed: set[str]) -> None:
        self.mixed = mixed
        self.batches: list[list[str]] = []

    def rollout(self, engines: object, request: Any, finished: object) -> dict[str, Any]:
        self.batches.append([prompt.id for prompt in request.prompts])
        samples = float(2 * len(request.prompts))
        counts = {"tokens": samples, "samples": samples, "truncated": 0.0, "memory/peak_gb": 0.1}
        return {"batch": len(self.batches) - 1, "counts": counts, "seconds": 1.0, "ended": 0.0}

    def reward(self, grading: BackgroundGrading, *rest: object) -> dict[str, Any]:
        rows = [[0.0, 1.0] if e.id in self.mixed else [1.0, 1.0] for e in grading.examples]
        rewards = torch.tensor(rows, dtype=torch.float64)
        lengths = torch.ones_like(rewards, dtype=torch.int64)
        return {
            "rewards": rewards,
            "shaped": rewards,
            "lengths": lengths,
            "timed_out": 0,
            "verifier_errors": 0,
            "seconds": 0.5,
        }


def _dataset(size: int) -> Dataset:
    prompts = [f"prompt {i}" for i in range(size)]
    return Dataset(tuple(Example(prompt_id(p), p, "1") for p in prompts), (), GraderSpec("math_verify"))


class _Codec:
    eos_token_ids = (0,)

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)


def _config(*extra: str) -> RunConfig:
    return compose(["algorithm=dapo", "algorithm.group_size=2", "algorithm.prompts_per_step=2", *extra])


def _sampler(
    monkeypatch: pytest.MonkeyPatch, world: _Rewards, dataset: Dataset, config: RunConfig, drawn: int = 0
) -> Sampler:
    monkeypatch.setattr(flows.sampling, "rollout", world.rollout)
    monkeypatch.setattr(flows.sampling, "reward", world.reward)

    def select(refs: list[int], graded: list[dict[str, Any]], algorithm: object, clock: object) -> dict[str, Any]:
        return {"batch": refs, "advantages": torch.zeros(4), "metrics": {}, "seconds": 0.25}

    monkeypatch.setattr(flows.sampling, "select", select)
    anything: Any = None
    engines: Any = SimpleNamespace(clock=lambda name: None)
    return Sampler(engines, dataset, anything, _Codec(), config, drawn)  # type: ignore[arg-type]


def test_one_batch_where_every_group_is_informative(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = _dataset(10)
    world = _Rewards({e.id for e in dataset.train})
    sampler = _sampler(monkeypatch, world, dataset, _config())
    sampled = sampler.sample(1)
    assert len(world.batches) == 1 and sampler.drawn == 2
    assert sampled.metrics["time/reward_s"] == 0.75 and sampled.metrics["time/rollout_s"] == 1.0


def test_without_dynamic_sampling_there_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    world, config = _Rewards(set()), _config("algorithm.dynamic_sampling.enabled=false")
    sampler = _sampler(monkeypatch, world, _dataset(10), config)
    sampler.sample(1)
    assert len(world.batches) == 1 and sampler.drawn == 2


def test_sampling_goes_on_to_its_bound_and_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world, config = _Rewards(set()), _config("algorithm.dynamic_sampling.max_generation_batches=3")
    sampler = _sampler(monkeypatch, world, _dataset(20), config)
    sampled = sampler.sample(1)
    assert len(world.batches) == 3 and sampler.drawn == 6
    assert sampled.metrics["time/rollout_s"] == 3.0 and sampled.metrics["time/reward_s"] == 1.75
    assert sampled.metrics["throughput/rollout_tokens_per_s"] == 4.0


@pytest.mark.parametrize("drawn", range(12))
@pytest.mark.parametrize("seed", range(4))
def test_a_step_sees_every_prompt_of_a_small_pool_once_before_it_gives_up(
    monkeypatch: pytest.MonkeyPatch, seed: int, drawn: int
) -> None:
    """Wherever the epoch ends, and though a draw across it may hold nothing new."""
    world, dataset = _Rewards(set()), _dataset(6)
    sampler = _sampler(monkeypatch, world, dataset, _config(f"seed={seed}"), drawn)
    sampler.sample(1)
    seen = [prompt for batch in world.batches for prompt in batch]
    assert sorted(seen) == sorted(e.id for e in dataset.train)
