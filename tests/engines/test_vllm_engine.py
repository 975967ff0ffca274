"""What only the vLLM engine can get wrong: half a sync, a read-back that repeats the message, its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from conf.schema import VllmRollout
from tasks.audit import AuditError, audit
from tasks.engines.groups import drain
from tasks.engines.protocols import (
    EngineError,
    GenerateRequest,
    Prompt,
    SyncError,
    SyncPayload,
    WeightVersionError,
)
from tests.contract.engines import (
    NEW_TOKENS,
    ROLLOUT_ENGINES,
    TRAINER_ENGINES,
    Workbench,
    assert_same,
    linears_of,
    make_model,
    make_outlier_model,
)
from tests.engines.mixtures import save_mixture

pytest.importorskip("vllm", reason="vLLM is not installed (extra engines-cpu)")

from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

from tasks.engines.transport import Arrivals, Chunk, send
from tasks.engines.vllm_rollout import VllmRolloutEngine, _sampling
from tasks.engines.vllm_transfer import InProcessTransfer, plain_values

VLLM = next(engine for engine in ROLLOUT_ENGINES if engine.name == "vllm")
RECIPE = "fp8_e2e_kv"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(VLLM, TRAINER_ENGINES[0], make_model(tmp_path_factory.mktemp("vllm-model")))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _engine(bench: Workbench, recipe: str, *overrides: str) -> VllmRolloutEngine:
    engine = bench.rollout(recipe, *overrides)
    assert isinstance(engine, VllmRolloutEngine)
    return engine


def _change(engine: VllmRolloutEngine, name: str, change: Any) -> None:
    """Reach into the live model, as a bug would."""

    def apply(model: torch.nn.Module) -> None:
        change(model.get_submodule(name))

    engine._live.apply_model(apply)


class InProcess:
    """The far end of a sync in this process."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.begin, self.finish, self._arrivals = arrivals.begin, arrivals.finish, arrivals

    def receive(self, chunk: Chunk) -> Callable[[], None]:
        self._arrivals.receive(chunk)
        return lambda: None


def _attention(engine: VllmRolloutEngine) -> Any:
    (found,) = engine._live.apply_model(lambda model: model.get_submodule(f"{LAYER}.self_attn.attn"))
    return found


def _audit(bench: Workbench, engine: VllmRolloutEngine, recipe: str) -> None:
    payload = bench.payload(recipe)
    sent = {"version": 0, "scales": payload.kv_scales, "fingerprints": payload.fingerprints}
    audit(engine.report(), sent, bench.recipe(recipe), () if recipe == "bf16" else linears_of(0, 1))


