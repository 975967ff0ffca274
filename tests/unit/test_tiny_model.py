"""The model built from scratch: a tokenizer that loses no digit, and weights that depend on the seed alone."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from conf.schema import TinyArchitecture
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
