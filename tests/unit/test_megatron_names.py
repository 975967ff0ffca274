"""The map between Hugging Face's names and Megatron's: places worked out by hand, round trips bit by bit, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.megatron_config import Layout, plan_model
from tasks.engines.megatron_names import (
    Entry,
    Form,
    ModelShape,
    Part,
    check_names,
    entry_shape,
    fuse,
    hf_shapes,
    split,
    stage_entries,
)
from tasks.engines.megatron_weights import check_checkpoint, checkpoint_files, load_weights
from tasks.engines.plan import folder_shape
from tasks.engines.protocols import EngineError
from tests.engines.megatron_models import CONFIGS, save_model

LOCAL, TRANSFORMER_ENGINE = Form(False, False), Form(True, True)
FORMS = {"local": LOCAL, "transformer_engine": TRANSFORMER_ENGINE}
SMALL = ModelShape(
    layers=1, hidden=1, heads=4, groups=2, head_dim=1, mlp=4, vocabulary=3, padded_vocabulary=8, tied=False
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: save_model(name, base / name) for name in CONFIGS}


def _shape(folder: Path, tensor: int = 1) -> ModelShape:
    return plan_model(folder, Layout(tensor=tensor)).shape


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint_files(folder) for name, tensor in load_file(file).items()}


def _column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def _entry(name: str) -> Entry:
    part = Part(range(1), range(0), True, True)
    return next(entry for entry in stage_entries(SMALL, LOCAL, part) if entry.name == name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_names_what_transformers_saves(folders: dict[str, Path], name: str) -> None:
    own = checkpoint_parameters(folder_shape(folders[name]))
    assert hf_shapes(_shape(folders[name])) == {n: tuple(t.shape) for n, t in own.items()}


def _parts(shape: ModelShape, pipeline: int, expert: int) -> Iterator[Part]:
    """Of all pipeline stages and expert-parallel ranks."""
    layers, experts = shape.layers // pipeline, shape.experts // expert
    for stage in range(pipeline):
        for rank in range(expert):
            yield Part(
                range(stage * layers, (stage + 1) * layers),
                range(rank * experts, (rank + 1) * experts),
                stage == 0,
                stage == pipeline - 1,
            )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_round_trip_is_bitwise(folders: dict[str, Path], name: str, tensor: int, form: str, pipeline: int) -> None:
    """With four ranks there are more than key and value heads."""
    shape, weights = _shape(folders[name], tensor), _weights(folders[name])
    back: dict[str, Tensor] = {}
    for part in _parts(shape, pipeline, 2 if shape.experts else 1):
        for entry in stage_entries(shape, FORMS[form], part):
            sources = [weights[source] for source in entry.sources]
            shards = [fuse(shape, entry, sources, rank, tensor) for rank in range(tensor)]
            assert {tuple(shard.shape) for shard in shards} == {entry_shape(shape, entry, tensor)}
            back |= split(shape, entry, shards)
    assert back.keys() == weights.keys()
    for source, weight in weights.items():
        assert torch.equal(back[source].view(torch.int16), weight.view(torch.int16)), source


def test_queries_stand_before_the_key_and_value_of_their_group() -> None:
    sources = [_column(0, 1, 2, 3), _column(10, 11), _column(20, 21)]
    entry = _entry("decoder.layers.0.self_attention.linear_qkv.weight")
    assert fuse(SMALL, entry, sources, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert fuse(SMALL, entry, sources, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_biases_are_joined_as_their_weights() -> None:
    shape = replace(SMALL, qkv_bias=True)
    part = Part(range(1), range(0), True, True)
    (entry,) = (e for e in stage_entries(shape, LOCAL, part) if e.name.endswith("linear_qkv.bias"))
    sources = [torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])]
    assert fuse(shape, entry, sources, 0, 2).tolist() == [0, 1, 10, 20]


def test_a_rank_has_its_rows_of_gate_over_its_rows_of_up() -> None:
    entry = _entry("decoder.layers.0.mlp.linear_fc1.weight")
    sources = [_column(0, 1, 2, 3), _column(10, 11, 12, 13)]
    assert fuse(SMALL, entry, sources, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_rows_behind_the_vocabulary_are_zero_and_do_not_come_back() -> None:
    entry, source = _entry("embedding.word_embeddings.weight"), _column(5, 6, 7)
    shards = [fuse(SMALL, entry, [source], rank, 2) for rank in range(2)]
    assert [shard.flatten().tolist() for shard in shards] == [[5, 6, 7, 0], [0, 0, 0, 0]]
    assert torch.equal(split(SMALL, entry, shards)["model.embed_tokens.weight"], source)


def test_norms_stand_where_the_layers_want_them() -> None:
    whole = Part(range(1), range(2), True, True)
    mixture = replace(SMALL, experts=2)
    places = {
        (kind, form): {
            entry.sources[0].removeprefix("model.layers.0."): entry.name.removeprefix("decoder.layers.0.")
            for entry in stage_entries(shape, FORMS[form], whole)
            if entry.sources[0].endswith("layernorm.weight")
        }
        for kind, shape in (("dense", SMALL), ("mixture", mixture))
        for form in FORMS
    }
    first, second = "input_layernorm.weight", "post_attention_layernorm.weight"
    apart = {first: "input_layernorm.weight", second: "pre_mlp_layernorm.weight"}
    fused = "self_attention.linear_qkv.layer_norm_weight"
    assert places["dense", "local"] == places["mixture", "local"] == apart
    assert places["dense", "transformer_engine"] == {first: fused, second: "mlp.linear_fc1.layer_norm_weight"}
    # Before a router there is no linear layer to fuse with.
    assert places["mixture", "transformer_engine"] == {first: fused, second: "pre_mlp_layernorm.weight"}


def test_layers_and_experts_count_from_the_rank() -> None:
    part = Part(range(4, 6), range(2, 4), first=False, last=True)
    names = {e.name: e.sources for e in stage_entries(replace(SMALL, layers=6, experts=4), LOCAL, part)}
    down = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    assert names[down] == ("model.layers.5.mlp.experts.2.down_proj.weight",)
    assert names["decoder.layers.0.mlp.router.weight"] == ("model.layers.4.mlp.gate.weight",)
    assert "embedding.word_embeddings.weight" not in names
    grouped = {e.name for e in stage_entries(replace(SMALL, layers=6, experts=4), TRANSFORMER_ENGINE, part)}
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight0" in grouped


@pytest.mark.parametrize("first, last, expected", [(True, True, None), (False, True, "model.embed_tokens.weight")])
def test_a_tied_head_is_the_embedding(first: bool, last: bool, expected: str | None) -> None:
    entries = stage_entries(replace(SMALL, tied=True), LOCAL, Part(range(1), range(0), first, last))
    found = {entry.name: entry.sources for entry in entries}.get("output_layer.weight")
    assert found == (None if expected is None else (expected,))


def test_a_wrong_shape_names_the_tensor() -> None:
    entry = _entry("decoder.layers.0.self_attention.linear_qkv.weight")
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.k_proj\.weight: shape \[3, 1\].* has \[2, 1\]"):
        fuse(SMALL, entry, [_column(0, 1, 2, 3), _column(0, 1, 2), _column(0, 1)], 0, 1)
    with pytest.raises(EngineError, match=r"linear_qkv\.weight: shape \[8, 1\].* has \[4, 1\]"):
        split(SMALL, entry, [torch.zeros(8, 1), torch.zeros(8, 1)])


def test_names_that_do_not_fit_are_all_listed() -> None:
    message = "(?s)here does not fit.*a: missing.*c: unknown.*b: shape \\[2\\].* has \\[3\\]"
    with pytest.raises(EngineError, match=message):
        check_names({"b": (2,), "c": (1,)}, {"a": (1,), "b": (3,)}, "here")


def _rewrite(folder: Path, target: Path, weights: dict[str, Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, target / "model.safetensors")
    return target


def _check(folder: Path) -> None:
    check_checkpoint(_shape(folder), folder, checkpoint_files(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_checkpoint_passes(folders: dict[str, Path], name: str) -> None:
    assert len(checkpoint_files(folders[name])) > 1
    _check(folders[name])


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, change: str
) -> None:
    weights, name = _weights(folders["moe"]), "model.layers.1.mlp.experts.3.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "unknown":
        name = "model.layers.2.mlp.gate.weight"
        weights[name] = torch.zeros(4, 64)
    else:
        weights[name] = weights[name][:-1].clone()
    with pytest.raises(EngineError, match=f"(?s)does not fit the model:\n{name}: {change}"):
        _check(_rewrite(folders["moe"], tmp_path / "changed", weights))


def test_a_tied_head_may_be_written_where_it_equals_the_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = _weights(folders["qwen3_tied"])
    head = weights["model.embed_tokens.weight"].clone()
    _check(_rewrite(folders["qwen3_tied"], tmp_path / "equal", weights | {"lm_head.weight": head}))
    head[3, 3] += 1
    with pytest.raises(EngineError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        _check(_rewrite(folders["qwen3_tied"], tmp_path / "different", weights | {"lm_head.weight": head}))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_is_filled_from_the_files(folders: dict[str, Path], name: str) -> None:
    """The second of two pipeline stages, and of two tensor-parallel ranks; weights are rounded to its dtype."""
    plan, weights = plan_model(folders[name], Layout(tensor=2, pipeline=2)), _weights(folders[name])
    experts = range(plan.shape.experts // 2, plan.shape.experts)
    part = Part(range(1, 2), experts, first=False, last=True, tensor_rank=1, tensor_size=2)
    entries = stage_entries(plan.shape, LOCAL, part)
    held = {e.name: torch.full(entry_shape(plan.shape, e, 2), torch.nan, dtype=torch.float64) for e in entries}
    module = SimpleNamespace(named_parameters=held.items)
    load_weights(SimpleNamespace(module=module, plan=plan, part=part, entries=entries), folders[name])  # type: ignore[arg-type]
    for entry in entries:
        expected = fuse(plan.shape, entry, [weights[source] for source in entry.sources], 1, 2)
        assert torch.equal(held[entry.name], expected.to(torch.float64)), entry.name


def test_a_missing_file_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no model\.safetensors"):
        checkpoint_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(EngineError, match=r"no part-1\.safetensors"):
        checkpoint_files(tmp_path)


def test_a_tensor_in_two_files_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _rewrite(folders["qwen3_tied"], tmp_path / "twice", _weights(folders["qwen3_tied"]))
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "other.safetensors")
    index = '{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(EngineError, match=r"model\.norm\.weight is in more than one file"):
        _check(folder)