def test_a_failure_inside_vllm_leaves_a_dirty_engine_that_a_good_sync_mends(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, payload = _engine(bench, RECIPE), bench.payload(RECIPE)
    before = engine.generate(bench.request())
    receive = InProcessTransfer.receive_weights

    def half(self: InProcessTransfer, update: Any) -> None:
        names = list(update.tensors)
        receive(self, replace(update, tensors={name: update.tensors[name] for name in names[: len(names) // 2]}))
        raise RuntimeError("the line went dead")

    with monkeypatch.context() as patch:
        patch.setattr(InProcessTransfer, "receive_weights", half)
        with pytest.raises(SyncError, match="during the sync of version 3: the line went dead"):
            engine.load_weights(replace(payload, version=3))
    assert engine.report().version is None
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds None"):
        engine.generate(bench.request())
    engine.load_weights(payload)
    _audit(bench, engine, RECIPE)
    after = engine.generate(bench.request())
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [4096, 100_000])
def test_weights_in_small_chunks_are_the_same_weights(bench: Workbench, limit: int) -> None:
    """A layer's tensors come in several updates then, and layers end in the middle of one."""
    engine, payload = _engine(bench, RECIPE), bench.payload(RECIPE)
    whole = engine.generate(bench.request())
    sent = send(replace(payload, version=5), InProcess(Arrivals(engine)), limit)
    assert sent.chunks > 1
    report = engine.report()
    assert (report.version, report.fingerprints, report.scales) == (5, payload.fingerprints, payload.kv_scales)
    parts = engine.generate(bench.request(weight_version=5))
    torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=0, atol=0, equal_nan=True)


def test_scales_alone_can_be_set_again(bench: Workbench) -> None:
    """As after waking up, when vLLM has set them to 1."""
    engine, payload = _engine(bench, RECIPE), bench.payload(RECIPE)
    before = engine.report()
    for layer in range(2):
        _change(engine, f"model.layers.{layer}.self_attn.attn", _device_scale)
    assert engine.report() != before
    engine.restore_scales(payload.kv_scales)
    assert engine.report() == before


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rollout_kv"])
def test_an_honest_engine_passes_the_audit(bench: Workbench, recipe: str) -> None:
    _audit(bench, _engine(bench, recipe), recipe)


def _one_code(module: Any) -> None:
    module.weight.data.view(torch.uint8)[3, 5] ^= 1


def _one_block_scale(module: Any) -> None:
    module.weight_scale_inv.data[0, 0] *= 1.5


def _other_product(module: Any) -> None:
    wrong = torch.zeros(module.output_size, module.input_size, dtype=torch.bfloat16)
    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, wrong, bias)


def _other_logits(module: Any) -> None:
    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight + 1, bias)


def _norm(module: Any) -> None:
    module.weight.data[0] += 1


def _device_scale(module: Any) -> None:
    module._k_scale.fill_(1.0)


def _host_scale(module: Any) -> None:
    module._v_scale_float = 1.0


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    "recipe, name, change, message",
    [
        ("fp8_rollout", f"{LAYER}.self_attn.qkv_proj", _one_code, "self_attn.q_proj.weight: fingerprint"),
        ("fp8_rollout", f"{LAYER}.mlp.gate_up_proj", _one_block_scale, "mlp.gate_proj.weight_scale_inv: fingerprint"),
        ("bf16", f"{LAYER}.mlp.down_proj", _other_product, "down_proj.weight: the product does not use the weights"),
        ("bf16", "model.embed_tokens", _other_logits, "logits do not come from the weights that are held"),
        ("bf16", "model.norm", _norm, "model.norm.weight: fingerprint"),
        ("fp8_rollout_kv", f"{LAYER}.self_attn.attn", _device_scale, "layer 1 k: scale 1.0 on the device"),
        ("fp8_rollout_kv", f"{LAYER}.self_attn.attn", _host_scale, "layer 1 v: .* 1.0, .* on the host"),
    ],
)
def test_what_the_live_model_really_holds_is_reported(
    bench: Workbench, recipe: str, name: str, change: Any, message: str
) -> None:
    engine = _engine(bench, recipe)
    _audit(bench, engine, recipe)
    _change(engine, name, change)
    with pytest.raises(AuditError, match=message):
        _audit(bench, engine, recipe)


def test_zeros_without_sign_are_the_only_freedom_of_a_packed_weight(bench: Workbench) -> None:
    engine, payload, name = _engine(bench, "bf16"), bench.payload("bf16"), f"{LAYER}.mlp.up_proj.weight"
    signed = payload.tensors[name].clone()
    signed[0, :4] = torch.tensor([-0.0, 0.0, 1e-39, -1e-39])
    engine.load_weights(replace(payload, tensors=payload.tensors | {name: signed}))
    assert engine.report().problems == ()
    assert plain_values(signed)[0, :4].view(torch.int16).tolist() == [0, 0, 0, 0]


