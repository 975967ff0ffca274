"""Zero-padding to FP8 blocks: equal logits, whole head groups, exact zeros through training, refusals by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tasks.engines.megatron_config import read_shape
from tasks.engines.megatron_names import ModelShape
from tasks.engines.protocols import EngineError
from tasks.engines.zero_padding import (
    Padding,
    filled_blocks,
    nonzero_padding,
    pad_tensors,
    padded_config,
    unpad_tensors,
)
from tests.engines.megatron_models import CONFIGS, DENSE

SMOLLM2 = ModelShape(
    layers=30,
    hidden=576,
    heads=9,
    groups=3,
    head_dim=64,
    mlp=1536,
    vocabulary=49152,
    padded_vocabulary=49152,
    tied=True,
)
TOKENS = torch.arange(3, 51).reshape(3, 16)


def _random(config: Any, seed: int = 0) -> PreTrainedModel:
    """Every weight random, norms and biases among them."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _wider(shape: ModelShape, groups: int = 1) -> Padding:
    after = replace(
        shape,
        hidden=shape.hidden + 24,
        groups=shape.groups + groups,
        heads=shape.heads // shape.groups * (shape.groups + groups),
        mlp=shape.mlp + 32,
    )
    return Padding(shape, after)


def _padded(model: PreTrainedModel, padding: Padding) -> PreTrainedModel:
    config = AutoConfig.for_model(**padded_config(model.config.to_dict(), padding))
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = wide.load_state_dict(pad_tensors(_tensors(model), padding), strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    wide.tie_weights()
    return wide


def test_the_blocks_of_smollm2() -> None:
    assert filled_blocks(SMOLLM2) == replace(SMOLLM2, hidden=640, heads=12, groups=4)


def test_the_smallest_whole_blocks() -> None:
    odd = replace(SMOLLM2, hidden=129, heads=4, groups=2, head_dim=96, mlp=1)
    assert filled_blocks(odd) == replace(odd, hidden=256, heads=8, groups=4, mlp=128)
    whole = replace(SMOLLM2, hidden=4096, heads=32, groups=8, head_dim=128, mlp=12288)
    assert filled_blocks(whole) == whole
    with pytest.raises(EngineError, match="vocabulary = 200: cannot be padded; allowed: a multiple of 128"):
        filled_blocks(replace(SMOLLM2, vocabulary=200))


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_equal(name: str) -> None:
    model = _random(CONFIGS[name]())
    wide = _padded(model, _wider(read_shape(model.config)))
    with torch.no_grad():
        expected, found = model(TOKENS).logits, wide(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_small_eps_counts_as_much_as_before() -> None:
    """Activations so small that eps decides the norm: an eps that is not scaled would show."""
    model = _random(CONFIGS["llama_tied"]())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2e-3)
    wide = _padded(model, _wider(read_shape(model.config)))
    unscaled = _padded(model, _wider(read_shape(model.config)))
    for module in unscaled.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.rms_norm_eps
    with torch.no_grad():
        expected = model(TOKENS).logits
        close, far = ((m(TOKENS).logits - expected).abs().max() / expected.abs().max() for m in (wide, unscaled))
    assert close < 1e-5 < 1e-3 < far


def test_norm_weights_and_eps_by_hand() -> None:
    """d = 576 to 640: r = 0.9, eps 1e-5 to 9e-6, weight 2 to 2 sqrt(0.9); x = 3 everywhere gives what it gave."""
    padding = Padding(SMOLLM2, filled_blocks(SMOLLM2))
    assert padding.share == 0.9
    config = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
    }
    made = padded_config(config, padding)
    assert made["rms_norm_eps"] == pytest.approx(9e-6)
    assert (made["hidden_size"], made["num_attention_heads"], made["num_key_value_heads"]) == (640, 12, 4)
    assert (made["head_dim"], made["intermediate_size"], made["rope_theta"]) == (64, 1536, 1e5)
    old = 3 / math.sqrt(9 + 1e-5) * 2
    new = 3 / math.sqrt(576 * 9 / 640 + made["rms_norm_eps"]) * 2 * math.sqrt(0.9)
    assert new == pytest.approx(old, rel=1e-12)


