"""Weights and scales of a whole model from one process to a vLLM engine in another on the same GPU.

    python -m tests.gpu.check_scale_sync OUT.json [MODEL] [RECIPE ...]

MODEL is a file of conf/model (default qwen3_8b_base; weights are random). Needs vLLM, torch and transformers. For each
recipe: seconds of export, transfer and read-back, equal digests of repeated syncs, scales that survive sleep and wake,
and the engine's process killed in the middle of a sync. Exits with 1 if anything does not hold.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
import yaml
from torch import Tensor

from conf.schema import Recipe, TinyArchitecture, VllmRollout
from infra.device import device_facts
from infra.provenance import versions
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import block_spec, plan_linears, scale_name
from tasks.engines.protocols import GenerateRequest, Prompt, SyncError, SyncHeader, SyncPayload
from tasks.engines.tiny_model import tiny_config
from tasks.engines.transport import Arrivals, Chunk, send
from tasks.numerics.fingerprint import combine, fingerprints
from tasks.numerics.fp8 import quantize_weight_as

CONF = Path(__file__).parents[2] / "conf"
REPEATS, BUFFERS_MB, LIMIT_S = 5, (64, 256, 1024), 1.0
END_TOKEN = 1


def _settings() -> VllmRollout:
    settings = yaml.safe_load((CONF / "rollout" / "vllm.yaml").read_text())
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        settings |= {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": None, "sleep_level": 1}
        settings |= {"batch_size": 8, "max_model_len": 2048, "attention_backend": "FLASH_ATTN"}
        settings |= {"cudagraph_capture_sizes": [1, 2, 4, 8], "engine_args": {"compilation_config": graphs}}
    return VllmRollout.model_validate(settings)


class _Rollout:
    """What the child process does on request; methods are called by their names."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        from tasks.engines.vllm_rollout import VllmRolloutEngine

        start = time.perf_counter()
        self._engine = VllmRolloutEngine(folder, recipe, _settings())
        self._arrivals = Arrivals(self._engine)
        self.start_s = time.perf_counter() - start

    def begin(self, header: SyncHeader) -> str | None:
        return self._arrivals.begin(header)

    def receive(self, chunk: Chunk) -> None:
        self._arrivals.receive(chunk)

    def finish(self) -> None:
        self._arrivals.finish()

    def report(self) -> Any:
        return self._engine.report()

    def first_logprob(self, version: int) -> float:
        """Of the first token after one long prompt, greedy."""
        tokens = tuple(7 + i % 90 for i in range(300))
        request = GenerateRequest(version, (Prompt("p", tokens, (0,)),), 4, 1.0, (END_TOKEN,), greedy=True)
        return float(self._engine.generate(request).logprobs[0, 300])

    def free_gb(self) -> float:
        return torch.cuda.mem_get_info()[0] / 1e9

    def sleep(self, level: int) -> None:
        self._engine._settings = self._engine._settings.model_copy(update={"sleep_level": level})
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()


def _serve(link: Connection, folder: str, recipe: Recipe) -> None:
    rollout = _Rollout(Path(folder), recipe)
    link.send(("ok", rollout.start_s))
    while True:
        try:
            name, arguments = link.recv()
        except EOFError:
            return
        try:
            link.send(("ok", getattr(rollout, name)(*arguments)))
        except Exception as error:  # It goes to the other process, which raises it.
            link.send(("error", f"{type(error).__name__}: {error}"))


class Remote:
    """The engine in its own process; also the far end of a sync (`tasks.engines.transport.Receiver`)."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(folder), recipe))
        self.process.start()
        theirs.close()
        self.start_s = self._answer("starting")

    def _answer(self, stage: str) -> Any:
        try:
            kind, value = self._link.recv()
        except (EOFError, ConnectionResetError) as error:
            raise SyncError(f"{stage}: the rollout engine's process died") from error
        if kind == "error":
            raise SyncError(f"{stage}: {value}")
        return value

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            self._link.send((name, arguments))
        except OSError as error:
            raise SyncError(f"{name}: the rollout engine's process died") from error

    def ask(self, name: str, *arguments: Any) -> Any:
        self._call(name, *arguments)
        return self._answer(name)

    def begin(self, header: SyncHeader) -> str | None:
        place: str | None = self.ask("begin", header)
        return place

    def receive(self, chunk: Chunk) -> Callable[[], None]:
        self._call("receive", chunk)
        return lambda: self._answer("installing a chunk")

    def finish(self) -> None:
        self.ask("finish")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _masters(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Random BF16 weights under the model's names."""
    generator = torch.Generator(device=device).manual_seed(0)
    made = {}
    for name, parameter in folder_shape(folder).named_parameters():
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        made[name] = weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
    return made


