"""`fp8-grpo export`: checkpoints of real stores as folders that transformers loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli import CONFIG_ERROR, FAILED, OK, main
from flows.export import export_run
from flows.identity import checkpoint_meta
from flows.inputs import input_digests
from infra.store import CheckpointStore
from tasks.engines.hf_folder import write_folder
from tasks.engines.protocols import EngineError
from tasks.engines.registry import build_trainer
from tests.contract.engines import ROLLOUT_ENGINES, TRAINER_ENGINES, Workbench, advantages, make_model
from tests.engines.megatron_state import Saved, synthetic, write_saved
from tests.engines.megatron_state import make_model as make_named_model


def _publish(store: CheckpointStore, run: str, step: int, folder: Path, meta: Mapping[str, Any]) -> None:
    store.publish(run, step, {path.name: path for path in folder.iterdir()}, meta)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, and a `store` with steps 0 and 1 of `run`, as the PyTorch trainer wrote them."""
    base = tmp_path_factory.mktemp("export")
    bench = Workbench(ROLLOUT_ENGINES[0], TRAINER_ENGINES[0], make_model(base / "model"))
    (base / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    config, batch = bench.config("bf16"), bench.batch("bf16")
    trainer, store = build_trainer(config, bench.model_dir), CheckpointStore(str(base / "store"))
    meta = checkpoint_meta(config, None, str(bench.model_dir), input_digests(config), 0)
    for step in range(2):
        if step:
            trainer.train(batch, trainer.score(batch).logprobs, advantages())
        folder = base / f"saved{step}"
        folder.mkdir()
        trainer.save(folder)
        _publish(store, "run", step, folder, meta)
    return base


def _export(place: Path, *arguments: str) -> int:
    return main(["export", *arguments, f"storage.url={place / 'store'}"])


def _rounded(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "weights.safetensors").items()}


def _assert_loads(folder: Path, expected: Mapping[str, Tensor]) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    tied = {} if "lm_head.weight" in expected else {"lm_head.weight": expected["model.embed_tokens.weight"]}
    found = model.state_dict()
    assert found.keys() == expected.keys() | tied.keys()
    for name, tensor in (expected | tied).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("step", [None, 0, 1])
def test_a_checkpoint_loads_in_transformers(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int | None
) -> None:
    chosen = [] if step is None else [f"--step={step}"]
    assert _export(place, "run", str(tmp_path / "new" / "folder"), *chosen) == OK
    folder, expected = tmp_path / "new" / "folder", _rounded(place / f"saved{1 if step is None else step}")
    said = capsys.readouterr().out
    assert f"run run, step {1 if step is None else step}: {len(expected)} tensors, 0.001 GB in 1 file: {folder}" in said
    _assert_loads(folder, expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (place / "model" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder).encode("1 + 1 = ")
    assert list((tmp_path / "new").iterdir()) == [folder]


@pytest.mark.parametrize(
    ("noted", "key"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"torch_dtype": "float32"}, "torch_dtype"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "dtype"),
        ({}, "torch_dtype"),
    ],
    ids=["new", "old", "both", "none"],
)
def test_the_configuration_says_bf16_as_the_weights_are(
    place: Path, tmp_path: Path, noted: dict[str, str], key: str
) -> None:
    """In the model's own key, and in those of its parts; all else is as it came."""
    shutil.copytree(place / "model", tmp_path / "model")
    came = json.loads((place / "model" / "config.json").read_text())
    came = {name: value for name, value in came.items() if name not in ("dtype", "torch_dtype")}
    part = {"audio_config": {"dtype": "float32", "hidden_size": 7}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(came | noted | part))
    out = tmp_path / "out"
    write_folder([place / "saved1" / "weights.safetensors"], tmp_path / "model", out)
    wanted = {name: "bfloat16" for name in {key, *noted}} | {"audio_config": {"dtype": "bfloat16", "hidden_size": 7}}
    assert json.loads((out / "config.json").read_text()) == came | wanted
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_what_is_exported_is_what_the_trainer_computes_with(place: Path, tmp_path: Path) -> None:
    bench = Workbench(ROLLOUT_ENGINES[0], TRAINER_ENGINES[0], place / "model")
    trainer = build_trainer(bench.config("bf16"), place / "model")
    trainer.load(place / "saved1")
    assert _export(place, "run", str(tmp_path / "out")) == OK
    payload = trainer.export_weights(bench.recipe("bf16"))
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == payload.tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in payload.tensors.items())


