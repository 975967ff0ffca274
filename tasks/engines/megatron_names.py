"""Hugging Face names and Megatron's: one table of rules, and pure functions that carry tensors both ways.

Megatron keeps Q, K and V of a layer in one matrix, gate and up in another, pads the vocabulary, and cuts matrices
over ranks. `stage_entries` says which tensors a rank holds and what each is made of; `fuse` cuts one out of
Hugging Face tensors, `split` gives these back, bit for bit. Nothing here knows Megatron itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from tasks.engines.protocols import EngineError

Layout = Literal["whole", "columns", "qkv", "gate_up", "vocabulary"]
"""How a tensor lies on tensor-parallel ranks.

whole: on each rank. columns: cut along the second dimension. qkv: groups of queries, their key and their value,
cut along groups. gate_up: the rank's rows of gate over its rows of up. vocabulary: rows, zeros behind the last token.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder, whatever its names.

    `groups`: key and value heads. `experts` 0: a dense MLP of `mlp` channels; else that many of `mlp` channels each.
    `padded_vocabulary`: rows of Megatron's embedding.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    mlp: int
    vocabulary: int
    padded_vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0

    @property
    def queries(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.groups * self.head_dim


@dataclass(frozen=True)
class Form:
    """How Megatron's layers are written.

    `fused_norms`: the norm before a linear layer is a parameter of it (Transformer Engine's spec). `grouped_experts`:
    the experts of a layer are one module with a weight each, not a module each.
    """

    fused_norms: bool
    grouped_experts: bool


@dataclass(frozen=True)
class Part:
    """What one rank holds: `layers` and `experts` by their number in the model; the ends of the model or not."""

    layers: range
    experts: range
    first: bool
    last: bool
    tensor_rank: int = 0
    tensor_size: int = 1


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter, by its name on its rank, and the Hugging Face tensors that make it up, in order."""

    name: str
    sources: tuple[str, ...]
    layout: Layout


def _attention(shape: ModelShape, form: Form) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    norm = "self_attention.linear_qkv.layer_norm_weight" if form.fused_norms else "input_layernorm.weight"
    yield norm, ("input_layernorm.weight",), "whole"
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        sources = tuple(f"self_attn.{part}_proj.{kind}" for part in ("q", "k", "v"))
        yield f"self_attention.linear_qkv.{kind}", sources, "qkv"
    if shape.qk_norm:
        yield "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"
        yield "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"


def _dense(form: Form) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    norm = "mlp.linear_fc1.layer_norm_weight" if form.fused_norms else "pre_mlp_layernorm.weight"
    yield norm, ("post_attention_layernorm.weight",), "whole"
    yield "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"
    yield "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"


def _mixture(form: Form, experts: range) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    yield "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"
    yield "mlp.router.weight", ("mlp.gate.weight",), "whole"
    for local, expert in enumerate(experts):
        # An expert is never cut: its gate and up are joined as on a single rank.
        gate_up = tuple(f"mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up"))
        down = (f"mlp.experts.{expert}.down_proj.weight",)
        if form.grouped_experts:
            yield f"mlp.experts.linear_fc1.weight{local}", gate_up, "whole"
            yield f"mlp.experts.linear_fc2.weight{local}", down, "whole"
        else:
            yield f"mlp.experts.local_experts.{local}.linear_fc1.weight", gate_up, "whole"
            yield f"mlp.experts.local_experts.{local}.linear_fc2.weight", down, "whole"


def stage_entries(shape: ModelShape, form: Form, part: Part) -> tuple[Entry, ...]:
    """All parameters of one rank, in the order of the model."""
    entries = []
    if part.first:
        entries.append(Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"))
    for local, layer in enumerate(part.layers):
        mlp = _mixture(form, part.experts) if shape.experts else _dense(form)
        for name, sources, layout in (*_attention(shape, form), *mlp):
            named = tuple(f"model.layers.{layer}.{source}" for source in sources)
            entries.append(Entry(f"decoder.layers.{local}.{name}", named, layout))
    if part.last:
        entries.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"))
        if not shape.tied:
            entries.append(Entry("output_layer.weight", ("lm_head.weight",), "vocabulary"))
        elif not part.first:
            # The last stage of a pipeline has a copy of the tied embedding.
            entries.append(Entry("output_layer.weight", ("model.embed_tokens.weight",), "vocabulary"))
    return tuple(entries)


def hf_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Names and shapes of a whole Hugging Face checkpoint."""
    form, everything = Form(False, False), Part(range(shape.layers), range(shape.experts), True, True)
    entries = stage_entries(shape, form, everything)
    return {source: source_shape(shape, source) for entry in entries for source in entry.sources}


def source_shape(shape: ModelShape, name: str) -> Shape:
    """Shape of one Hugging Face tensor."""
    hidden = shape.hidden
    by_suffix: Final[Mapping[str, Shape]] = {
        "q_proj.weight": (shape.queries, hidden),
        "k_proj.weight": (shape.keys, hidden),
        "v_proj.weight": (shape.keys, hidden),
        "q_proj.bias": (shape.queries,),
        "k_proj.bias": (shape.keys,),
        "v_proj.bias": (shape.keys,),
        "o_proj.weight": (hidden, shape.queries),
        "q_norm.weight": (shape.head_dim,),
        "k_norm.weight": (shape.head_dim,),
        "gate_proj.weight": (shape.mlp, hidden),
        "up_proj.weight": (shape.mlp, hidden),
        "down_proj.weight": (hidden, shape.mlp),
        "gate.weight": (shape.experts, hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (shape.vocabulary, hidden),
        "lm_head.weight": (shape.vocabulary, hidden),
    }
    return by_suffix[".".join(name.rsplit(".", 2)[-2:])]


def entry_shape(shape: ModelShape, entry: Entry, size: int) -> Shape:
    """Shape of a parameter on one of `size` tensor-parallel ranks."""
    rows, *rest = source_shape(shape, entry.sources[0])
    if entry.layout == "columns":
        return (rows, rest[0] // size)
    if entry.layout == "vocabulary":
        return (shape.padded_vocabulary // size, *rest)
    rows = sum(source_shape(shape, source)[0] for source in entry.sources)
    return (rows if entry.layout == "whole" else rows // size, *rest)


def fuse(shape: ModelShape, entry: Entry, sources: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """The rank's parameter from whole Hugging Face tensors; dtype and device are theirs.

    `EngineError` names a tensor of another shape than the model's.
    """
    for name, tensor in zip(entry.sources, sources, strict=True):
        _check_form(name, tuple(tensor.shape), source_shape(shape, name))
    if entry.layout == "whole":
        return torch.cat(tuple(sources)) if len(sources) > 1 else sources[0]
    if entry.layout == "columns":
        return sources[0].chunk(size, dim=1)[rank]
    if entry.layout == "gate_up":
        return torch.cat([source.chunk(size)[rank] for source in sources])
    qkv = entry.layout == "qkv"
    whole = _join_groups(shape, sources) if qkv else _with_rows(sources[0], shape.padded_vocabulary)
    return whole.chunk(size)[rank]


def split(shape: ModelShape, entry: Entry, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Hugging Face tensors from a parameter's shards, one of each tensor-parallel rank in order; `whole`: any one."""
    size = len(shards)
    for shard in shards:
        _check_form(entry.name, tuple(shard.shape), entry_shape(shape, entry, size))
    if entry.layout == "whole":
        rows = [source_shape(shape, source)[0] for source in entry.sources]
        parts: Sequence[Tensor] = shards[0].split(rows)
    elif entry.layout == "columns":
        parts = (torch.cat(tuple(shards), dim=1),)
    elif entry.layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in range(2)]
    elif entry.layout == "qkv":
        parts = _part_groups(shape, torch.cat(tuple(shards)))
    else:
        parts = (torch.cat(tuple(shards))[: shape.vocabulary],)
    return {name: part.contiguous() for name, part in zip(entry.sources, parts, strict=True)}


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _join_groups(shape: ModelShape, sources: Sequence[Tensor]) -> Tensor:
    """Q, K, V `[rows, ...]` to `[groups * (queries of a group + 2) * head_dim, ...]`."""
    grouped = [source.reshape(shape.groups, -1, *source.shape[1:]) for source in sources]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _part_groups(shape: ModelShape, joined: Tensor) -> tuple[Tensor, ...]:
    grouped = joined.reshape(shape.groups, -1, *joined.shape[1:])
    queries = shape.heads // shape.groups * shape.head_dim
    parts = grouped.split([queries, shape.head_dim, shape.head_dim], dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _check_form(name: str, found: Shape, wanted: Shape) -> None:
    if found != wanted:
        raise EngineError(f"{name}: shape {list(found)}, and this model has {list(wanted)}")


def check_names(found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str) -> None:
    """`EngineError` that names every tensor of `where` that is missing, too many or of another shape."""
    problems = [f"{name}: missing" for name in wanted if name not in found]
    problems += [f"{name}: unknown to this model" for name in found if name not in wanted]
    problems += [
        f"{name}: shape {list(found[name])}, and this model has {list(form)}"
        for name, form in wanted.items()
        if name in found and found[name] != form
    ]
    if problems:
        shown = "\n".join(problems[:10]) + (f"\nand {len(problems) - 10} more" if len(problems) > 10 else "")
        raise EngineError(f"{where} does not fit the model:\n{shown}")
