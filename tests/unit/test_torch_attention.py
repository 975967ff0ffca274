"""The torch engines' attention modules from inside: what the cache holds, and that scales are never assumed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from conf.compose import compose
from conf.schema import Calibration
from tasks.engines.protocols import EngineError
from tasks.engines.torch_attention import CachedAttention, WholeSequenceAttention, install_hook, scale_heads
from tasks.engines.torch_linears import Fp8InferenceLinear
from tasks.engines.torch_policy import TorchPolicy
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.fp8_linear import BlockSpec
from tasks.numerics.kv_scales import Scales
from tasks.numerics.token_sample import sample_tokens
from tests.engines.megatron_models import save_model

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 128, 8
SCALES: Scales = {(0, "q"): 0.02, (0, "k"): 0.03, (0, "v"): 0.01}
HEAD_SCALES: Scales = {(0, "q"): (0.02, 0.005), (0, "k"): (0.03, 0.004), (0, "v"): (0.01, 0.0025)}


def _qkv(rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(rows, heads, tokens, DIM, generator=generator).to(torch.bfloat16)

    return random(HEADS), random(KV_HEADS), random(KV_HEADS)


def _attention(fp8: bool, scales: Scales | None = None) -> CachedAttention:
    attention = CachedAttention(fp8, fp8, dict((SCALES if fp8 else {}) if scales is None else scales))
    attention.start(SLOTS)
    return attention


@pytest.mark.parametrize("fp8, dtype", [(True, torch.float8_e4m3fn), (False, torch.bfloat16)])
def test_the_cache_holds_the_type_it_reports(fp8: bool, dtype: torch.dtype) -> None:
    attention = _attention(fp8)
    attention.attend(0, *_qkv(2, 3), 1.0)
    attention.expand(torch.tensor([0, 0, 1]), torch.tensor([3, 3, 2]))
    attention.attend(0, *_qkv(3, 1), 1.0)
    cache = attention._layers[0]
    assert attention.dtype == cache.keys.dtype == cache.values.dtype == dtype
    assert cache.keys.shape == cache.values.shape == (3, KV_HEADS, SLOTS, DIM)


def test_cached_codes_are_the_rounded_keys_and_values() -> None:
    attention = _attention(True)
    q, k, v = _qkv(2, 3)
    attention.attend(0, q, k, v, 1.0)
    for held, x, part in ((attention._layers[0].keys, k, "k"), (attention._layers[0].values, v, "v")):
        real = held[:, :, :3].float()
        error = (real * SCALES[(0, part)] - x.float().clamp(-448 * SCALES[(0, part)], 448 * SCALES[(0, part)])).abs()
        assert (error <= x.float().abs() * 2**-4 + 2**-10 * SCALES[(0, part)]).all()
        assert not held[:, :, 3:].float().any()


@pytest.mark.parametrize("missing", ["q", "k", "v"])
@pytest.mark.parametrize("decode", [False, True])
def test_fp8_attention_never_runs_without_a_scale(missing: str, decode: bool) -> None:
    attention = _attention(True)
    if decode:
        attention.attend(0, *_qkv(2, 3), 1.0)
        attention.expand(torch.tensor([0, 1]), torch.tensor([3, 3]))
    attention.scales = {key: scale for key, scale in SCALES.items() if key[1] != missing}
    with pytest.raises(EngineError, match=f"layer 0: no {missing} scale; FP8 attention never runs on a default scale"):
        attention.attend(0, *_qkv(2, 1 if decode else 3), 1.0)


def test_a_layer_has_its_own_scales() -> None:
    with pytest.raises(EngineError, match="layer 1: no k scale"):
        _attention(True).attend(1, *_qkv(1, 2), 1.0)


@pytest.mark.parametrize("fp8", [True, False])
def test_decoding_token_by_token_equals_the_whole_sequence(fp8: bool) -> None:
    """Rows of different lengths, and query heads that share a KV head."""
    q, k, v = _qkv(2, 6)
    whole = _attention(fp8).attend(0, q, k, v, 0.1).float()
    steps = _attention(fp8)
    steps.attend(0, q[:, :, :4], k[:, :, :4], v[:, :, :4], 0.1)
    lengths = torch.tensor([4, 2])
    steps.expand(torch.tensor([0, 1]), lengths)
    for _ in range(2):
        at = lengths[:, None, None, None]
        one = [x.gather(2, at.expand(-1, x.shape[1], 1, DIM)) for x in (q, k, v)]
        out = steps.attend(0, *one, 0.1).float()
        expected = whole.gather(2, at.expand(-1, HEADS, 1, DIM))
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        lengths = lengths + 1
        steps.lengths = lengths


def test_without_fp8_attention_is_plain_causal_attention() -> None:
    q, k, v = _qkv(2, 5)
    out = _attention(False).attend(0, q, k, v, 0.1)
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v)]
    assert torch.equal(out, scaled_dot_product_attention(q, *repeated, is_causal=True, scale=0.1))


def test_fp8_attention_is_attention_over_rounded_values() -> None:
    q, k, v = _qkv(2, 5)
    rounded = []
    for x, part in ((q, "q"), (k, "k"), (v, "v")):
        scale = SCALES[(0, part)]
        rounded.append((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in rounded[1:]]
    expected = scaled_dot_product_attention(rounded[0], *repeated, is_causal=True, scale=0.1)
    out = _attention(True).attend(0, q, k, v, 0.1).float()
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def _by_head(scales: Scales, part: str, heads: int) -> Tensor:
    """`[1, heads, 1, 1]`: the scale of each head, query heads by the KV head that they share."""
    scale = scales[(0, part)]
    assert isinstance(scale, tuple)
    return torch.tensor(scale).repeat_interleave(heads // len(scale)).view(1, heads, 1, 1)


def _quiet_heads(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of the second KV head are a quarter as loud, so that scales cannot be mixed up unseen."""
    made = []
    for x in _qkv(rows, tokens):
        x = x.clone()
        x[:, x.shape[1] // 2 :] /= 4
        made.append(x)
    return made[0], made[1], made[2]


def test_codes_of_a_head_are_under_its_own_scale() -> None:
    attention = _attention(True, HEAD_SCALES)
    q, k, v = _quiet_heads(2, 3)
    attention.attend(0, q, k, v, 1.0)
    for held, x, part in ((attention._layers[0].keys, k, "k"), (attention._layers[0].values, v, "v")):
        scale = _by_head(HEAD_SCALES, part, KV_HEADS)
        expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(held[:, :, :3].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("quantize_query", [True, False])
def test_attention_by_head_is_attention_over_values_rounded_by_head(quantize_query: bool) -> None:
    q, k, v = _quiet_heads(2, 5)
    rounded = []
    for x, part in ((q, "q"), (k, "k"), (v, "v")):
        scale = _by_head(HEAD_SCALES, part, x.shape[1])
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        rounded.append(codes.float() * scale if part != "q" or quantize_query else x.float())
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in rounded[1:]]
    expected = scaled_dot_product_attention(rounded[0], *repeated, is_causal=True, scale=0.1)
    attention = CachedAttention(True, quantize_query, dict(HEAD_SCALES))
    attention.start(SLOTS)
    torch.testing.assert_close(attention.attend(0, q, k, v, 0.1).float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("decode", [False, True])
def test_equal_scales_of_all_heads_give_what_one_scale_gives_bitwise(decode: bool) -> None:
    outputs = []
    for scales in (SCALES, {key: (scale, scale) for key, scale in SCALES.items()}):
        attention = _attention(True, scales)
        out = attention.attend(0, *_qkv(3, 4), 0.1)
        if decode:
            attention.expand(torch.tensor([0, 1, 2]), torch.tensor([4, 2, 3]))
            out = attention.attend(0, *_qkv(3, 1, seed=1), 0.1)
        outputs.append(out)
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(outputs[0], outputs[1])


def test_decoding_by_head_equals_the_whole_sequence() -> None:
    q, k, v = _quiet_heads(2, 6)
    whole = _attention(True, HEAD_SCALES).attend(0, q, k, v, 0.1).float()
    steps = _attention(True, HEAD_SCALES)
    steps.attend(0, q[:, :, :5], k[:, :, :5], v[:, :, :5], 0.1)
    steps.expand(torch.tensor([0, 1]), torch.tensor([5, 5]))
    out = steps.attend(0, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], 0.1).float()
    torch.testing.assert_close(out, whole[:, :, 5:], rtol=0.02, atol=0.01)


def test_another_number_of_heads_than_the_cache_has_is_refused() -> None:
    attention = _attention(True, HEAD_SCALES | {(0, "v"): (0.1, 0.1, 0.1)})
    with pytest.raises(EngineError, match="layer 0: 3 v scales for 2 KV heads"):
        attention.attend(0, *_qkv(1, 2), 1.0)


def test_the_number_of_scales_follows_granularity_and_model() -> None:
    layer, head = Calibration(), Calibration(granularity="head")
    model = nn.Linear(1, 1)
    for config, heads in (
        (SimpleNamespace(num_attention_heads=8, num_key_value_heads=2), 2),
        (SimpleNamespace(num_attention_heads=8, num_key_value_heads=None), 8),
        (SimpleNamespace(num_attention_heads=8), 8),
    ):
        model.config = config
        assert scale_heads(model, layer) is None
        assert scale_heads(model, head) == heads


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("heads", [None, KV_HEADS])
def test_the_trainer_shows_real_tokens_only_and_attends_over_all(limit: int | None, heads: int | None) -> None:
    lengths = torch.tensor([6, 3])
    q, k, v = _qkv(2, 6)
    sample = sample_tokens(lengths, 6, limit, seed=3)
    for x in (q, k, v):
        x[1, :, 3:] = 1e4
    watched = WholeSequenceAttention(CalibrationObserver(1, 1.0, 100.0, None, heads), sample=sample)
    out = watched.attend(0, q, k, v, 0.1)
    assert torch.equal(out, WholeSequenceAttention().attend(0, q, k, v, 0.1))
    assert watched.observer is not None
    rows = [list(range(6)), list(range(3))]
    if sample.positions is not None:
        rows = [sample.positions[i][sample.weights[i] > 0].tolist() for i in range(2)]
    scales = watched.observer.result().scales
    for part, x in (("q", q), ("k", k), ("v", v)):
        amax = [
            max(float(group[i][:, seen].float().abs().max()) for i, seen in enumerate(rows))
            for group in x.chunk(heads or 1, dim=1)
        ]
        expected = [value / 448 for value in amax]
        assert scales[(0, part)] == pytest.approx(tuple(expected) if heads else expected[0], rel=1e-6)


def test_a_new_prefill_forgets_the_last_one() -> None:
    attention = _attention(False)
    q, k, v = _qkv(2, 3)
    first = attention.attend(0, q, k, v, 0.1)
    attention.expand(torch.tensor([0, 1]), torch.tensor([3, 3]))
    attention.attend(0, *_qkv(2, 1, seed=1), 0.1)
    attention.start(SLOTS)
    assert torch.equal(attention.attend(0, q, k, v, 0.1), first)


class _Layer(nn.Module):
    def __init__(self, layer: int, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layer_idx, self.k_proj, self.sliding_window = layer, nn.Linear(2, 2), sliding_window


def test_every_layer_gets_the_hook() -> None:
    model = nn.ModuleList([_Layer(0), _Layer(1)])
    hook = _attention(False)
    assert install_hook(model, hook) == 2
    assert all(layer.fp8_grpo_hook is hook for layer in model)


def test_attention_that_the_engines_do_not_compute_is_refused() -> None:
    with pytest.raises(EngineError, match="1: sliding-window attention is not supported"):
        install_hook(nn.ModuleList([_Layer(0), _Layer(1, sliding_window=16)]), _attention(False))
    with pytest.raises(EngineError, match=r"attention layers found: \[0, 2\]"):
        install_hook(nn.ModuleList([_Layer(0), _Layer(2)]), _attention(False))
    with pytest.raises(EngineError, match=r"attention layers found: \[\]"):
        install_hook(nn.Linear(2, 2), _attention(False))


def test_a_window_that_only_the_configuration_has_is_refused(tmp_path: Path) -> None:
    """A Mistral's attention modules do not say it."""
    folder, recipe = save_model("mistral_narrow", tmp_path), compose(["recipe=bf16"]).recipe
    assert TorchPolicy(folder, recipe, 1.0).layers == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    with pytest.raises(EngineError, match="sliding_window = 16: sliding-window attention is not supported"):
        TorchPolicy(folder, recipe, 1.0)


def test_a_product_that_bypasses_the_held_weights_is_reported() -> None:
    linear = Fp8InferenceLinear((128, 128), None, BlockSpec())
    linear.get_buffer("weight").copy_(torch.ones(128, 128).to(torch.float8_e4m3fn))
    linear.get_buffer("weight_scale_inv").fill_(0.5)
    assert not linear.is_consistent()
    linear.install()
    assert linear.is_consistent()
    linear._decoded.zero_()
    assert not linear.is_consistent()
