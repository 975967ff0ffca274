"""Text and token ids through a model folder's own tokenizer, and which tokens end a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.data.tokens import TextCodec
from tasks.engines.tiny_model import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer(["What is 1 + 2?"] * 4, 128).save_pretrained(tmp_path)
    return tmp_path


def _write(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_text_goes_and_comes_back(folder: Path) -> None:
    codec = TextCodec(folder)
    ids = codec.encode("What is -12 + 3?")
    assert isinstance(ids, tuple)
    assert codec.decode(list(ids)) == "What is -12 + 3?"
    assert codec.encode("") == ()


def test_special_tokens_are_not_text(folder: Path) -> None:
    codec = TextCodec(folder)
    assert codec.decode([0, *codec.encode("15"), 1, 0]) == "15"
    assert codec.decode([1]) == ""


def test_the_tokenizers_end_token_ends_a_response(folder: Path) -> None:
    assert TextCodec(folder).eos_token_ids == (1,)


def test_end_tokens_of_all_files_count_once(folder: Path) -> None:
    _write(folder, "config.json", model_type="qwen3", eos_token_id=7)
    assert TextCodec(folder).eos_token_ids == (1, 7)
    _write(folder, "generation_config.json", eos_token_id=[9, 1, 5])
    assert TextCodec(folder).eos_token_ids == (1, 5, 7, 9)
    _write(folder, "config.json", model_type="qwen3", eos_token_id=None)
    assert TextCodec(folder).eos_token_ids == (1, 5, 9)
    _write(folder, "generation_config.json", temperature=1.0)
    assert TextCodec(folder).eos_token_ids == (1,)


def _without_end_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("eos_token")
    path.write_text(json.dumps(settings))


def test_an_end_token_of_the_model_alone_is_enough(folder: Path) -> None:
    _without_end_token(folder)
    _write(folder, "config.json", model_type="qwen3", eos_token_id=3)
    assert TextCodec(folder).eos_token_ids == (3,)


def test_without_any_end_token_the_folder_is_refused(folder: Path) -> None:
    _without_end_token(folder)
    with pytest.raises(ValueError) as caught:
        TextCodec(folder)
    assert str(caught.value) == f"{folder}: neither tokenizer nor config names an end token (eos_token_id)"
