"""What a rollout engine and a trainer engine must do, and the data that passes between them.

An engine is built from the run's configuration, holds weights of exactly one version, and reports what it
really runs. `tests/contract/` states the behaviour that every implementation owes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from conf.schema import Recipe
from tasks.numerics.fp8_linear import BlockSpec
from tasks.numerics.kv_scales import Scales


class EngineError(RuntimeError):
    """An engine could not do what was asked of it; the message says what and why."""


class WeightVersionError(EngineError):
    """A request expected another weight version than the engine holds."""


class SyncError(EngineError):
    """A weight sync was refused or failed; the engine is dirty until a sync succeeds."""


@dataclass(frozen=True)
class TokenRows:
    """Whole sequences, right-padded: `tokens` int64 `[rows, width]`, `lengths` int64 `[rows]`."""

    tokens: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt to sample from: one response for each seed (see `tasks.numerics.logprobs.sample_seed`)."""

    id: str
    token_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """`weight_version` is what the caller expects the engine to hold; any other fails the request.

    `greedy` ignores temperature and seeds. A response ends with one of `eos_token_ids` or after
    `max_new_tokens` tokens.
    """

    weight_version: int
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    temperature: float
    eos_token_ids: tuple[int, ...]
    greedy: bool = False


@dataclass(frozen=True)
class RolloutBatch:
    """Sampled sequences in the order of the request: prompt by prompt, seed by seed.

    `tokens` int64 `[samples, width]` prompt + response, right-padded with 0; `prompt_lengths` and
    `response_lengths` int64 `[samples]`; `logprobs` fp32 `[samples, width]`, at each response token its
    log-probability when it was sampled, NaN elsewhere; `truncated` bool `[samples]`, ended by the length
    limit; `weight_version` int64 `[samples]`, the version that produced each sample.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    logprobs: Tensor
    truncated: Tensor
    weight_version: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.prompt_lengths + self.response_lengths

    def response_mask(self) -> Tensor:
        """True at response tokens, bool `[samples, width]`."""
        position = self.tokens.new_tensor(range(self.tokens.shape[1])).unsqueeze(0)
        return (position >= self.prompt_lengths.unsqueeze(1)) & (position < self.lengths.unsqueeze(1))

    def rows(self) -> TokenRows:
        return TokenRows(self.tokens, self.lengths)

    def response(self, sample: int) -> list[int]:
        """Token ids of one response, the end token included if it was reached."""
        start = int(self.prompt_lengths[sample])
        return self.tokens[sample, start : start + int(self.response_lengths[sample])].tolist()


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SyncHeader:
    """What a sync will bring: the version, the form of every tensor by name, and the Q/K/V scales themselves."""

    version: int
    forms: dict[str, TensorForm]
    kv_scales: Scales


@dataclass(frozen=True)
class FinishedGroup:
    """All responses to one prompt: its place in the request, and token ids in the order of its seeds.

    They are those of `RolloutBatch.response`.
    """

    prompt: int
    responses: tuple[list[int], ...]


GroupStream = Generator[tuple[FinishedGroup, ...], None, RolloutBatch]
"""Yields the groups that end together, each prompt of the request once; returns the whole batch."""


@dataclass(frozen=True)
class SyncPayload:
    """Weights of one version as the recipe's rollout side holds them.

    `tensors` by Hugging Face name: BF16, or for a quantised linear E4M3 codes under `*.weight` and their decode
    scales (fp32, or E8M0 in mxfp8) under `*.weight_scale_inv`. `kv_scales` for every layer and q, k, v: a
    number, or at head granularity a tuple with one for each KV head; empty without FP8 KV. `fingerprints` of
    every tensor as sent.
    """

    version: int
    tensors: dict[str, Tensor]
    kv_scales: Scales
    fingerprints: dict[str, int]

    @property
    def header(self) -> SyncHeader:
        forms = {name: TensorForm(tuple(t.shape), t.dtype) for name, t in self.tensors.items()}
        return SyncHeader(self.version, forms, self.kv_scales)


@dataclass(frozen=True)
class EngineReport:
    """What an engine really holds, read from its live modules.

    `quantized_linears` names; `linear_dtype` of their weights; `kv_dtype` of the cache; `scales` in use;
    `fingerprints` of each held tensor by Hugging Face name; `version` None while dirty. `block_specs`: the
    different block shapes of the live quantised linears. `problems`: what the engine itself found to be
    inconsistent, such as a product that would not use the weights it holds.
    """

    engine: str
    version: int | None
    quantized_linears: tuple[str, ...]
    linear_dtype: str
    kv_dtype: str
    query_dtype: str
    scales: Scales
    fingerprints: dict[str, int]
    block_specs: tuple[BlockSpec, ...] = ()
    problems: tuple[str, ...] = ()
    memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """`logprobs` p, fp32 `[samples, width]`, NaN off the response; metrics of the batch."""

    logprobs: Tensor
    metrics: dict[str, float]


class RolloutEngine(Protocol):
    """Generates under weights that a sync brought; never under any others."""

    @property
    def device(self) -> torch.device:
        """Where `receive` wants its tensors."""
        ...

    def load_weights(self, payload: SyncPayload) -> None:
        """Install a version, all or nothing: on `SyncError` the engine is dirty and refuses to generate."""
        ...

    def begin_sync(self, header: SyncHeader) -> None:
        """`load_weights` in parts: this, then `receive` until every tensor has come, then `finish_sync`.

        Raises `SyncError` for a header that does not fit; the engine is dirty from here to the end of `finish_sync`.
        """
        ...

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Some of the header's tensors, each whole and once."""
        ...

    def finish_sync(self) -> None:
        """From here on the engine holds the version."""
        ...

    def sleep(self) -> None:
        """Give the device's memory to others; the next sync wakes the engine. Until then nothing can be asked of it."""
        ...

    def forget(self) -> None:
        """As after the build, for another run: of no version, until a sync; asleep if it was."""
        ...

    def stream(self, request: GenerateRequest) -> GroupStream:
        """Sample; `WeightVersionError` when dirty or of another version, also if it becomes so on the way.

        One stream at a time; nothing is sampled before the first `next`.
        """
        ...

    def generate(self, request: GenerateRequest) -> RolloutBatch:
        """The batch of `stream`."""
        ...

    def logprobs(self, weight_version: int, rows: TokenRows, prompt_lengths: Tensor) -> Tensor:
        """Log-probabilities of given responses, in the precision in which this engine generates; nothing is sampled.

        `rows` prompt + response; `prompt_lengths` int64 `[rows]`, from 1 to the row's length. Returns fp32
        `[rows, width]`, nats, at temperature 1; NaN off the response. `WeightVersionError` as in `generate`;
        `EngineError` for tokens that the model does not know and sequences that are too long.
        """
        ...

    def report(self) -> EngineReport: ...


class TrainerEngine(Protocol):
    """Owns the policy: master weights, optimiser state, version and the Q/K/V scales.

    The version counts calls of `train`, from 0.
    """

    @property
    def version(self) -> int: ...

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        """Quantise once, as this recipe's rollout side holds weights, from the BF16 compute copy."""
        ...

    def score(self, batch: RolloutBatch) -> Scores:
        """p for each response token and the `mismatch/*`, `importance/*`, `policy/entropy` metrics."""
        ...

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        """One step of `algorithm.updates_per_step` optimiser updates; the version rises by one.

        `logprobs` p from `score`; `advantages` `[samples]`.
        """
        ...

    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        """Replace the Q/K/V scales by those of these sequences; returns `calibration/*`.

        With `recipe.calibration.refresh` never, by 1 without a look at them; returns nothing.
        """
        ...

    def report(self) -> EngineReport: ...

    def offload(self) -> None:
        """Give the device's memory to others where that is configured; whatever needs it next takes it back."""
        ...

    def save(self, directory: Path) -> None:
        """Write all state that a bitwise continuation needs."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        ...