def test_a_llama_that_transformers_would_refuse_becomes_a_mistral() -> None:
    config = CONFIGS["llama_tied"]().to_dict()
    shape = read_shape(CONFIGS["llama_tied"]())
    kept = padded_config(config, Padding(shape, replace(shape, hidden=96, heads=6, groups=3)))
    assert kept["model_type"] == "llama" and kept["mlp_bias"] is False
    other = padded_config(config, Padding(shape, replace(shape, hidden=88, heads=6, groups=3)))
    assert (other["model_type"], other["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert other["sliding_window"] is None and "mlp_bias" not in other and "attention_bias" not in other


def test_each_query_group_keeps_its_key_and_value_head() -> None:
    """9 heads over 3 become 12 over 4: head h still reads key and value head h // 3; the added group writes zeros."""
    config = LlamaConfig(
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=128,
    )
    model = _random(config)
    shape = read_shape(config)
    padding = Padding(shape, replace(shape, hidden=96, heads=12, groups=4))
    wide = _padded(model, padding)
    read: dict[str, Tensor] = {}
    for name, owner in (("narrow", model), ("wide", wide)):
        attention = owner.model.layers[0].self_attn
        attention.o_proj.register_forward_pre_hook(lambda _, args, name=name: read.__setitem__(name, args[0]))
    with torch.no_grad():
        model(TOKENS), wide(TOKENS)
    narrow, found = read["narrow"].unflatten(-1, (9, 8)), read["wide"].unflatten(-1, (12, 8))
    torch.testing.assert_close(found[..., :9, :], narrow, rtol=1e-5, atol=1e-5)
    assert not found[..., 9:, :].any()
    with torch.no_grad():
        # A key and value head decides its own three heads and no other.
        wide.model.layers[0].self_attn.v_proj.weight[8:16] = 0
        wide(TOKENS)
    silent = read["wide"].unflatten(-1, (12, 8)).abs().sum(dim=(0, 1, 3)) == 0
    assert silent.tolist() == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


def test_the_inverse_gives_the_model_back() -> None:
    tensors = _tensors(_random(CONFIGS["qwen3_tied"]()))
    padding = _wider(read_shape(CONFIGS["qwen3_tied"]()))
    wide = pad_tensors(tensors, padding)
    assert nonzero_padding(wide, padding) == []
    back = unpad_tensors(wide, padding)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        exact = not name.endswith("layernorm.weight") and name != "model.norm.weight"
        torch.testing.assert_close(back[name], tensor, rtol=0 if exact else 2e-7, atol=0)


def test_padding_that_is_not_zero_is_not_cut_off() -> None:
    padding = _wider(read_shape(CONFIGS["llama_tied"]()))
    wide = pad_tensors(_tensors(_random(CONFIGS["llama_tied"]())), padding)
    wide["model.layers.1.mlp.down_proj.weight"][0, -1] = 1e-30
    assert nonzero_padding(wide, padding) == ["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(EngineError, match=r"padding is not zero in model.layers.1.mlp.down_proj.weight \(1 of 20"):
        unpad_tensors(wide, padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_stays_and_nothing_else_is_rounded(dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in _tensors(_random(CONFIGS["llama_tied"]())).items()}
    wide = pad_tensors(tensors, _wider(read_shape(CONFIGS["llama_tied"]())))
    assert {t.dtype for t in wide.values()} == {dtype}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(wide[name][:64, :64], tensors[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 128}, "head_dim = 128: this size stays; allowed: 64"),
        ({"vocabulary": 49280}, "vocabulary = 49280: this size stays; allowed: 49152"),
        ({"tied": False}, "tied = False: this size stays; allowed: True"),
        ({"hidden": 512}, "hidden = 512: below the model's; allowed: 576 and more"),
        ({"heads": 16, "groups": 4}, "heads = 16: not 3 to each of 4 key and value heads.*; allowed: 12"),
        ({"heads": 12}, "heads = 12: not 3 to each of 3 key and value heads.*; allowed: 9"),
    ],
)
def test_dimensions_that_would_change_the_function_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Padding(SMOLLM2, replace(SMOLLM2, **change))


def test_a_mixture_is_refused() -> None:
    shape = replace(SMOLLM2, experts=4)
    with pytest.raises(EngineError, match="experts = 4: not computed for a mixture of experts; allowed: 0"):
        Padding(shape, shape)


def test_names_and_shapes_are_strict() -> None:
    tensors = _tensors(_random(CONFIGS["llama_tied"]()))
    padding = _wider(read_shape(CONFIGS["llama_tied"]()))
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.norm.weight"] = torch.zeros(65)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(EngineError) as refused:
        pad_tensors(tensors, padding)
    for line in (
        "the model to pad does not fit the model",
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.layers.0.self_attn.q_proj.bias: unknown to this model",
        "model.norm.weight: shape [65], and this model has [64]",
    ):
        assert line in str(refused.value)
    with pytest.raises(EngineError, match=r"config\.json: num_attention_heads = 8; allowed: 4"):
        padded_config(CONFIGS["llama_tied"]().to_dict() | {"num_attention_heads": 8}, padding)


def test_gradients_of_padding_are_exactly_zero() -> None:
    for name in DENSE:
        model = _random(CONFIGS[name]())
        padding = _wider(read_shape(model.config), groups=2)
        wide = _padded(model, padding)
        optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            wide(TOKENS, labels=TOKENS).loss.backward()
            gradients = {key: p.grad for key, p in wide.named_parameters() if p.grad is not None}
            assert len(gradients) == len(_tensors(wide))
            assert nonzero_padding(gradients, padding) == []
            optimizer.step()
        assert nonzero_padding(_tensors(wide), padding) == []
