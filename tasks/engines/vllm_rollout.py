"""The vLLM rollout engine, in the process that owns it: an actor, or a test."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

# Read when vLLM is imported. The sender's tensors reach the worker without a copy only within one process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from conf.schema import Recipe, VllmRollout
from tasks.engines import vllm_cpu, vllm_private, vllm_transfer
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import block_spec, scale_name
from tasks.engines.protocols import (
    EngineError,
    EngineReport,
    GenerateRequest,
    Prompt,
    RolloutBatch,
    SyncError,
    SyncPayload,
    TokenRows,
)
from tasks.engines.rollout_checks import Held, check_payload, check_request, check_rows, check_version
from tasks.engines.vllm_arguments import engine_arguments, model_of
from tasks.engines.vllm_worker import ReadBack
from tasks.numerics.fp8_linear import BlockSpec
from tasks.numerics.kv_scales import Scales

LOWEST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this, so that samples would be of another distribution than asked for."""

for _noisy in ("vllm.renderers", "vllm.v1.worker.cpu_worker", "vllm.engine.arg_utils", "vllm.envs"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what building an engine does to its process: random states, torch.set_num_threads, LD_PRELOAD."""
    numbers, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, preload = torch.set_num_threads, os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        random.setstate(numbers)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
        torch.set_num_threads = set_threads
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


def _expected(model: nn.Module, quantized: tuple[str, ...], block: tuple[int, int]) -> dict[str, Held]:
    """What a sync has to bring."""
    held = {name: Held(tuple(p.shape), torch.bfloat16) for name, p in model.named_parameters()}
    for module in quantized:
        name = f"{module}.weight"
        rows, columns = held[name].shape
        held[name] = Held((rows, columns), torch.float8_e4m3fn)
        held[scale_name(name)] = Held((-(-rows // block[0]), -(-columns // block[1])), torch.float32)
    return held


class VllmRolloutEngine:
    """See `tasks.engines.protocols.RolloutEngine`. Each request starts with an empty prefix cache."""

    name = "vllm"

    def __init__(self, model_dir: Path, recipe: Recipe, settings: VllmRollout) -> None:
        vllm_private.check_version()
        self._recipe, self._settings = recipe, settings
        shapes = folder_shape(model_dir)
        model = model_of(model_dir, shapes, recipe.rollout_linears)
        self._held = _expected(shapes, model.plan.quantized, recipe.rollout_linears.weight_block)
        config: Any = shapes.config
        self._layers, self._vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
        positions = int(config.max_position_embeddings)
        self._positions = min(positions, settings.max_model_len or positions)
        self._on_cpu = bool(current_platform.is_cpu())
        self._arguments = engine_arguments(model, recipe, settings, vllm_transfer.BACKEND, self._on_cpu)
        self._version: int | None = None
        self._llm: LLM | None = None
        self._release: Callable[[], object] = lambda: None
        self._build()

    def _build(self) -> None:
        """Start vLLM, with weights that mean nothing until a sync."""
        self.close()
        vllm_cpu.register()
        vllm_transfer.register()
        torch.set_num_threads(self._settings.threads)
        with _undisturbed():
            self._llm = LLM(**self._arguments)
        # Not at the interpreter's exit, when vLLM's modules are half gone.
        release = finalize(self, vllm_private.shut_down, self._llm)
        release.atexit = False
        self._release = release
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def close(self) -> None:
        """Give the memory back; the engine holds no version afterwards."""
        self._version = None
        self._llm = None
        self._release()

    @property
    def _live(self) -> LLM:
        if self._llm is None:
            raise EngineError("the vLLM engine was closed")
        return self._llm

    def load_weights(self, payload: SyncPayload) -> None:
        self._version = None
        check_payload(payload, self._held, self._layers if self._recipe.kv.quantized else 0, None)
        try:
            self._install(payload)
        except Exception as error:
            # Whatever it was, layers may be half loaded, and vLLM has no way back.
            self._build()
            raise SyncError(f"vLLM failed during the sync of version {payload.version}: {error}") from error
        self._version = payload.version

    def _install(self, payload: SyncPayload) -> None:
        llm = self._live
        if llm.llm_engine.has_unfinished_requests():
            raise EngineError("requests are in flight")
        llm.start_weight_update()
        llm.update_weights({"update_info": {"tensors": payload.tensors | _scale_tensors(payload.kv_scales)}})
        llm.finish_weight_update()
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self._live.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache")

    def generate(self, request: GenerateRequest) -> RolloutBatch:
        check_version(self._version, request.weight_version)
        check_request(request, self._positions, self._vocabulary)
        if not request.greedy and request.temperature < LOWEST_TEMPERATURE:
            raise EngineError(f"temperature {request.temperature}: vLLM samples at {LOWEST_TEMPERATURE} and above")
        samples = [(prompt, seed) for prompt in request.prompts for seed in prompt.seeds]
        outputs = self._run(
            [list(prompt.token_ids) for prompt, _ in samples], [_sampling(request, seed) for _, seed in samples]
        )
        return _assemble([prompt for prompt, _ in samples], outputs, request.weight_version)

    def logprobs(self, weight_version: int, rows: TokenRows, prompt_lengths: Tensor) -> Tensor:
        check_version(self._version, weight_version)
        # vLLM cannot but sample a token behind each sequence.
        check_rows(rows, prompt_lengths, self._positions, self._vocabulary, spare=1)
        sequences = [row[:n].tolist() for row, n in zip(rows.tokens, rows.lengths, strict=True)]
        found = torch.full(rows.tokens.shape, float("nan"))
        outputs = self._run(sequences, [_scoring() for _ in sequences])
        for row, (ids, start, output) in enumerate(zip(sequences, prompt_lengths.tolist(), outputs, strict=True)):
            if list(output.prompt_token_ids) != ids:
                raise EngineError(f"sequence {row}: vLLM returned another one in its place")
            pairs = list(zip(ids, output.prompt_logprobs, strict=True))
            taken = [entry[token].logprob for token, entry in pairs[start:]]
            found[row, start : len(ids)] = torch.tensor(taken)
        return found

    def _run(self, sequences: list[list[int]], sampling: list[SamplingParams]) -> list[Any]:
        """vLLM's answers to these token ids, in their order."""
        # Whether a prompt's start is cached changes the shape of products, and with it the last bit of their sums.
        self._forget_prefixes()
        try:
            with self._compilation():
                return self._live.generate([{"prompt_token_ids": ids} for ids in sequences], sampling, use_tqdm=False)
        except BaseException:
            # Requests may be left in flight; they would hold the cache and mix with the next ones.
            self._build()
            raise

    def _compilation(self) -> AbstractContextManager[object]:
        """An eager engine on CPU compiles nothing, not even vLLM's small helpers, which would need a C++ compiler."""
        eager = self._on_cpu and self._arguments["enforce_eager"]
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def report(self) -> EngineReport:
        (read,) = self._live.collective_rpc("fp8_grpo_read_back")
        kv, query = self._recipe.kv.quantized, {a.query_dtype for a in read.attentions}
        return EngineReport(
            engine=self.name,
            version=self._version,
            quantized_linears=tuple(read.linears),
            linear_dtype="/".join(sorted(set(read.linear_dtypes))) or "bfloat16",
            kv_dtype="/".join(sorted({a.cache_dtype for a in read.attentions})),
            query_dtype="/".join(sorted(query)),
            scales={(a.layer, part): a.device[part] for a in read.attentions for part in a.device} if kv else {},
            fingerprints=read.fingerprints,
            block_specs=self._block_specs(read),
            problems=tuple(self._problems(read)) if self._version is not None else (),
            memory={
                "memory/weights_gb": sum(read.sizes.values()) / 1e9,
                "memory/kv_capacity_tokens": float(vllm_private.cache_tokens(self._live)),
            },
        )

    def _block_specs(self, read: ReadBack) -> tuple[BlockSpec, ...]:
        """The recipe's formats with what the live layers say in its place."""
        recipe = block_spec(self._recipe.rollout_linears)
        found = (
            replace(recipe, weight=(rows, columns), group=group, power_of_two=power_of_two)
            for rows, columns, group, power_of_two in read.blocks
        )
        return tuple(dict.fromkeys(found))

    def _problems(self, read: ReadBack) -> Iterator[str]:
        yield from read.problems
        # A BF16 cache has no scales; vLLM keeps numbers in their place that nothing reads.
        for attention in read.attentions if self._recipe.kv.quantized else ():
            for part, value in attention.device.items():
                if any(mirror != value for mirror in attention.mirrors[part]):
                    mirrors = ", ".join(map(str, attention.mirrors[part]))
                    yield f"layer {attention.layer} {part}: scale {value} on the device, {mirrors} on the host"


def _scale_tensors(scales: Scales) -> dict[str, Tensor]:
    """Q/K/V scales under the names that FP8 checkpoints have for them, scalar fp32."""
    return {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(scale, dtype=torch.float32)
        for (layer, part), scale in scales.items()
    }


def _sampling(request: GenerateRequest, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if request.greedy else request.temperature,
        # vLLM reads -1 as "no seed"; the protocol's seeds are not negative.
        seed=None if request.greedy else seed,
        max_tokens=request.max_new_tokens,
        # The model's own end tokens are not those of the request.
        ignore_eos=True,
        stop_token_ids=list(request.eos_token_ids),
        logprobs=0,
        detokenize=False,
    )


def _scoring() -> SamplingParams:
    """A whole sequence as a prompt, whose log-probabilities know no temperature; greedy, so no random state moves."""
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def _assemble(prompts: list[Prompt], outputs: list[Any], version: int) -> RolloutBatch:
    """Put prompt and response of every sample side by side, right-padded."""
    results = [output.outputs[0] for output in outputs]
    prompt_lengths = torch.tensor([len(p.token_ids) for p in prompts])
    response_lengths = torch.tensor([len(r.token_ids) for r in results])
    width = int((prompt_lengths + response_lengths).max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    logprobs = torch.full((len(prompts), width), float("nan"))
    for sample, (prompt, output, result) in enumerate(zip(prompts, outputs, results, strict=True)):
        if tuple(output.prompt_token_ids) != prompt.token_ids:
            raise EngineError(f"prompt {prompt.id}: vLLM returned another prompt in its place")
        start, ids = len(prompt.token_ids), list(result.token_ids)
        tokens[sample, :start] = torch.tensor(prompt.token_ids)
        tokens[sample, start : start + len(ids)] = torch.tensor(ids)
        taken = [entry[token].logprob for token, entry in zip(ids, result.logprobs, strict=True)]
        logprobs[sample, start : start + len(ids)] = torch.tensor(taken)
    truncated = torch.tensor([r.finish_reason == "length" for r in results])
    versions = torch.full((len(prompts),), version)
    return RolloutBatch(tokens, prompt_lengths, response_lengths, logprobs, truncated, versions)
