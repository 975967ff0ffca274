"""What a step sends over which link of a GPU cluster, on paper: bytes from shapes, seconds from the links' speeds.

`python -m infra.multi_node` prints the tables of MULTI_NODE.md; assumptions are fields of `Links` and `Work`. Times
are those of one transfer alone at the assumed efficiency, without latency and without what computing hides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from conf.compose import compose
from conf.schema import TinyArchitecture

Link = Literal["NVLink", "InfiniBand", "Ethernet"]
Precision = Literal["bf16", "fp8"]

_GB: Final = 1e9
_BLOCK: Final = 128 * 128
"""Weights that share an fp32 scale."""

_SAMPLE_BYTES: Final = 8 + 4
"""Of a token in a batch of samples: its id (int64) and its log-probability (fp32)."""


@dataclass(frozen=True)
class Links:
    """Bytes/s in one direction, as the makers give them (sources: MULTI_NODE.md), and the share that is reached."""

    gpus_per_node: int = 8
    nvlink: float = 450e9
    """Of a GPU to the others of its node: NVLink 4, 900 GB/s both ways together."""

    infiniband: float = 50e9
    """Of a GPU's own adapter: NDR, 400 Gb/s."""

    ethernet: float = 12.5e9
    """Of a node to the store and to Ray's other nodes: 100 Gb/s, assumed."""

    gpu_memory: float = 141e9
    """Bytes of a GPU (H200)."""

    efficiency: float = 0.8
    """Share of each that a large transfer reaches; assumed, not measured."""


@dataclass(frozen=True)
class Work:
    """A step: `samples` for each GPU, each of `tokens` tokens (prompt and answer) on average; `updates` of the
    optimiser."""

    samples: int = 32
    tokens: int = 2560
    updates: int = 1


@dataclass(frozen=True)
class Shape:
    """Parameters by how they travel. `linears`: in FP8 where the recipe says so; `experts`: those of them in experts;
    `others`: embeddings, output layer, norms, routers, always BF16."""

    name: str
    hidden: int
    layers: int
    linears: int
    experts: int
    others: int
    experts_per_token: int

    @property
    def parameters(self) -> int:
        return self.linears + self.others


@dataclass(frozen=True)
class Layout:
    """`trainers` and `rollouts`: GPUs of each pool, the same ones where `colocated`. Replicas of the rollout engine
    have one GPU each. `tensor` and `expert` parallel groups lie within a node."""

    trainers: int
    rollouts: int
    colocated: bool
    tensor: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Transfer:
    """`bytes` through the busiest single link of the kind; `seconds` that this takes."""

    what: str
    link: Link
    bytes: float
    seconds: float


def shape_of(name: str, a: TinyArchitecture) -> Shape:
    """Count a Qwen3-like model's parameters; `ValueError` for latent attention."""
    if a.latent_attention is not None:
        raise ValueError(f"{name}: latent attention is not counted here")
    queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    attention = a.hidden_size * (2 * queries + 2 * keys)
    norms = 2 * a.hidden_size + (2 * a.head_dim if a.qk_norm else 0)
    if a.experts is None:
        mlp, experts, router = 3 * a.hidden_size * a.intermediate_size, 0, 0
    else:
        experts = mlp = 3 * a.hidden_size * a.experts.intermediate_size * a.experts.count
        router = a.hidden_size * a.experts.count
    vocabulary = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
    layers = a.num_hidden_layers
    return Shape(
        name=name,
        hidden=a.hidden_size,
        layers=layers,
        linears=layers * (attention + mlp),
        experts=layers * experts,
        others=layers * (norms + router) + vocabulary + a.hidden_size,
        experts_per_token=0 if a.experts is None else a.experts.per_token,
    )