def test_a_cached_prompt_is_computed_anew_after_a_sync(tmp_path: Path) -> None:
    """The prompt is longer than a block of the cache, which vLLM would find again by its token ids."""
    bench = Workbench(VLLM, TRAINER_ENGINES[0], make_model(tmp_path, max_position_embeddings=512))
    engine, payload = _engine(bench, "bf16"), bench.payload("bf16")
    prompt = Prompt("long", tuple(7 + i % 90 for i in range(300)), (1, 2))
    request = bench.request((prompt,), greedy=True)
    before = engine.generate(request)
    assert torch.equal(engine.generate(request).tokens, before.tokens)
    name = f"{LAYER}.self_attn.v_proj.weight"
    changed: SyncPayload = replace(payload, version=1, tensors=payload.tensors | {name: 2 * payload.tensors[name]})
    engine.load_weights(changed)
    after = engine.generate(replace(request, weight_version=1))
    assert float((after.logprobs[:, 300] - before.logprobs[:, 300]).abs().min()) > 0.01
    engine.load_weights(payload)
    again = engine.generate(request)
    torch.testing.assert_close(again.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)


def _other_head(module: Any) -> None:
    module.weight = torch.nn.Parameter(module.weight + 1, requires_grad=False)


def test_a_tied_head_of_its_own_follows_the_embedding(tmp_path: Path) -> None:
    """Llama's lm_head shares the embedding's weight, yet is a module of its own, with its own packed copy on CPU."""
    bench = Workbench(VLLM, TRAINER_ENGINES[0], make_outlier_model(tmp_path, 1.0, tied=True))
    engine, payload = _engine(bench, "bf16"), bench.payload("bf16")
    _audit(bench, engine, "bf16")
    before, name = engine.generate(bench.request(greedy=True)), "model.embed_tokens.weight"
    engine.load_weights(replace(payload, version=1, tensors=payload.tensors | {name: payload.tensors[name].flip(0)}))
    assert engine.report().problems == ()
    assert not torch.equal(engine.generate(bench.request(greedy=True, weight_version=1)).tokens, before.tokens)
    engine.load_weights(payload)
    _audit(bench, engine, "bf16")
    assert_same(engine.generate(bench.request(greedy=True)), before)
    _change(engine, "lm_head", _other_head)
    with pytest.raises(AuditError, match=r"lm_head\.weight: is not the embedding"):
        _audit(bench, engine, "bf16")


def test_engines_of_one_process_do_not_disturb_each_other(bench: Workbench) -> None:
    first, second = _engine(bench, "bf16"), _engine(bench, RECIPE)
    before = second.generate(bench.request())
    first.close()
    with pytest.raises(EngineError, match="was closed"):
        first.load_weights(bench.payload("bf16"))
    after = second.generate(bench.request())
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)


def test_a_mixture_of_experts_after_a_dense_model_is_refused(bench: Workbench, tmp_path: Path) -> None:
    """vLLM would fail in the middle of building it. The first engine of a process decides, hence the fresh start."""
    destroy_model_parallel()
    destroy_distributed_environment()
    _engine(bench, "bf16").close()
    config = bench.config("bf16")
    assert isinstance(config.rollout, VllmRollout)
    with pytest.raises(EngineError, match=r"this process has run a dense model in vLLM.*; allowed: .* of its own"):
        VllmRolloutEngine(save_mixture(tmp_path), config.recipe, config.rollout)


def test_building_an_engine_leaves_the_process_as_it_was(bench: Workbench) -> None:
    preload, state = os.environ.get("LD_PRELOAD"), torch.get_rng_state()
    _engine(bench, "bf16")
    assert os.environ.get("LD_PRELOAD") == preload
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


def test_an_eager_engine_compiles_nothing(bench: Workbench) -> None:
    """vLLM 0.26 compiles a helper while it starts: half a minute, and a C++ compiler, for nothing."""
    torch.compiler.reset()
    counters.clear()
    _engine(bench, RECIPE).generate(bench.request())
    assert not counters["frames"]