def _export(masters: dict[str, Tensor], quantized: frozenset[str], recipe: Recipe, layers: int) -> SyncPayload:
    """As a trainer exports: quantised once, fingerprints of everything."""
    spec = block_spec(recipe.rollout_linears)
    tensors: dict[str, Tensor] = {}
    for name, weight in masters.items():
        if name.removesuffix(".weight") in quantized:
            q = quantize_weight_as(name, weight, spec.weight_format)
            tensors[name], tensors[scale_name(name)] = q.codes, q.scales
        else:
            tensors[name] = weight
    scales = {(n, part): 0.011 * (n + 1) for n in range(layers) for part in "qkv"} if recipe.kv.quantized else {}
    rounded = {key: float(torch.tensor(scale, dtype=torch.float32)) for key, scale in scales.items()}
    return SyncPayload(0, tensors, rounded, fingerprints(tensors))


class Findings:
    """Prints and keeps what was found."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.rows = recipe, []

    def note(self, what: str, holds: bool, **figures: Any) -> None:
        self.rows.append({"recipe": self.recipe, "what": what, "holds": holds, **figures})
        print(f"{'ok  ' if holds else 'FAIL'} {self.recipe:15} {what}: {figures}", flush=True)


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    _synchronize()
    start = time.perf_counter()
    value = call()
    _synchronize()
    return round(time.perf_counter() - start, 4), value


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(recipe: Recipe, folder: Path, found: Findings) -> None:
    """All findings of one recipe."""
    on_gpu = torch.cuda.is_available()
    shapes = folder_shape(folder)
    masters = _masters(folder, torch.device("cuda" if on_gpu else "cpu"))
    quantized = frozenset(plan_linears(shapes, recipe.rollout_linears).quantized)
    layers = int(shapes.config.num_hidden_layers)
    remote = Remote(folder, recipe)
    _export(masters, quantized, recipe, layers)
    export_s, payload = _seconds(lambda: _export(masters, quantized, recipe, layers))
    digest = combine(payload.fingerprints)
    for buffer_mb in BUFFERS_MB:
        times, digests, reads = [], set(), []
        for _ in range(REPEATS):
            seconds, sent = _seconds(lambda mb=buffer_mb: send(payload, remote, mb * 2**20))
            times.append(seconds)
            read_s, report = _seconds(lambda: remote.ask("report"))
            reads.append(read_s)
            digests.add(combine(report.fingerprints))
        same = digests == {digest} and report.problems == () and report.scales == payload.kv_scales
        found.note("repeated syncs give the digest that was sent", same, buffer_mb=buffer_mb, syncs=REPEATS)
        figures = {"transfer_s": times, "export_s": export_s, "read_back_s": reads, "transport": sent.transport}
        fast = not on_gpu or not recipe.rollout_linears.quantized or min(times[1:]) < LIMIT_S
        found.note("a sync takes", fast, buffer_mb=buffer_mb, gb=sent.bytes / 1e9, chunks=sent.chunks, **figures)
    _changes(remote, payload, found)
    if on_gpu:
        _sleep(remote, payload, found)
    _kill(remote, payload, found)


def _changes(remote: Remote, payload: SyncPayload, found: Findings) -> None:
    """Changed weights and changed scales reach what is computed, graphs and cached prompts included."""
    before = remote.ask("first_logprob", 0)
    changed = replace(payload, version=1, tensors=payload.tensors | {"model.norm.weight": _norm(payload)})
    send(changed, remote, 2**28)
    after = remote.ask("first_logprob", 1)
    found.note("changed weights change a cached prompt's first token", abs(after - before) > 1e-3, by=after - before)
    for part in "qkv" if payload.kv_scales else "":
        scales = {k: float(torch.tensor(s * 7.7)) if k[1] == part else s for k, s in payload.kv_scales.items()}
        send(replace(payload, version=2, kv_scales=scales), remote, 2**28)
        report, moved = remote.ask("report"), remote.ask("first_logprob", 2)
        exact = report.scales == scales and report.problems == ()
        found.note(f"{part} scales are read back exactly", exact)
        found.note(f"{part} scales change the output", moved != before, query=report.query_dtype, by=moved - before)
    send(payload, remote, 2**28)
    again = remote.ask("first_logprob", 0)
    found.note("the first weights and scales give the first output again", again == before)


def _norm(payload: SyncPayload) -> Tensor:
    return payload.tensors["model.norm.weight"] * 1.5


def _sleep(remote: Remote, payload: SyncPayload, found: Findings) -> None:
    """Memory comes back, scales survive, at level 1 without a sync and at level 2 with one."""
    before, digest = remote.ask("first_logprob", 0), combine(payload.fingerprints)
    awake = [remote.ask("free_gb")]
    for level in (1, 2, 1, 2):
        asleep_s, _ = _seconds(lambda level=level: remote.ask("sleep", level))
        free = remote.ask("free_gb")
        if level == 1:
            wake_s, _ = _seconds(lambda: remote.ask("wake"))
        else:
            wake_s, _ = _seconds(lambda: send(payload, remote, 2**28))
        report, logprob = remote.ask("report"), remote.ask("first_logprob", 0)
        holds = combine(report.fingerprints) == digest and report.scales == payload.kv_scales and report.problems == ()
        awake.append(remote.ask("free_gb"))
        how = "wake" if level == 1 else "sync"
        figures = {"sleep_s": asleep_s, f"{how}_s": wake_s, "given_back_gb": round(free - awake[-2], 2)}
        found.note(f"level {level} sleep, {how}: weights and scales", holds and logprob == before, **figures)
    # After a sync the buffers of both ends stay allocated, so that like is compared with like.
    same = max(abs(awake[3] - awake[1]), abs(awake[4] - awake[2])) < 0.01 * awake[1]
    found.note("memory after the second round is that after the first", same, free_gb=[round(gb, 3) for gb in awake])


def _kill(remote: Remote, payload: SyncPayload, found: Findings) -> None:
    """SIGKILL in the middle of a sync."""
    killed: list[float] = []

    class Killing:
        begin, finish = remote.begin, remote.finish

        def receive(self, chunk: Chunk) -> Callable[[], None]:
            wait = remote.receive(chunk)
            if not killed:
                killed.append(time.perf_counter())
                os.kill(remote.process.pid, signal.SIGKILL)
            return wait

    try:
        send(payload, Killing(), 2**20)
        message = "the sync went through"
    except SyncError as error:
        message = str(error)
    seconds = time.perf_counter() - killed[0]
    remote.end()
    found.note("an engine killed in a sync ends it", "process died" in message, seconds=seconds, message=message)


def main(arguments: list[str]) -> int:
    target, model = Path(arguments[0]), (arguments[1:2] or ["qwen3_8b_base"])[0]
    names, rows = arguments[2:] or ["bf16", "fp8_rollout_kv"], []
    architecture = TinyArchitecture.model_validate(
        yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())["architecture"]
    )
    conditions = {"gpu": device_facts().name, "versions": versions(), "model": model}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny_config(architecture, eos_token_id=END_TOKEN).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"architectures": ["Qwen3ForCausalLM"]}))
        for name in names:
            found = Findings(name)
            recipe = Recipe.model_validate(yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text()))
            try:
                check(recipe, folder, found)
            except SyncError as error:
                found.note("ran to the end", False, error=str(error))
            rows += found.rows
            target.write_text(json.dumps([row | conditions for row in rows], indent=1))
    return 0 if rows and all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
