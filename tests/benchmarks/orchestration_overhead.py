"""What a step costs beside its engines: Prefect tasks, Ray calls, grading, audit; engines that do nothing.

    python -m tests.benchmarks.orchestration_overhead [--steps 100]

Real tasks under a real flow on an embedded Prefect server, real actors on a local Ray, the real `Stepper` with a sync
of one tensor and a verifier process; MLflow and the journal are off the path. Prints p50 and p95 of the wall time of a
step, and medians of its phases. Bound: p50 below 150 ms on 2 cores (goal 50). Then what a task costs that is given 128
prompts of 500 tokens, as a plain Prefect task and as the phases are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.compose import compose
from conf.schema import Recipe, RunConfig
from flows.environment import embedded_prefect, prepare_environment
from tasks.engines.protocols import (
    EngineReport,
    FinishedGroup,
    GenerateRequest,
    GroupStream,
    Prompt,
    RolloutBatch,
    Scores,
    SyncHeader,
    SyncPayload,
    TokenRows,
)

BOUND_MS, WARM_UP = 150.0, 10
_RESPONSE = 4
_OVERRIDES = ("recipe=bf16", "algorithm.prompts_per_step=8", "algorithm.group_size=4", "data.pool_size=2000")


class NoRollout:
    """A rollout engine that holds whatever it is sent and answers at once."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._version: int | None = None
        self._arriving: int = 0

    def begin_sync(self, header: SyncHeader) -> None:
        self._arriving = header.version

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def finish_sync(self) -> None:
        self._version = self._arriving

    def stream(self, request: GenerateRequest) -> GroupStream:
        samples = [(prompt.token_ids, seed) for prompt in request.prompts for seed in prompt.seeds]
        prompts = torch.tensor([len(tokens) for tokens, _ in samples])
        batch = RolloutBatch(
            tokens=torch.ones(len(samples), int(prompts.max()) + _RESPONSE, dtype=torch.int64),
            prompt_lengths=prompts,
            response_lengths=torch.full_like(prompts, _RESPONSE),
            logprobs=torch.zeros(len(samples), int(prompts.max()) + _RESPONSE),
            truncated=torch.zeros(len(samples), dtype=torch.bool),
            weight_version=torch.full_like(prompts, request.weight_version),
        )
        for number, prompt in enumerate(request.prompts):
            yield (FinishedGroup(number, tuple([1] * _RESPONSE for _ in prompt.seeds)),)
        return batch

    def report(self) -> EngineReport:
        return EngineReport("none", self._version, (), "bfloat16", "bfloat16", "bfloat16", {}, {"w": 0})


class NoTrainer:
    """A trainer engine whose updates change a version alone."""

    def __init__(self) -> None:
        self.version = 0

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        return SyncPayload(self.version, {"w": torch.zeros(16, dtype=torch.bfloat16)}, {}, {"w": 0})

    def offload(self) -> None:
        pass

    def score(self, batch: RolloutBatch) -> Scores:
        return Scores(batch.logprobs, {"importance/rejected_fraction": 0.0})

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        self.version += 1
        return {"optim/skipped_steps": 0.0, "optim/empty_updates": 0.0}

    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        return {}