def test_a_temperature_that_vllm_would_raise_is_refused(bench: Workbench) -> None:
    with pytest.raises(EngineError, match=r"temperature 0\.005: vLLM samples at 0\.01 and above"):
        _engine(bench, "bf16").generate(bench.request(temperature=0.005))


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_fits_the_integers_in_which_vllm_keeps_it_on_a_gpu(bench: Workbench, seed: int) -> None:
    """`SamplingStates` of vLLM's newer model runner: signed, and -1 is "no seed"."""
    kept = np.zeros(1, dtype=np.int64)
    kept[0] = _sampling(bench.request(), seed).seed
    assert kept[0] >= 0


def test_an_attention_backend_that_may_keep_old_scales_is_reported(bench: Workbench) -> None:
    engine = _engine(bench, RECIPE)
    _audit(bench, engine, RECIPE)

    class FlashInferImpl(type(_attention(engine).impl)):  # type: ignore[misc]
        """Another name is all that is needed."""

    _attention(engine).impl.__class__ = FlashInferImpl
    with pytest.raises(AuditError, match="attention backend FlashInferImpl: it is not known to read"):
        _audit(bench, engine, RECIPE)


def test_the_largest_seed_is_a_seed(bench: Workbench) -> None:
    engine = _engine(bench, "bf16")
    prompt = replace(bench.prompts()[0], seeds=(2**64 - 1, 2**64 - 1, 2**63))
    batch = engine.generate(bench.request((prompt,)))
    assert batch.response(0) == batch.response(1) != batch.response(2)


def _last_ends_first(bench: Workbench, engine: VllmRolloutEngine) -> GenerateRequest:
    """One sample a prompt; that of the last prompt is its end token, others go on to the limit."""
    request = bench.request(tuple(replace(p, seeds=p.seeds[:1]) for p in bench.prompts()))
    request = replace(request, eos_token_ids=tuple(engine.generate(request).response(3)[:1]))
    lengths = engine.generate(request).response_lengths.tolist()
    assert lengths[3] == 1 and NEW_TOKENS in lengths
    return request


def test_a_short_group_does_not_wait_for_the_long_ones(bench: Workbench) -> None:
    engine = _engine(bench, "bf16")
    request = _last_ends_first(bench, engine)
    stream = engine.stream(request)
    assert [group.prompt for group in next(stream)][-1] == 3
    assert engine._live.llm_engine.has_unfinished_requests()
    assert_same(drain(stream), engine.generate(request))


@pytest.mark.parametrize("recipe", ["bf16", RECIPE])
def test_samples_are_those_of_vllm_own_generate(bench: Workbench, recipe: str) -> None:
    engine, request = _engine(bench, recipe), bench.request()
    batch = engine.generate(request)
    samples = [(prompt, seed) for prompt in request.prompts for seed in prompt.seeds]
    prompts = [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in samples]
    engine._forget_prefixes()
    with engine._compilation():
        outputs = engine._live.generate(prompts, [_sampling(request, seed) for _, seed in samples], use_tqdm=False)
    for sample, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        result, start = output.outputs[0], len(prompt["prompt_token_ids"])
        assert batch.response(sample) == list(result.token_ids)
        taken = [step[token].logprob for token, step in zip(result.token_ids, result.logprobs, strict=True)]
        assert torch.equal(batch.logprobs[sample, start : start + NEW_TOKENS], torch.tensor(taken))


def test_a_second_stream_is_refused_and_the_first_goes_on(bench: Workbench) -> None:
    engine = _engine(bench, "bf16")
    request = _last_ends_first(bench, engine)
    expected = engine.generate(request)
    stream = engine.stream(request)
    next(stream)
    with pytest.raises(EngineError, match="another request is being sampled"):
        engine.generate(request)
    assert_same(drain(stream), expected)


def test_a_stream_that_is_left_makes_the_engine_dirty_until_a_sync(bench: Workbench) -> None:
    engine = _engine(bench, "bf16")
    request = _last_ends_first(bench, engine)
    expected = engine.generate(request)
    stream = engine.stream(request)
    next(stream)
    stream.close()
    with pytest.raises(WeightVersionError, match="holds None"):
        engine.generate(request)
    engine.load_weights(bench.payload("bf16"))
    assert_same(engine.generate(request), expected)
