"""The vLLM rollout engine, in the process that owns it: an actor, or a test."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import finalize

# Read when vLLM is imported.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from conf.schema import Recipe, VllmRollout
from tasks.engines import vllm_cpu, vllm_private, vllm_transfer
from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.groups import OpenGroups, drain
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import block_spec, scale_name
from tasks.engines.protocols import (
    EngineError,
    EngineReport,
    GenerateRequest,
    GroupStream,
    Prompt,
    RolloutBatch,
    SyncHeader,
    TensorForm,
    TokenRows,
)
from tasks.engines.rollout_checks import check_header, check_request, check_rows, check_version
from tasks.engines.sync_steps import StepwiseSync
from tasks.engines.vllm_arguments import engine_arguments, engine_environment, model_of
from tasks.engines.vllm_worker import ReadBack
from tasks.numerics.fp8_linear import BlockSpec
from tasks.numerics.kv_scales import Scales

LOWEST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this, so that samples would be of another distribution than asked for."""

_LARGEST_SEED = 2**63 - 1

for _noisy in (
    "vllm.renderers",
    "vllm.v1.worker.cpu_worker",
    "vllm.engine.arg_utils",
    "vllm.envs",
    # At each sync: that rotary tables are no weights, and that scales are not those of a checkpoint.
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.layers.quantization.kv_cache",
):
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


