"""Sampling a step: generation batches until the objective has the groups that it wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from torch import Tensor

from conf.schema import RunConfig
from tasks.background_grading import BackgroundGrading
from tasks.calls import Engines
from tasks.data.examples import Dataset, Example
from tasks.data.grading import Grader
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest
from tasks.numerics.advantage import zero_variance
from tasks.reward import reward
from tasks.rollout import combined_metrics, rollout, sampling_prompts
from tasks.select import select


@dataclass(frozen=True)
class Sampled:
    """What a step trains on: `batch` (a reference), `advantages` `[samples]`, and metrics of rollout and reward."""

    batch: ObjectRef
    advantages: Tensor
    metrics: dict[str, float]


class Sampler:
    """Draws prompts in the data's order and samples them; `drawn` is the data cursor, in prompts."""

    def __init__(
        self, engines: Engines, dataset: Dataset, grader: Grader, codec: TextCodec, config: RunConfig, drawn: int
    ) -> None:
        self.drawn = drawn
        self._engines = engines
        self._dataset = dataset
        self._grader = grader
        self._codec = codec
        self._config = config

    def sample(self, step: int) -> Sampled:
        """One generation batch; with dynamic sampling more, until enough groups carry a gradient or the bound is met.

        The step's number decides the samples of a prompt, whatever batch it is drawn in.
        """
        algorithm = self._config.algorithm
        limit = algorithm.dynamic_sampling.max_generation_batches if algorithm.dynamic_sampling.enabled else 1
        rollouts: list[dict[str, Any]] = []
        graded: list[dict[str, Any]] = []
        seen: set[str] = set()
        informative, overlapped = 0, 0.0
        while len(rollouts) < limit and informative < algorithm.prompts_per_step:
            examples = self._draw(seen)
            if not examples and len(seen) == len(self._dataset.train):
                break
            if not examples:
                # Where one epoch ends and the next begins, a draw may hold nothing new.
                continue
            with BackgroundGrading(self._grader, self._codec, examples) as grading:
                rollouts.append(rollout(self._engines, self._request(step, examples), grading.submit))
                graded.append(reward(grading, algorithm, self._config.rollout.max_new_tokens))
            overlapped += grading.seconds_before(rollouts[-1]["ended"])
            informative += int((~zero_variance(graded[-1]["rewards"])).sum())
        chosen = select([r["batch"] for r in rollouts], graded, algorithm, self._engines.clock("generate_s"))
        seconds = chosen["seconds"] + sum(g["seconds"] for g in graded)
        times = {"time/reward_s": seconds, "time/reward_overlapped_s": overlapped}
        metrics = combined_metrics(rollouts) | chosen["metrics"] | times
        return Sampled(chosen["batch"], chosen["advantages"], metrics)

    def _draw(self, seen: set[str]) -> tuple[Example, ...]:
        """The next prompts, less those that this step had already: a prompt's samples are fixed within a step."""
        count = self._config.algorithm.prompts_per_step
        drawn = self._dataset.batch(self._config.seed, self.drawn, count)
        self.drawn += count
        fresh = tuple(example for example in drawn if example.id not in seen)
        seen |= {example.id for example in fresh}
        return fresh

    def _request(self, step: int, examples: tuple[Example, ...]) -> GenerateRequest:
        config = self._config
        prompts = sampling_prompts(examples, self._codec, config.seed, step, config.algorithm.group_size)
        length, temperature = config.rollout.max_new_tokens, config.rollout.temperature
        return GenerateRequest(step - 1, prompts, length, temperature, self._codec.eos_token_ids)
