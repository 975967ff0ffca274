"""Sampling a step with real processes: answers are graded while the engine still samples, and nothing else changes.

What Prefect adds around the tasks is left out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle

import flows.sampling
from conf.compose import compose
from conf.schema import Cluster, RunConfig
from flows.sampling import Sampler
from infra.ray_cluster import await_ready, ray_cluster, spawn
from tasks.actors import RolloutActor
from tasks.calls import Engines, PhaseError
from tasks.data.examples import Dataset, Example, GraderSpec
from tasks.data.grading import Grader, GraderError
from tasks.data.split import prompt_id
from tasks.data.tokens import TextCodec
from tasks.deadlines import Limit
from tasks.engines.protocols import EngineError, GenerateRequest, RolloutBatch
from tasks.engines.registry import build_trainer
from tasks.engines.transport import send
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.rollout_link import RolloutLink
from tasks.select import select
from tests.contract.engines import make_model

pytestmark = pytest.mark.timeout(240)

PROMPTS, SAMPLES, PATIENCE_S = 4, 3, 120.0
CLUSTER = Cluster()

VERIFIER = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent

def judge(completion, entry):
    victim = FOLDER / "victim"
    if victim.exists():
        os.kill(int(victim.read_text()), signal.SIGKILL)
    time.sleep(0.01)
    (FOLDER / "graded").touch()
    return (sum(completion.encode()) + len(entry["question"])) % 97 / 96
"""


