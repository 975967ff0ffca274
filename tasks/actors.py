"""The Ray actors that hold the engines: one process each, driven by the flow's tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from torch import Tensor

from conf.schema import Deadlines, Recipe, RunConfig
from infra.provenance import peak_memory_gb
from tasks.deadlines import limit_of
from tasks.engines.protocols import (
    EngineError,
    EngineReport,
    FinishedGroup,
    GenerateRequest,
    RolloutBatch,
    RolloutEngine,
    Scores,
    SyncHeader,
    TokenRows,
    TrainerEngine,
)
from tasks.engines.registry import build_rollout, build_trainer
from tasks.engines.transport import Arrivals, Chunk, send
from tasks.engines.warm_start import WarmStartSpec, cached_warm_start
from tasks.followers import build_ranks
from tasks.kernels import compiled_kernels
from tasks.numerics.mismatch_detail import TokenOffence, top_offenders
from tasks.rank_checkpoint import publish, restore
from tasks.ranks import Ranks
from tasks.rollout_link import RolloutLink

Metrics = dict[str, float]


class RolloutActor:
    """Owns one rollout engine."""

    def __init__(self) -> None:
        self._built: RolloutEngine | None = None
        self._arrivals: Arrivals | None = None

    def ping(self) -> str:
        return "rollout"

    def build(self, config: RunConfig, recipe: Recipe, model_dir: str, store_url: str) -> None:
        """Build or replace the engine; the new one is empty until a sync. `store_url` as every process reads it."""
        self._built = self._arrivals = None
        with compiled_kernels(config, store_url):
            self._built = build_rollout(config, recipe, Path(model_dir))
        self._arrivals = Arrivals(self._built)

    def forget(self) -> None:
        """For another run: the engine is as after its build."""
        self._engine.forget()
        self._arrivals = Arrivals(self._engine)

    @property
    def _engine(self) -> RolloutEngine:
        if self._built is None:
            raise EngineError("the rollout engine was not built")
        return self._built

    @property
    def _receiving(self) -> Arrivals:
        if self._arrivals is None:
            raise EngineError("the rollout engine was not built")
        return self._arrivals

    def begin_sync(self, header: SyncHeader) -> str | None:
        return self._receiving.begin(header)

    def receive(self, chunk: Chunk) -> None:
        self._receiving.receive(chunk)

    def finish_sync(self) -> None:
        self._receiving.finish()

    def sleep(self) -> None:
        self._engine.sleep()

    def report(self) -> EngineReport:
        return self._engine.report()

    def generate(self, request: GenerateRequest) -> Iterator[tuple[FinishedGroup, ...] | RolloutBatch | Metrics]:
        """Groups as they end, then the batch, then its counts.

        The batch is an item of its own, so that it can pass to the trainer as a reference. Whoever has the counts knows
        that it was stored.
        """
        batch = yield from self._engine.stream(request)
        yield batch
        yield {
            "tokens": float(batch.response_lengths.sum()),
            "samples": float(batch.response_lengths.numel()),
            "truncated": float(batch.truncated.sum()),
            "memory/peak_gb": peak_memory_gb(),
        }

    def logprobs(self, weight_version: int, rows: TokenRows, prompt_lengths: Tensor) -> Tensor:
        return self._engine.logprobs(weight_version, rows, prompt_lengths)


class TrainerActor:
    """Owns the trainer engine, or rank 0 of it and the lead of the others; before that the warm start.

    What it is asked for holds for all ranks; a failure of one is a `RankError` that names it.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._built: TrainerEngine | None = None
        self._local: TrainerEngine | None = None

    def ping(self) -> str:
        return "trainer"

    def warm_start(self, spec: WarmStartSpec, cache: str, progress_file: str) -> tuple[str, bool]:
        """Folder of the warm-started model, and whether it came from the cache."""

        def report(step: int, loss: float) -> None:
            if step % 10 == 0:
                Path(progress_file).write_text(json.dumps({"step": step, "loss": loss}))

        folder, cached = cached_warm_start(spec, Path(cache), report)
        return str(folder), cached

    def build(self, config: RunConfig, model_dir: str, peers: Sequence[ActorHandle] = ()) -> None:
        """Build or replace the engine; `peers`: the `FollowerActor` of rank 1 and of each further one."""
        self._built = self._local = None
        self._ranks.close()
        self._ranks = Ranks(peers, config.deadlines)
        self._local, self._built = build_ranks(config, model_dir, self._ranks, self.make)

    def make(self, config: RunConfig, model_dir: Path, rank: int, url: str | None) -> TrainerEngine:
        return build_trainer(config, model_dir, rank, url)

    @property
    def _engine(self) -> TrainerEngine:
        """All ranks as one."""
        if self._built is None:
            raise EngineError("the trainer engine was not built")
        return self._built

    @property
    def _own(self) -> TrainerEngine:
        """Rank 0's."""
        if self._local is None:
            raise EngineError("the trainer engine was not built")
        return self._local

    @property
    def _peak_gb(self) -> float:
        return max(peak_memory_gb(), self._ranks.peak_gb)

    def send_weights(
        self, recipe: Recipe, rollout: ActorHandle, buffer_mb: int, deadlines: Deadlines
    ) -> dict[str, Any]:
        """Quantise once and install in the rollout actor, in chunks of `buffer_mb` MiB.

        Returns what was sent in short (for the audit), and `metrics`: seconds of both parts, and the bytes.
        """
        start = time.perf_counter()
        payload = self._engine.export_weights(recipe)
        exported = time.perf_counter()
        sent = send(payload, RolloutLink(rollout, limit_of(deadlines, "sync_s")), buffer_mb * 2**20)
        record = {"version": payload.version, "scales": payload.kv_scales, "fingerprints": payload.fingerprints}
        # Offloading gives back what nobody holds, and this is a whole model in the device's memory.
        del payload
        self._engine.offload()
        metrics = {
            "time/sync_export_s": exported - start,
            "time/sync_transfer_s": time.perf_counter() - exported,
            "sync/gb": sent.bytes / 1e9,
        }
        return record | {"metrics": metrics}

    def report(self) -> EngineReport:
        return self._engine.report()

    def offload(self) -> None:
        self._engine.offload()

    def score(self, batch: RolloutBatch, offenders: int) -> tuple[Metrics, tuple[TokenOffence, ...], Tensor]:
        """Three results: metrics, the `offenders` tokens on which the engines disagree most, and p itself."""
        scores: Scores = self._engine.score(batch)
        found = top_offenders(scores.logprobs, batch.logprobs, batch.response_mask(), batch.tokens, offenders)
        tokens = float(batch.lengths.sum())
        return scores.metrics | {"tokens": tokens, "memory/peak_gb": self._peak_gb}, found, scores.logprobs

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> Metrics:
        return self._engine.train(batch, logprobs, advantages) | {"memory/peak_gb": self._peak_gb}

    def calibrate(self, rows: TokenRows) -> Metrics:
        return self._engine.calibrate(rows)

    def calibrate_on_batch(self, batch: RolloutBatch, max_sequences: int) -> Metrics:
        """Calibrate on an even spread of the batch's sequences, at most `max_sequences` of them."""
        rows = batch.rows()
        count = rows.tokens.shape[0]
        if count > max_sequences:
            # Neighbouring samples share a prompt, so a prefix of the batch would see few prompts.
            chosen = [i * count // max_sequences for i in range(max_sequences)]
            rows = TokenRows(rows.tokens[chosen], rows.lengths[chosen])
        return self._engine.calibrate(rows)

    def save(
        self,
        store: tuple[str, Mapping[str, Any]],
        run: str,
        step: int,
        extra: Mapping[str, bytes],
        meta: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Publish the state of all ranks and `extra` files as one checkpoint; returns the manifest."""
        return publish(self._ranks, self._own, store, run, step, extra, meta).model_dump()

    def restore(self, store: tuple[str, Mapping[str, Any]], run: str, step: int | None = None) -> dict[str, Any]:
        """See `tasks.rank_checkpoint.restore`; returns the manifest."""
        return restore(self._ranks, self._own, store, run, step).model_dump()
