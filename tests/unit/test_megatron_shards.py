"""Shards of a model on tensor-parallel ranks, without processes: parts, exports by shard, and who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.megatron_config import Layout, part_at, plan_model
from tasks.engines.megatron_export import Exporter, exporter_of
from tasks.engines.megatron_names import Entry, Form, ModelShape, fuse, source_shape, split, stage_entries
from tasks.engines.megatron_shards import (
    Holding,
    fuse_parts,
    holdings,
    join_parts,
    local_names,
    part_bounds,
    part_tensors,
    scale_block,
    separable,
    whole_model,
)
from tasks.engines.megatron_world import World
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears, scale_name
from tasks.numerics.fp8 import block_amax, encode_scales, quantize_as
from tests.engines.megatron_state import CONFIGS, SCALINGS, recipe_of

DENSE = ("tied", "bias", "one_kv_head")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("configs")
    for name, config in CONFIGS.items():
        config().save_pretrained(base / name)
    return {name: base / name for name in CONFIGS}


def _shape(folder: Path, tensor: int) -> ModelShape:
    return plan_model(folder, Layout(tensor=tensor)).shape


def _weights(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    parameters = checkpoint_parameters(folder_shape(folder))
    return {n: torch.randn(tuple(p.shape), generator=generator).to(torch.bfloat16) for n, p in parameters.items()}


def _shards(shape: ModelShape, entry: Entry, weights: Mapping[str, Tensor], size: int) -> list[Tensor]:
    return [fuse(shape, entry, [weights[name] for name in entry.sources], rank, size) for rank in range(size)]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_cut_and_joined_without_the_whole(folders: dict[str, Path], name: str, size: int) -> None:
    shape, weights = _shape(folders[name], size), _weights(folders[name])
    for entry in whole_model(shape):
        cut = 1 if entry.layout == "whole" else size
        if not separable(shape, entry, cut):
            assert entry.layout == "qkv" and cut > shape.groups
            continue
        shards = _shards(shape, entry, weights, cut)
        parts = [part_tensors(shape, entry, shard, cut) for shard in shards]
        for source in entry.sources:
            assert torch.equal(join_parts(shape, entry, [part[source] for part in parts]), weights[source])
        for rank, shard in enumerate(shards):
            read = {}
            for source in entry.sources:
                dim, start, stop = part_bounds(shape, entry, source, rank, cut)
                read[source] = weights[source].narrow(dim, start, stop - start)
            assert torch.equal(fuse_parts(shape, entry, read, cut), shard), entry.name


def _exporters(
    folder: Path, weights: Mapping[str, Tensor], scaling: str, size: int
) -> tuple[list[Exporter], frozenset[str]]:
    shape, recipe = _shape(folder, size), recipe_of(*SCALINGS[scaling])
    quantized = plan_linears(folder_shape(folder), recipe.rollout_linears).quantized
    parts = [part_at(shape, Layout(tensor=size, rank=rank), 0, 0, rank) for rank in range(size)]
    found = []
    for rank, part in enumerate(parts):
        entries = stage_entries(shape, Form(False, False), part)
        held = {
            e.name: fuse(shape, e, [weights[s] for s in e.sources], *((0, 1) if e.layout == "whole" else (rank, size)))
            for e in entries
        }
        world = World(rank, size, holdings(shape, parts), local_names(shape, entries), torch.device("cpu"))
        found.append(exporter_of(shape, world, held, recipe, quantized))
    return found, frozenset(f"{name}.weight" for name in quantized)


def _encode(exporters: list[Exporter], holding: Holding) -> dict[str, Tensor]:
    """As the ranks find it together: from the largest amax of all."""
    shape, fmt, found = exporters[0].shape, exporters[0].fmt, {}
    if holding.size == 1 or fmt.block[1 if holding.entry.layout == "columns" else 0] is not None:
        return {}
    if not separable(shape, holding.entry, holding.size):
        return {}
    parts = [
        part_tensors(shape, holding.entry, e.weights[e.world.names[holding.entry.sources]], holding.size)
        for e in exporters
    ]
    for name in exporters[0].codes.intersection(holding.entry.sources):
        amax = torch.stack([block_amax(p[name], fmt.block_of(tuple(p[name].shape))) for p in parts]).amax(0)
        found[name] = encode_scales(amax, fmt.power_of_two, fmt.limits.largest)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", DENSE)
def test_shards_quantised_before_they_are_joined_are_the_whole_quantised(
    folders: dict[str, Path], name: str, scaling: str, size: int
) -> None:
    weights = _weights(folders[name])
    exporters, codes = _exporters(folders[name], weights, scaling, size)
    found: dict[str, Tensor] = {}
    for holding in exporters[0].world.holdings:
        encode = _encode(exporters, holding)
        sent = [exporters[shard[0]].give(holding, encode) for shard in holding.shards]
        for tensors in sent:
            assert [(tuple(t.shape), t.dtype) for t in tensors] == [
                (f.shape, f.dtype) for f in exporters[0].forms(holding)
            ]
        found |= exporters[0].join(holding, sent)
    expected: dict[str, Tensor] = {}
    for tensor, weight in weights.items():
        if tensor in codes:
            q = quantize_as(weight, exporters[0].fmt)
            expected |= {tensor: q.codes, scale_name(tensor): q.scales}
        else:
            expected[tensor] = weight
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_codes_travel_where_blocks_end_at_the_cut(folders: dict[str, Path]) -> None:
    """By hand, of two ranks: q 2 x 128 rows, k 2 x 64, gate 2 x 160 rows, down 2 x 160 columns."""
    early = {
        ("tied", "block"): {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ("bias", "block"): set(),
        ("bias", "mxfp8"): {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ("bias", "tensor"): {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ("one_kv_head", "tensor"): {"o_proj", "gate_proj", "up_proj", "down_proj"},
    }
    for (name, scaling), expected in early.items():
        exporter = _exporters(folders[name], _weights(folders[name]), scaling, 2)[0][0]
        ahead = {
            source.split(".")[-2]
            for holding in exporter.world.holdings
            for source in holding.entry.sources
            if exporter.ahead(holding, source)
        }
        assert ahead == expected, (name, scaling)


def test_every_parameter_has_its_holders(folders: dict[str, Path]) -> None:
    layout = Layout(pipeline=2, data=2, expert=2)
    shape = plan_model(folders["moe"], layout).shape
    # World in Megatron's order: data within a pipeline stage.
    parts = [part_at(shape, layout, stage, expert, 0) for stage in range(2) for expert in range(2)]
    held = {source: h.shards for h in holdings(shape, parts) for source in h.entry.sources}
    assert held["model.embed_tokens.weight"] == ((0, 1),)
    assert held["model.layers.1.self_attn.q_proj.weight"] == ((2, 3),)
    assert held["model.layers.0.mlp.experts.1.up_proj.weight"] == ((0,),)
    assert held["model.layers.1.mlp.experts.2.down_proj.weight"] == ((3,),)
    assert held["lm_head.weight"] == ((2, 3),)
    assert list(held) == [name for e in whole_model(shape) for name in e.sources]


def test_the_copy_of_a_tied_embedding_is_not_sent(folders: dict[str, Path]) -> None:
    layout = Layout(tensor=2, pipeline=2)
    shape = plan_model(folders["tied"], layout).shape
    parts = [part_at(shape, layout, stage, 0, tensor) for stage in range(2) for tensor in range(2)]
    held = {source: h.shards for h in holdings(shape, parts) for source in h.entry.sources}
    assert held["model.embed_tokens.weight"] == ((0,), (1,))
    assert held["model.norm.weight"] == ((2, 3),)
    assert held["model.layers.1.mlp.down_proj.weight"] == ((2,), (3,))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_scale_blocks_are_the_largest_that_never_straddle(folders: dict[str, Path], name: str, size: int) -> None:
    """By counting: number the 256-blocks of every shard, and look which numbers meet in the Hugging Face tensor."""
    if name == "moe" and size > 1:
        return
    shape = _shape(folders[name], size)
    for entry in whole_model(shape):
        cut = 1 if entry.layout == "whole" else size
        whole = [torch.zeros(source_shape(shape, source), dtype=torch.int64) for source in entry.sources]
        shards = [
            (torch.arange(shard.numel()) // 256 + rank * 10**6).view(shard.shape)
            for rank, shard in enumerate(fuse(shape, entry, whole, r, cut) for r in range(cut))
        ]
        block = scale_block(shape, entry, cut)
        for numbers in split(shape, entry, shards).values():
            flat = numbers.reshape(-1)
            first = flat[::block].repeat_interleave(block)[: flat.numel()]
            assert torch.equal(first, flat), (entry.name, block)
