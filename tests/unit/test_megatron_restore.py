"""Optimiser state of a checkpoint for each tensor-parallel rank, without processes: exact or quantised anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from conf.schema import Optimizer
from tasks.engines.megatron_config import Layout, part_at, plan_model
from tasks.engines.megatron_names import Form, ModelShape, fuse, stage_entries
from tasks.engines.megatron_restore import Reader, check_forms, kinds_of, unpack_or_spread
from tasks.engines.protocols import EngineError
from tasks.engines.tensor_files import TensorFiles, rank_files
from tasks.numerics.moments import FP8_SMALLEST, MomentFormat, moment_slots, unpack_moments
from tests.engines.megatron_state import Saved, synthetic, write_saved

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SOURCES = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q has 8,192 elements, k and v 2,048 each: together enough for FP8 moments, and on four ranks too few.

    The embedding ends within a block of 256, and rows of padding follow.
    """
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=201,
        tie_word_embeddings=True,
    )
    config.save_pretrained(made := tmp_path_factory.mktemp("model"))
    return made


def _settings(storage: MomentFormat) -> Optimizer:
    return Optimizer(weights="fp32_master", state=storage)


@contextmanager
def _reader(folder: Path, at: Path, storage: MomentFormat, rank: int, size: int) -> Iterator[Reader]:
    layout = Layout(tensor=size, rank=rank)
    shape = plan_model(folder, layout).shape
    entries = stage_entries(shape, Form(False, False), part_at(shape, layout, 0, 0, rank))
    files = [rank_files(at, stem) for stem in ("weights", "optimizer")]
    with TensorFiles(files[0]) as weights, TensorFiles(files[1]) as state:
        kinds = kinds_of(tuple(state.forms))
        yield Reader(shape, {e.name: e for e in entries}, rank, size, _settings(storage), weights, state, kinds)


def _shard(shape: ModelShape, reader: Reader, name: str, whole: dict[str, Tensor]) -> Tensor:
    entry = reader.entries[name]
    rank, size = (0, 1) if entry.layout == "whole" else (reader.rank, reader.size)
    return fuse(shape, entry, [whole[source] for source in entry.sources], rank, size)


def _moments(saved: Saved) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """fp32 first and second moments by weight."""
    found = {}
    for name in saved.weights:
        kinds = {kind: t for full, t in saved.state.items() for at, _, kind in [full.rpartition(".")] if at == name}
        found[name] = unpack_or_spread({kind: t for kind, t in kinds.items() if kind != "step"})
    return {n: first for n, (first, _) in found.items()}, {n: second for n, (_, second) in found.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
def test_every_parameter_gets_the_state_its_optimiser_has(
    folder: Path, tmp_path: Path, storage: MomentFormat, size: int
) -> None:
    saved = synthetic(folder, storage)
    at, first_second = write_saved(saved, tmp_path / "saved"), _moments(saved)
    forms, changed = set(), set()
    for rank in range(size):
        with _reader(folder, at, storage, rank, size) as reader:
            check_forms(reader)
            for name in reader.entries:
                found, exact = reader.parameter_state(name, 3)
                weight = reader.elements(reader.entries[name], None)
                assert torch.equal(weight, _shard(reader.shape, reader, name, saved.weights))
                slots = moment_slots(weight.shape, storage)
                assert {k: (tuple(t.shape), t.dtype) for k, t in found.items() if k != "step"} == {
                    k: (slot.shape, slot.dtype) for k, slot in slots.items()
                }
                assert float(found.pop("step")) == 3.0
                forms.add("exp_avg" in found)
                if not exact:
                    changed.add(name)
                for moment, whole in zip(unpack_moments(found), first_second, strict=True):
                    expected = _shard(reader.shape, reader, name, whole)
                    if exact:
                        assert torch.equal(moment, expected), name
                    else:
                        # One step of E4M3, twice as wide for the square of the second moment's root.
                        error = (moment - expected).abs()
                        assert 0 < float(error.max()) <= 2**-2 * float(expected.abs().max()) + 1e-6, name
    cut = {"decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.mlp.linear_fc2.weight"}
    # Four ranks decode the moments of what is too small for FP8, and cut no other block.
    expected_changes = {1: {QKV}, 2: {QKV, *cut}, 4: set()}
    assert changed == (expected_changes[size] if storage == "fp8" else set())
    assert forms == ({True, False} if storage == "fp8" else {True})


def test_a_small_shard_has_fp32_moments_and_a_large_whole_fp8_ones(folder: Path, tmp_path: Path) -> None:
    """What four ranks saved in fp32 is quantised on one rank, and the other way round it is decoded."""
    saved = synthetic(folder, "fp8")
    plain = {
        f"{name}.{kind}": moment
        for name in SOURCES
        for kind, moment in zip(("exp_avg", "exp_avg_sq"), (m[name] for m in _moments(saved)), strict=True)
    }
    others = {k: t for k, t in saved.state.items() if not (k.rpartition(".")[0] in SOURCES and "exp_avg" in k)}
    at = write_saved(replace(saved, state=others | plain), tmp_path / "four")
    with _reader(folder, at, "fp8", 0, 1) as reader:
        check_forms(reader)
        found, exact = reader.parameter_state(QKV, 3)
        again, _ = reader.parameter_state(QKV, 3)
    assert not exact and found["exp_avg_codes"].numel() > FP8_SMALLEST
    assert all(torch.equal(t.view(torch.uint8), again[k].view(torch.uint8)) for k, t in found.items() if t.ndim)
    at = write_saved(saved, tmp_path / "one")
    with _reader(folder, at, "fp8", 1, 4) as reader:
        found, exact = reader.parameter_state(QKV, 3)
        assert found["exp_avg"].dtype == torch.float32 and found["exp_avg"].numel() < FP8_SMALLEST
        assert torch.equal(found["exp_avg"], _shard(reader.shape, reader, QKV, _moments(saved)[0]))


@pytest.mark.parametrize(
    "stored, wanted, message",
    [
        ("fp32", "fp8", r"no weight of the checkpoint has FP8 moments: trainer\.optimizer\.state differs"),
        ("fp32", "bf16", r"embed_tokens\.weight\.exp_avg: checkpoint torch\.float32, this optimiser torch\.bfloat16"),
        ("bf16", "fp32", r"embed_tokens\.weight\.exp_avg: checkpoint torch\.bfloat16, this optimiser torch\.float32"),
        ("fp8", "fp32", r"optimiser's \['exp_avg', 'exp_avg_sq', 'step'\]: trainer\.optimizer\.weights or \.state"),
    ],
)
def test_another_storage_of_moments_is_refused(
    folder: Path, tmp_path: Path, stored: MomentFormat, wanted: MomentFormat, message: str
) -> None:
    at = write_saved(synthetic(folder, stored), tmp_path / "saved")
    with _reader(folder, at, wanted, 0, 1) as reader, pytest.raises(EngineError, match=message):
        check_forms(reader)


def test_scales_that_no_block_explains_are_refused(folder: Path, tmp_path: Path) -> None:
    saved = synthetic(folder, "fp8")
    key = f"{SOURCES[0]}.exp_avg_scales"
    at = write_saved(replace(saved, state=saved.state | {key: torch.ones(5)}), tmp_path / "saved")
    with _reader(folder, at, "fp8", 0, 1) as reader, pytest.raises(EngineError, match=f"{key}: 5 scales for 8192"):
        check_forms(reader)