def weight_bytes(shape: Shape, precision: Precision) -> float:
    """Of all weights as a sync sends them: BF16, or E4M3 codes with an fp32 scale for each block of 128 x 128."""
    linear = 2.0 if precision == "bf16" else 1 + 4 / _BLOCK
    return linear * shape.linears + 2 * shape.others


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Of a training rank: BF16 weights and fp32 gradients of its part, and its share of fp32 masters and moments."""
    dense = (shape.parameters - shape.experts) / layout.tensor
    experts = shape.experts / layout.expert
    return 6 * (dense + experts) + 12 * shape.parameters / layout.trainers


def transfers(shape: Shape, layout: Layout, work: Work, links: Links, precision: Precision) -> list[Transfer]:
    """What a step sends, in its order."""
    nodes = -(-layout.trainers // links.gpus_per_node)
    gpus = layout.trainers if layout.colocated else layout.trainers + layout.rollouts
    found = [_sync(shape, layout, links, precision), _samples(gpus, work, links)]
    # Tokens of a data-parallel rank. Three passes: scored (forward), trained (forward and backward).
    own = gpus * work.samples * work.tokens / layout.trainers * layout.tensor
    if layout.tensor > 1:
        # With sequence parallelism: 2 gathers and 2 scatters of activations a layer and pass (Korthikanti et al. 2022).
        moved = 12 * own * shape.layers * shape.hidden * 2 * (layout.tensor - 1) / layout.tensor
        found.append(_transfer("activations between tensor ranks", "NVLink", moved, links))
    if layout.expert > 1:
        # To the experts and back, in each of three passes.
        moved = (
            6 * own * shape.experts_per_token * shape.layers * shape.hidden * 2 * (layout.expert - 1) / layout.expert
        )
        found.append(_transfer("tokens to experts and back", "NVLink", moved, links))
    found.append(_gradients(shape, layout, work, links, nodes))
    return found


def _sync(shape: Shape, layout: Layout, links: Links, precision: Precision) -> Transfer:
    """Colocated: each GPU gets over NVLink what other ranks of its node hold. Separate pools: a broadcast along the
    nodes, to each of which every adapter brings a part, which its GPUs then share."""
    what, size = f"weights, {precision}", weight_bytes(shape, precision)
    if layout.colocated:
        experts = size - weight_bytes(replace(shape, linears=shape.linears - shape.experts), precision)
        moved = experts * (1 - 1 / layout.expert) + (size - experts) * (1 - 1 / layout.tensor)
        return _transfer(what, "NVLink", moved, links)
    if layout.trainers + layout.rollouts <= links.gpus_per_node:
        return _transfer(what, "NVLink", size, links)
    return _transfer(what, "InfiniBand", size / links.gpus_per_node, links)


def _samples(gpus: int, work: Work, links: Links) -> Transfer:
    """All of them to the node of one process, whose link is the busiest."""
    size = gpus * work.samples * work.tokens * _SAMPLE_BYTES
    return _transfer("samples to the trainer", "Ethernet", size, links)


def _gradients(shape: Shape, layout: Layout, work: Work, links: Links, nodes: int) -> Transfer:
    """fp32 gradients to their owners and BF16 weights back, in rings: 6 bytes a parameter leave each node but for a
    share of 1 / nodes, spread over its adapters; in a single node each GPU's part goes over NVLink."""
    what = "gradients to owners, weights back"
    if nodes > 1:
        moved = 6 * shape.parameters * (nodes - 1) / nodes / links.gpus_per_node
        return _transfer(what, "InfiniBand", work.updates * moved, links)
    dense, copies = (shape.parameters - shape.experts) / layout.tensor, layout.trainers / layout.tensor
    expert_copies = layout.trainers / layout.expert
    moved = 6 * (dense * (copies - 1) / copies + shape.experts / layout.expert * (expert_copies - 1) / expert_copies)
    return _transfer(what, "NVLink", work.updates * moved, links)


def checkpoint(shape: Shape, layout: Layout, links: Links) -> Transfer:
    """fp32 masters and moments, each rank its part, through its node's link to the store."""
    nodes = -(-layout.trainers // links.gpus_per_node)
    return _transfer("checkpoint", "Ethernet", 12 * shape.parameters / nodes, links)


def _transfer(what: str, link: Link, size: float, links: Links) -> Transfer:
    speeds: dict[Link, float] = {
        "NVLink": links.nvlink,
        "InfiniBand": links.infiniband,
        "Ethernet": links.ethernet,
    }
    return Transfer(what, link, size, size / (speeds[link] * links.efficiency))


PLANS: Final[dict[str, Layout]] = {
    "qwen3_8b_base": Layout(8, 8, colocated=True, tensor=2),
    "qwen3_30b_a3b": Layout(8, 8, colocated=True, expert=8),
}
"""Models with a plan, and how eight colocated GPUs are laid out."""


def layouts(model: str, gpus: int) -> tuple[Layout, Layout]:
    """Colocated on all GPUs; and separate pools of half of them each."""
    base, half = PLANS[model], gpus // 2
    together = replace(base, trainers=gpus, rollouts=gpus)
    return together, replace(base, trainers=half, rollouts=half, colocated=False, expert=min(base.expert, half))


def table(model: str, gpu_counts: Sequence[int], work: Work, links: Links) -> str:
    """Markdown: a row for each transfer, GB through the busiest link and seconds."""
    architecture = compose([f"model={model}", "recipe=bf16"]).model.architecture
    assert architecture is not None
    shape = shape_of(model, architecture)
    columns = [
        (f"{n} {kind}", layout) for n in gpu_counts for kind, layout in zip(_KINDS, layouts(model, n), strict=True)
    ]
    head = "| | " + " | ".join(name for name, _ in columns) + " |"
    lines = [head, "|---|" + "---:|" * len(columns)]
    state = [_state_cell(state_bytes(shape, layout), links) for _, layout in columns]
    lines.append("| training state of a rank | " + " | ".join(state) + " |")
    rows: dict[str, list[str]] = {}
    for index, (_, layout) in enumerate(columns):
        bf16 = transfers(shape, layout, work, links, "bf16")[:1]
        sent = [*bf16, *transfers(shape, layout, work, links, "fp8"), checkpoint(shape, layout, links)]
        for transfer in sent:
            cells = rows.setdefault(transfer.what, ["-"] * len(columns))
            cells[index] = f"{transfer.bytes / _GB:,.2f} GB {transfer.link}, {transfer.seconds:,.3f} s"
    lines += [f"| {what} | " + " | ".join(cells) + " |" for what, cells in rows.items()]
    return f"**{model}**: {shape.parameters:,} parameters\n\n" + "\n".join(lines)


def _state_cell(size: float, links: Links) -> str:
    lack = "" if size < links.gpu_memory else ": does not fit"
    return f"{size / _GB:,.0f} GB{lack}"


_KINDS: Final = ("colocated", "separate")


def main() -> int:
    """Print the tables for 8, 64 and 512 GPUs."""
    for model in PLANS:
        print(table(model, (8, 64, 512), Work(), Links()), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