def _expected(model: nn.Module, quantized: tuple[str, ...], block: tuple[int, int]) -> dict[str, TensorForm]:
    """What a sync has to bring."""
    held = {name: TensorForm(tuple(p.shape), torch.bfloat16) for name, p in checkpoint_parameters(model).items()}
    for module in quantized:
        name = f"{module}.weight"
        rows, columns = held[name].shape
        held[name] = TensorForm((rows, columns), torch.float8_e4m3fn)
        held[scale_name(name)] = TensorForm((-(-rows // block[0]), -(-columns // block[1])), torch.float32)
    return held


@dataclass(frozen=True)
class _Slept:
    """What a sleeping engine held: version (None where its weights are dropped) and Q/K/V scales."""

    version: int | None
    scales: Scales


class VllmRolloutEngine(StepwiseSync):
    """See `tasks.engines.protocols.RolloutEngine`. Each request starts with an empty prefix cache.

    On a GPU a process can hold one engine in its life: graphs of a second cannot be captured, and the allocator of
    sleep mode serves one. After a failure there, the engine is closed and its process has to be replaced.
    """

    name = "vllm"

    def __init__(self, model_dir: Path, recipe: Recipe, settings: VllmRollout) -> None:
        vllm_private.check_version()
        self._recipe, self._settings = recipe, settings
        shapes = folder_shape(model_dir)
        model = model_of(model_dir, shapes, recipe.rollout_linears)
        vllm_private.check_process(model.mixture)
        self._held = _expected(shapes, model.plan.quantized, recipe.rollout_linears.weight_block)
        config: Any = shapes.config
        self._layers, self._vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
        positions = int(config.max_position_embeddings)
        self._positions = min(positions, settings.max_model_len or positions)
        self._on_cpu = bool(current_platform.is_cpu())
        self._arguments = engine_arguments(model, recipe, settings, vllm_transfer.BACKEND, self._on_cpu)
        self._slept: _Slept | None = None
        self._scales: Scales = {}
        self._llm: LLM | None = None
        self._release: Callable[[], object] = lambda: None
        self._build()

    def _build(self) -> None:
        """Start vLLM, with weights that mean nothing until a sync."""
        self.close()
        vllm_cpu.register()
        vllm_transfer.register()
        torch.set_num_threads(self._settings.threads)
        os.environ.update(engine_environment(self._recipe))
        with _undisturbed(), self._compilation():
            self._llm = LLM(**self._arguments)
        # Not at the interpreter's exit, when vLLM's modules are half gone.
        release = finalize(self, vllm_private.shut_down, self._llm)
        release.atexit = False
        self._release = release
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def close(self) -> None:
        """Give the memory back; the engine holds no version afterwards."""
        self._version, self._slept = None, None
        self._llm = None
        self._release()

    @property
    def _live(self) -> LLM:
        if self._llm is None:
            raise EngineError("the vLLM engine was closed")
        return self._llm

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self._on_cpu else "cuda")

    def _check(self, header: SyncHeader) -> None:
        check_header(header, self._held, self._layers if self._recipe.kv.quantized else 0, None)

    def _start(self) -> None:
        llm = self._live
        if llm.llm_engine.has_unfinished_requests():
            raise EngineError("requests are in flight")
        if self._slept is not None:
            # What it held is overwritten from here on: nothing to come back to.
            self._slept = replace(self._slept, version=None)
            llm.wake_up(tags=["weights"])
        llm.start_weight_update()

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        self._live.update_weights({"update_info": {"tensors": dict(tensors)}})

    def _finish(self, header: SyncHeader) -> None:
        if self._slept is not None:
            # Before the scales, which waking sets to 1; after the weights, for the room that loading takes.
            self._live.wake_up(tags=["kv_cache"])
            self._slept = None
        self._scales = header.kv_scales
        if header.kv_scales:
            self._install(_scale_tensors(header.kv_scales))
        self._live.finish_weight_update()
        self._forget_prefixes()

    def _forget(self) -> None:
        self._scales = {}
        if self._slept is not None:
            self._slept = _Slept(None, {})
        else:
            self._forget_prefixes()

    def _recover(self) -> None:
        """vLLM has no way back from half a sync."""
        if self._on_cpu:
            self._build()
        else:
            self.close()

    def sleep(self) -> None:
        """Level 1 keeps the weights in host memory for `wake`; after level 2 only a sync brings weights."""
        level = self._settings.sleep_level
        if level and self._slept is None:
            (taken,) = self._live.collective_rpc("fp8_grpo_taken_bytes")
            before = torch.cuda.mem_get_info()[0]
            self._live.sleep(level=level)
            self._slept, self._version = _Slept(self._version if level == 1 else None, self._scales), None
            freed = torch.cuda.mem_get_info()[0] - before
            if freed < taken:
                raise EngineError(f"asleep, the engine gave {freed} bytes back; its weights and KV cache take {taken}")

    def wake(self) -> None:
        """Undo `sleep` without a sync: the version, weights and scales of before."""
        if self._slept is not None:
            slept, self._slept = self._slept, None
            try:
                self._live.wake_up()
                self.restore_scales(slept.scales)
            except Exception as error:
                self._recover()
                raise EngineError(f"the vllm engine failed while it woke up: {error}") from error
            self._version = slept.version

    def restore_scales(self, scales: Scales) -> None:
        """Set Q/K/V scales and nothing else: waking the cache leaves those of vLLM's layers at 1."""
        if scales:
            self._live.start_weight_update()
            self._install(_scale_tensors(scales))
            self._live.finish_weight_update()

    def _forget_prefixes(self) -> None:
        if not self._live.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache")

    def generate(self, request: GenerateRequest) -> RolloutBatch:
        return drain(self.stream(request))

    def stream(self, request: GenerateRequest) -> GroupStream:
        """A group ends with the last of its samples, while vLLM goes on with the others."""
        check_version(self._version, request.weight_version)
        check_request(request, self._positions, self._vocabulary)
        if not request.greedy and request.temperature < LOWEST_TEMPERATURE:
            raise EngineError(f"temperature {request.temperature}: vLLM samples at {LOWEST_TEMPERATURE} and above")
        samples = [(prompt, seed) for prompt in request.prompts for seed in prompt.seeds]
        items = [(list(prompt.token_ids), _sampling(request, seed)) for prompt, seed in samples]
        groups = OpenGroups(request.prompts)
        outputs: dict[int, Any] = {}
        with self._in_flight():
            for ended in self._run(items):
                outputs |= ended
                complete = groups.add((sample, list(o.outputs[0].token_ids)) for sample, o in ended.items())
                if complete:
                    yield complete
                    check_version(self._version, request.weight_version)
        ordered = [outputs[sample] for sample in range(len(samples))]
        return _assemble([prompt for prompt, _ in samples], ordered, request.weight_version)

    def logprobs(self, weight_version: int, rows: TokenRows, prompt_lengths: Tensor) -> Tensor:
        check_version(self._version, weight_version)
        # vLLM cannot but sample a token behind each sequence.
        check_rows(rows, prompt_lengths, self._positions, self._vocabulary, spare=1)
        sequences = [row[:n].tolist() for row, n in zip(rows.tokens, rows.lengths, strict=True)]
        found = torch.full(rows.tokens.shape, float("nan"))
        outputs: dict[int, Any] = {}
        with self._in_flight():
            for ended in self._run([(ids, _scoring()) for ids in sequences]):
                outputs |= ended
        for row, (ids, start) in enumerate(zip(sequences, prompt_lengths.tolist(), strict=True)):
            if list(outputs[row].prompt_token_ids) != ids:
                raise EngineError(f"sequence {row}: vLLM returned another one in its place")
            pairs = list(zip(ids, outputs[row].prompt_logprobs, strict=True))
            taken = [entry[token].logprob for token, entry in pairs[start:]]
            found[row, start : len(ids)] = torch.tensor(taken)
        return found

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Around requests: one batch of them at a time, and none left behind by a failure."""
        if self._live.llm_engine.has_unfinished_requests():
            raise EngineError("another request is being sampled")
        # Whether a prompt's start is cached changes the shape of products, and with it the last bit of their sums.
        self._forget_prefixes()
        try:
            yield
        except BaseException:
            # Requests may be left in flight; they would hold the cache and mix with the next ones.
            self._recover()
            raise

    def _run(self, items: list[tuple[list[int], SamplingParams]]) -> Iterator[dict[int, Any]]:
        """Hand all sequences to vLLM and step it until each has ended; yields the outputs of a step by place."""
        engine = self._live.llm_engine
        for place, (ids, sampling) in enumerate(items):
            engine.add_request(str(place), tokens_input(ids), sampling)
        while engine.has_unfinished_requests():
            # Not around the loop: what is compiled and how belongs to the process, which goes on between two groups.
            with self._compilation():
                ended = engine.step()
            yield {int(output.request_id): output for output in ended}

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
        kinds = {a.backend for a in read.attentions} if self._recipe.kv.quantized else set()
        for backend in sorted(kinds - set(vllm_private.LIVE_SCALES)):
            yield f"attention backend {backend}: it is not known to read the K/V scales of the last sync at every step"
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
        # vLLM keeps seeds in signed 64-bit integers, in which -1 means "no seed"; those of the protocol are unsigned.
        seed=None if request.greedy else seed & _LARGEST_SEED,
        max_tokens=request.max_new_tokens,
        # The model's own end tokens are not those of the request.
        ignore_eos=True,
        stop_token_ids=list(request.eos_token_ids),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
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