@pytest.mark.parametrize("name", ["bias", "moe"])
def test_files_of_several_ranks_become_shards_with_an_index(tmp_path: Path, name: str) -> None:
    folder = make_named_model(name, tmp_path / "model")
    saved = synthetic(folder)
    write_saved(Saved(saved.weights, saved.state), tmp_path / "saved", files=3)
    store = CheckpointStore(str(tmp_path / "store"))
    _publish(store, "run", 4, tmp_path / "saved", {"model_dir": str(folder), "inputs": {}})
    step, written = export_run(store, "run", tmp_path / "out", shard_bytes=200_000)
    assert step == 4 and len(written.files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.weights.keys()
    assert index["metadata"]["total_size"] == written.bytes == 2 * sum(t.numel() for t in saved.weights.values())
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(index["weight_map"].values())
    found = {k: t for file in written.files for k, t in load_file(tmp_path / "out" / file).items()}
    assert all(torch.equal(found[key], tensor.to(torch.bfloat16)) for key, tensor in saved.weights.items())
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.dtype == torch.bfloat16 and not any(info.values())
    if name == "moe":
        experts = model.model.layers[1].mlp.experts
        assert torch.equal(experts.down_proj[3], found["model.layers.1.mlp.experts.3.down_proj.weight"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["other", "{out}"], "run = other: no complete checkpoint at .*store; runs there: run"),
        (["run", "{out}", "--step=7"], "step = 7: run run has no complete checkpoint of it at .*; allowed: 0, 1"),
        (["run", "{full}"], "destination = .*full: not empty; allowed: an empty folder, or a path that is free"),
        (["run", "{file}"], "destination = .*file: not empty"),
        (["run", "{link}"], "destination = .*link: a link; allowed: a folder below it, or a path that is free"),
        (["run", "{disk}"], "destination = .*disk: a mount point; allowed: a folder below it"),
        (["run", "{out}", "--model={nowhere}"], "model folder = .*nowhere: not on this machine; allowed: --model"),
        (["run", "{out}", "--model={changed}"], "model folder = .*changed: config.json has changed since the run"),
        (["run", "{out}", "storage.kind=x"], "storage"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    for name in ("full", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    places = {name: tmp_path / name for name in ("out", "full", "file", "link", "disk", "nowhere", "changed")}
    assert _export(place, *(argument.format(**places) for argument in arguments)) == CONFIG_ERROR
    assert re.search(message, capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_option_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _export(place, "run", str(tmp_path / "out"), "--steps=1")
    assert stopped.value.code == CONFIG_ERROR
    assert "unrecognized arguments: --steps=1" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_never_read(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    _publish(store, "run", 1, place / "saved1", {"model_dir": str(place / "model"), "inputs": {}})
    (file,) = (tmp_path / "store").rglob("weights.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["export", "run", str(tmp_path / "out"), f"storage.url={tmp_path / 'store'}"]) == FAILED
    assert "weights.safetensors: want sha256" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_weights_of_another_model_leave_nothing_behind(place: Path, tmp_path: Path) -> None:
    store = CheckpointStore(str(place / "store"))
    other = make_model(tmp_path / "model", intermediate_size=128)
    (tmp_path / "out").mkdir()
    meta = next(store.complete("run")).meta | {"inputs": {}}
    _publish(store, "moved", 1, place / "saved1", meta)
    with pytest.raises(EngineError, match=r"gate_proj\.weight: checkpoint \(256, 128\), model \(128, 128\)"):
        export_run(store, "moved", tmp_path / "out", model_dir=other)
    assert list((tmp_path / "out").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"out", "model"}