class _Scripted(RolloutActor):
    """After its first group the engine does what the test says."""

    def script(self, then: str, folder: str) -> int:
        self._then, self._folder = then, Path(folder)
        return os.getpid()

    def generate(self, request: GenerateRequest) -> Iterator[Any]:
        for number, item in enumerate(super().generate(request)):
            yield item
            if number == 0 and self._then == "fail":
                raise EngineError("the memory is full")
            if number == 0 and self._then == "wait":
                self._await_grade()

    def _await_grade(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self._folder / "graded").exists():
            if time.monotonic() > deadline:
                raise EngineError("the first group was not graded while the others were to be sampled")
            time.sleep(0.01)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    model = make_model(tmp_path_factory.mktemp("model"))
    settings = {
        "recipe": "bf16",
        "model.path": str(model),
        "algorithm.prompts_per_step": PROMPTS,
        "algorithm.group_size": SAMPLES,
        "rollout.batch_size": 2 * SAMPLES,
        "rollout.max_new_tokens": 8,
        "rollout.threads": 1,
        "trainer.threads": 1,
        "trainer.micro_batch_size": PROMPTS * SAMPLES,
    }
    return compose([f"{key}={value}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(CLUSTER, namespace="streaming"):
        yield


def _spawn(config: RunConfig, name: str) -> ActorHandle:
    """An actor whose engine holds version 0."""
    model = Path(str(config.model.path))
    actor = spawn(_Scripted, name, 1, CLUSTER)
    await_ready({name: actor}, CLUSTER)
    payload = build_trainer(config, model).export_weights(config.recipe)
    ray.get(actor.build.remote(config, config.recipe, str(model), str(model)))
    send(payload, RolloutLink(actor, Limit("deadlines.sync_s", PATIENCE_S)), 2**20)
    return actor


@pytest.fixture(scope="module")
def actor(cluster: None, config: RunConfig) -> ActorHandle:
    return _spawn(config, "streaming-rollout")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GraderSpec:
    (tmp_path / "streaming_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return GraderSpec("callable", "streaming_verifier:judge", partial_credit=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tasks themselves, and the last result of each."""
    results: dict[str, Any] = {}
    for task in (rollout, reward, select):

        def call(*args: Any, task: Any = task) -> Any:
            results[task.name] = task.fn(*args)
            return results[task.name]

        monkeypatch.setattr(flows.sampling, task.name, call)
    return results


def _sampler(actor: ActorHandle, config: RunConfig, grader: Grader) -> Sampler:
    prompts = [f"{n} + {n} = " for n in range(PROMPTS)]
    dataset = Dataset(tuple(Example(prompt_id(p), p, "0") for p in prompts), (), GraderSpec("math_verify"))
    return Sampler(
        Engines(actor, None, config.deadlines), dataset, grader, TextCodec(Path(str(config.model.path))), config, 0
    )


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("grading")]


def test_answers_are_graded_while_others_are_sampled_and_rewards_are_those_of_grading_afterwards(
    actor: ActorHandle, config: RunConfig, spec: GraderSpec, seen: dict[str, Any], tmp_path: Path
) -> None:
    """The engine does not go on before the first group has a grade."""
    ray.get(actor.script.remote("wait", str(tmp_path)))
    with Grader(spec, 20.0) as grader:
        sampler = _sampler(actor, config, grader)
        metrics = sampler.sample(1).metrics
        batch: RolloutBatch = ray.get(seen["rollout"]["batch"])
        examples = sampler._dataset.batch(config.seed, 0, PROMPTS)
        answers = [sampler._codec.decode(batch.response(i)) for i in range(PROMPTS * SAMPLES)]
        afterwards = grader.grade([(examples[i // SAMPLES], answer) for i, answer in enumerate(answers)])
    rewards = torch.tensor([g.score for g in afterwards], dtype=torch.float64).view(PROMPTS, SAMPLES)
    assert len(rewards.unique()) > PROMPTS, "rewards must tell the samples apart"
    assert torch.equal(seen["reward"]["rewards"], rewards)
    assert torch.equal(seen["reward"]["lengths"], batch.response_lengths.view(PROMPTS, SAMPLES))
    assert seen["reward"]["lengths"].dtype == torch.int64
    assert (seen["reward"]["timed_out"], seen["reward"]["verifier_errors"]) == (0, 0)
    assert metrics["reward/mean"] == float(rewards.mean())
    # At least the answer for which the engine waited, 10 ms.
    assert 0.01 <= metrics["time/reward_overlapped_s"] <= metrics["time/rollout_s"]
    assert metrics["rollout/mean_length"] == float(batch.response_lengths.double().mean())
    assert _threads() == []


def test_a_verifier_that_does_not_start_fails_the_reward_and_not_the_rollout(
    actor: ActorHandle, config: RunConfig, seen: dict[str, Any], tmp_path: Path
) -> None:
    ray.get(actor.script.remote("nothing", str(tmp_path)))
    with (
        Grader(GraderSpec("callable", "no_such_module:judge"), 5.0) as grader,
        pytest.raises(GraderError, match="does not start: ModuleNotFoundError"),
    ):
        _sampler(actor, config, grader).sample(1)
    assert seen["rollout"]["counts"]["samples"] == PROMPTS * SAMPLES and "reward" not in seen
    assert _threads() == []


def test_an_engine_that_fails_after_a_group_fails_the_rollout(
    actor: ActorHandle, config: RunConfig, spec: GraderSpec, seen: dict[str, Any], tmp_path: Path
) -> None:
    ray.get(actor.script.remote("fail", str(tmp_path)))
    with Grader(spec, 20.0) as grader:
        with pytest.raises(PhaseError, match=r"^rollout: EngineError: the memory is full$"):
            _sampler(actor, config, grader).sample(1)
        assert _threads() == []
    assert seen == {}
    ray.get(actor.script.remote("nothing", str(tmp_path)))
    with Grader(spec, 20.0) as grader:
        assert _sampler(actor, config, grader).sample(1).metrics["rollout/mean_length"] > 0


def test_an_engine_process_that_is_killed_after_a_group_fails_the_rollout(
    cluster: None, config: RunConfig, spec: GraderSpec, seen: dict[str, Any], tmp_path: Path
) -> None:
    """The verifier kills it, on the first answer of the first group."""
    actor = _spawn(config, "streaming-victim")
    # A folder in which no grade appears, so that the engine would wait.
    pid = ray.get(actor.script.remote("wait", str(tmp_path / "elsewhere")))
    (tmp_path / "victim").write_text(str(pid))
    with Grader(spec, 20.0) as grader:
        with pytest.raises(PhaseError, match=rf"^rollout: the engine's process died \(pid {pid} on [^)]*\): "):
            _sampler(actor, config, grader).sample(1)
        assert _threads() == []
    assert seen == {}
