"""Preflight: what only the machine can answer, each refusal by message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import ConfigError, compose
from conf.preflight import preflight

FOLDER = (
    "a folder with config.json, a tokenizer (tokenizer.json, tokenizer.model, vocab.json, spiece.model) "
    "and *.safetensors"
)


def model_folder(path: Path, *files: str, layers: int = 2) -> Path:
    path.mkdir()
    for name in files:
        (path / name).write_text("{}", encoding="utf-8")
    if "config.json" in files:
        (path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}), encoding="utf-8")
    return path


def preflight_problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        preflight(compose(overrides))
    return list(refused.value.problems)


def jsonl(tmp_path: Path) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n', encoding="utf-8")
    return ["data=jsonl", f"data.path={path}"]


def test_preflight_accepts_a_whole_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    preflight(compose([f"model.path={folder}", *jsonl(tmp_path)]))


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        (("config.json", "tokenizer.json"), "lacks weights (*.safetensors)"),
        (("config.json", "tokenizer.json", "pytorch_model.bin"), "lacks weights (*.safetensors)"),
        (("config.json", "model.safetensors"), "lacks a tokenizer file"),
        (("tokenizer.json", "model.safetensors"), "lacks config.json"),
        ((), "lacks config.json, a tokenizer file, weights (*.safetensors)"),
    ],
)
def test_preflight_names_what_a_model_folder_lacks(tmp_path: Path, files: tuple[str, ...], wrong: str) -> None:
    folder = model_folder(tmp_path / "m", *files)
    found = preflight_problems([f"model.path={folder}", *jsonl(tmp_path)])
    assert found == [f"model.path = {folder}: {wrong}; allowed: {FOLDER}"]


def test_preflight_names_a_missing_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, wrong in ((tmp_path / "no", "does not exist"), (file, "is a file")):
        found = preflight_problems([f"model.path={path}", *jsonl(tmp_path)])
        assert found == [f"model.path = {path}: {wrong}; allowed: {FOLDER}"]


def test_preflight_names_missing_shards_and_broken_json(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json", "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    overrides = [f"model.path={folder}", *jsonl(tmp_path)]
    assert preflight_problems(overrides) == [
        f"model.path = {folder}: lacks model-2.safetensors, named by {index.name}; allowed: {FOLDER}"
    ]
    index.unlink()
    (folder / "config.json").write_text("[]", encoding="utf-8")
    assert preflight_problems(overrides) == [
        f"model.path = {folder}: cannot be read: config.json: not a JSON object; allowed: {FOLDER}"
    ]


def test_preflight_counts_the_layers_of_a_local_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors", layers=4)
    keep = ["recipe.training_linears.keep_first_layers=3", "recipe.training_linears.keep_last_layers=1"]
    assert preflight_problems([f"model.path={folder}", *keep, *jsonl(tmp_path)]) == [
        "recipe.training_linears.keep_first_layers = 3: with keep_last_layers 1 it leaves none of "
        "the model's "
        "4 layers to quantise; allowed: keep_first_layers + keep_last_layers from 0 to 3"
    ]


def test_preflight_names_a_missing_data_file(tmp_path: Path) -> None:
    allowed = "a readable file with one JSON object a line"
    for path, wrong in ((tmp_path / "no.jsonl", "no such file"), (tmp_path, "not a file")):
        found = preflight_problems(["data=jsonl", f"data.path={path}"])
        assert found == [f"data.path = {path}: {wrong}; allowed: {allowed}"]


def test_preflight_names_an_unknown_task() -> None:
    (line,) = preflight_problems(["data.task=chain_sums"])
    assert line.startswith("data.task = chain_sums: reasoning-gym has no such task; allowed: one of its ")
    assert line.endswith("GALLERY.md; did you mean chain_sum?")


def test_preflight_names_an_unknown_parameter() -> None:
    names = (
        "min_terms, max_terms, min_digits, max_digits, operators, allow_parentheses, allow_negation, "
        "format_style, whitespace"
    )
    hint = "('~data.parameters' drops those of another task)"
    assert preflight_problems(["data.parameters.max_term=3", "data.parameters.size=9"]) == [
        "data.parameters.max_term = 3: the task basic_arithmetic has no such parameter; "
        f"allowed: {names} {hint}; did you mean max_terms?",
        f"data.parameters.size = 9: is data.pool_size here; allowed: {names} {hint}",
    ]


def test_preflight_passes_on_what_the_task_itself_refuses() -> None:
    (line,) = preflight_problems(["data.parameters.min_terms=3", "data.parameters.max_terms=2"])
    assert "refused by the task basic_arithmetic: max_terms must be >= min_terms" in line
    assert line.startswith('data.parameters = {"min_terms": 3, "max_terms": 2, ')


def test_preflight_accepts_the_defaults_and_tells_all_at_once() -> None:
    preflight(compose())
    found = preflight_problems(["model.path=/nonexistent", "data=jsonl", "data.path=/nonexistent.jsonl"])
    assert [line.partition(" = ")[0] for line in found] == ["model.path", "data.path"]