def run(steps: int, folder: Path) -> list[dict[str, float]]:
    """Metrics of each step, with `wall_s`; call with Prefect's settings made."""
    # Imported here: prefect and ray read their settings from the environment on import.
    from prefect import flow

    from infra.ray_cluster import await_ready, ray_cluster, spawn
    from tasks.actors import RolloutActor, TrainerActor
    from tasks.calls import Engines
    from tasks.data.grading import Grader
    from tasks.data.loading import load_dataset
    from tasks.engines.tiny_model import train_tokenizer
    from tasks.engines.transport import Arrivals

    class IdleRollout(RolloutActor):
        def build(self, *_: Any) -> None:
            self._built = NoRollout()
            self._arrivals = Arrivals(self._built)

    class IdleTrainer(TrainerActor):
        def build(self, *_: Any) -> None:
            self._built = self._local = NoTrainer()

    config: RunConfig = compose([*_OVERRIDES, f"runs_dir={folder}", f"storage.url={folder}/checkpoints"])
    dataset = load_dataset(config.data)
    train_tokenizer(tuple(example.prompt for example in dataset.train[:200]), 128).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))

    @flow(name="orchestration-overhead", validate_parameters=False)
    def measured() -> list[dict[str, float]]:
        with (
            ray_cluster(config.cluster, namespace="overhead"),
            Grader(dataset.grader, config.data.answer_time_limit_s) as grader,
        ):
            rollout, trainer = (
                spawn(kind, name, 1, config.cluster)
                for kind, name in ((IdleRollout, "overhead-rollout"), (IdleTrainer, "overhead-trainer"))
            )
            await_ready({"rollout": rollout, "trainer": trainer}, config.cluster)
            rollout.build.remote()
            trainer.build.remote()
            engines = Engines(rollout, trainer, config.deadlines)
            stepper, rows = _stepper(config, folder, engines, dataset, grader), []
            for step in range(1, steps + WARM_UP + 1):
                start = time.perf_counter()
                metrics = stepper.step(step)
                rows.append(metrics | {"wall_s": time.perf_counter() - start})
            return rows[WARM_UP:]

    return measured()


def argument_cost(prompts: int, tokens: int, calls: int) -> tuple[float, float]:
    """Median ms of a task that does nothing with so many prompts: read by Prefect, and passed on unread."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    from tasks.phase_task import phase_task

    request = GenerateRequest(0, tuple(Prompt(str(n), tuple(range(tokens)), (0,)) for n in range(prompts)), 1, 1.0, ())

    def nothing(request: GenerateRequest) -> int:
        return len(request.prompts)

    @flow(name="argument-cost", validate_parameters=False)
    def measured() -> tuple[float, float]:
        kinds = (task(nothing, cache_policy=NO_CACHE, persist_result=False), phase_task("nothing")(nothing))
        seconds: list[list[float]] = [[], []]
        for _ in range(calls):
            for spent, kind in zip(seconds, kinds, strict=True):
                start = time.perf_counter()
                assert kind(request) == prompts
                spent.append(time.perf_counter() - start)
        plain, unread = (statistics.median(spent) * 1e3 for spent in seconds)
        return plain, unread

    return measured()


def _stepper(config: RunConfig, folder: Path, engines: Any, dataset: Any, grader: Any) -> Any:
    """Of a session that records nothing."""
    from flows.console import Console
    from flows.identity import RunIdentity
    from flows.session import Session
    from flows.steps import Stepper
    from tasks.data.tokens import TextCodec

    record: Any = None
    session = Session(config, RunIdentity("overhead", None), folder, record, engines, dataset, grader, Console())
    return Stepper(session, TextCodec(folder), str(folder), (), drawn=0)


def main() -> int:
    """Print the figures; 1 above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-overhead-") as name:
        folder = Path(name)
        os.environ.pop("PREFECT_API_URL", None)
        os.environ["PREFECT_HOME"] = name
        prepare_environment(local_ray=True)
        server = embedded_prefect(folder)
        if server is not None:
            server.wait(180)
        rows = run(parsed.steps, folder)
        plain, unread = argument_cost(prompts=128, tokens=500, calls=10)
        if server is not None:
            server.stop()
    walls = sorted(row["wall_s"] * 1e3 for row in rows)
    cuts = statistics.quantiles(walls, n=20, method="inclusive")
    print(f"{len(walls)} steps of no-op engines, ms a step: p50 {statistics.median(walls):.1f}, p95 {cuts[-1]:.1f}")
    phases = ("sync", "rollout", "reward", "score", "train", "calibrate")
    medians = {phase: statistics.median(row[f"time/{phase}_s"] * 1e3 for row in rows) for phase in phases}
    print("  inside tasks, p50: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in medians.items()))
    print(f"  around them (Prefect, flow): {statistics.median(walls) - sum(medians.values()):.1f}")
    print(f"a task given 128 prompts of 500 tokens, ms: {plain:.1f} read by Prefect, {unread:.1f} as phases are called")
    print(f"  ratio {plain / unread:.1f}")
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(statistics.median(walls) > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
