"""The model built from scratch: a tokenizer that loses no digit, and weights that depend on the seed alone."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from conf.schema import Experts, LatentAttention, RopeScaling, TinyArchitecture
from tasks.engines.protocols import EngineError
from tasks.engines.tiny_model import EOS, PAD, UNKNOWN, create_model, save_model, tiny_config, train_tokenizer

TEXTS = [
    f"State the final answer to the following arithmetic problem: {a} + {b} = " for a in range(30) for b in (1, 22)
]
ARCHITECTURE = TinyArchitecture(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=256,
    max_position_embeddings=64,
    rope_theta=500.0,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 256)


@pytest.mark.parametrize(
    "text",
    [
        "0123456789",
        "-42",
        "12 + -7 = 5",
        "- 3 - -3",
        "7*(8-9)/2",
        "State the final answer to the following arithmetic problem: 3 + 4 = ",
        "an unseen Word, (with) marks!?",
        " leading and trailing ",
        "two  spaces",
        "two\nlines",
        string.digits + string.ascii_letters + string.punctuation,
    ],
)
def test_text_comes_back_as_it_went(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_digit_is_one_token_and_the_same_everywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    for digit in string.digits:
        (token,) = tokenizer.encode(digit)
        for text in (f"1{digit}", f"= {digit}", f"-{digit}", f"{digit} + 1", f"problem: {digit}"):
            assert token in tokenizer.encode(text), text
    assert len(tokenizer.encode("4096")) == 4


def test_frequent_words_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode(TEXTS[0])) < 0.3 * len(TEXTS[0])


def test_characters_outside_ascii_become_unknown(tokenizer: PreTrainedTokenizerFast) -> None:
    for character in ("\u00e9", "\u2212", "\u6f22", "\U0001f600"):
        ids = tokenizer.encode(f"1 {character} 2")
        assert ids.count(tokenizer.unk_token_id) >= 1, character
        assert tokenizer.encode("1 ")[0] == ids[0] and ids[-1] == tokenizer.encode("2")[0]


def test_special_tokens_and_size(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids([PAD, EOS, UNKNOWN]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 256
    assert tokenizer.decode([*tokenizer.encode("5"), 1], skip_special_tokens=True) == "5"


def test_the_tokenizer_depends_on_texts_and_size_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    state = tokenizer.backend_tokenizer.to_str()
    assert train_tokenizer(TEXTS, 256).backend_tokenizer.to_str() == state
    assert train_tokenizer(TEXTS, 128).backend_tokenizer.to_str() != state
    assert train_tokenizer(["quite another text"] * 9, 256).backend_tokenizer.to_str() != state
    assert len(train_tokenizer(TEXTS, 128)) <= 128


def test_weights_depend_on_the_seed_alone() -> None:
    first, second, other = (create_model(ARCHITECTURE, seed, 1).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {t.dtype for t in first.values()} == {torch.float32}


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    create_model(ARCHITECTURE, 3, 1)
    assert torch.equal(torch.rand(4), expected)


def test_weights_start_at_one_over_root_width() -> None:
    embedding = create_model(ARCHITECTURE, 0, 1).get_input_embeddings().weight
    live = embedding[1:].detach()
    assert float(live.std()) == pytest.approx(128**-0.5, rel=0.03)
    assert float(live.mean()) == pytest.approx(0.0, abs=0.005)


def test_the_configuration_holds_the_architecture() -> None:
    config = tiny_config(ARCHITECTURE, eos_token_id=1)
    for name, value in ARCHITECTURE.model_dump(exclude={"rope_theta"}).items():
        assert getattr(config, name) == value, name
    assert config.rope_parameters["rope_theta"] == 500.0
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (1, 0, None)


def test_a_saved_folder_is_a_hugging_face_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = create_model(ARCHITECTURE, 0, int(tokenizer.eos_token_id))
    save_model(model, tokenizer, tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    own = model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert again.encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])
    assert again.decode(again.encode("-12 + 3")) == "-12 + 3"


LLAMA = ARCHITECTURE.model_copy(
    update={
        "qk_norm": False,
        "norm_eps": 1e-5,
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    }
)
MIXTURE = ARCHITECTURE.model_copy(update={"experts": Experts(count=4, per_token=2, intermediate_size=128)})


@pytest.mark.parametrize(
    ("architecture", "family"), [(ARCHITECTURE, "qwen3"), (LLAMA, "llama"), (MIXTURE, "qwen3_moe")]
)
def test_each_family_is_saved_and_loaded(
    architecture: TinyArchitecture, family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = create_model(architecture, 0, 1).eval()
    save_model(model, tokenizer, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == architecture.family == family
    assert written["rms_norm_eps"] == architecture.norm_eps
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == (family != "llama")
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in names) == (family == "qwen3_moe")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_rotary_frequencies_are_scaled_as_in_llama_3() -> None:
    """Wavelengths below 64 / 4 tokens stay, those above 64 / 1 are 8 times as long, between them a ramp."""
    plain = 500.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    waves = 2 * torch.pi / plain
    ramp = ((64 / waves - 1) / 3).clamp(0, 1)
    wanted = (1 - ramp) * plain / 8 + ramp * plain
    model = create_model(LLAMA, 0, 1)
    found = model.model.rotary_emb.inv_freq.to(torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert float(waves[0]) < 16 < 64 < float(waves[-1])


def test_a_family_that_no_engine_runs_is_refused() -> None:
    latent = ARCHITECTURE.model_copy(update={"latent_attention": LatentAttention(kv_lora_rank=8, qk_rope_head_dim=2)})
    with pytest.raises(EngineError, match="no engine here runs a deepseek_v3"):
        tiny_config(latent, eos_token_id=1)
