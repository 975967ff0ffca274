"""Traffic on paper, beside values worked by hand and the models' own counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from infra.multi_node import (
    PLANS,
    Layout,
    Links,
    Shape,
    Work,
    checkpoint,
    layouts,
    shape_of,
    state_bytes,
    table,
    transfers,
    weight_bytes,
)
from tasks.engines.plan import plan_run

PAGE = Path(__file__).parents[2] / "infra" / "MULTI_NODE.md"
SMALL = Shape("small", hidden=10, layers=2, linears=16_384_000, experts=0, others=1_000, experts_per_token=0)
FULL = Links(efficiency=1.0)
"""Links without loss, so that seconds are bytes over speed."""


def _shape(model: str) -> Shape:
    architecture = compose([f"model={model}", "recipe=bf16"]).model.architecture
    assert architecture is not None
    return shape_of(model, architecture)


@pytest.mark.parametrize(("model", "count"), [("qwen3_8b_base", 8_190_735_360), ("qwen3_30b_a3b", 30_532_122_624)])
def test_parameters_are_the_published_ones(model: str, count: int) -> None:
    assert _shape(model).parameters == count


@pytest.mark.parametrize("model", list(PLANS))
@pytest.mark.parametrize(("recipe", "precision"), [("bf16", "bf16"), ("fp8_rollout", "fp8")])
def test_bytes_are_those_of_the_dry_run(model: str, recipe: str, precision: str) -> None:
    plan = plan_run(compose([f"model={model}", f"recipe={recipe}", "rollout=vllm", "trainer=megatron"]))
    assert weight_bytes(_shape(model), precision) == plan.rollout.weight_bytes  # type: ignore[arg-type]


def _by_name(layout: Layout, shape: Shape = SMALL) -> dict[str, tuple[str, float]]:
    work = Work(samples=2, tokens=100)
    return {t.what: (t.link, t.bytes) for t in transfers(shape, layout, work, FULL, "fp8")}


def test_eight_colocated_gpus_by_hand() -> None:
    found = _by_name(Layout(8, 8, colocated=True, tensor=2))
    # A byte for each linear weight, 4 for 1,000 blocks, 2 for the others: half of it is on the other tensor rank.
    assert found["weights, fp8"] == ("NVLink", (16_384_000 + 4_000 + 2_000) / 2)
    # 8 GPUs x 2 samples x 100 tokens x (8 + 4) bytes.
    assert found["samples to the trainer"] == ("Ethernet", 19_200)
    # 400 tokens on each of 4 pairs, 12 moves a layer, 2 layers, 10 channels of 2 bytes, half of them elsewhere.
    assert found["activations between tensor ranks"] == ("NVLink", 400 * 12 * 2 * 20 / 2)
    # 6 bytes of a pair member's half, three quarters of which other copies own.
    assert found["gradients to owners, weights back"] == ("NVLink", pytest.approx(6 * 16_385_000 / 2 * 3 / 4))


def test_separate_pools_on_two_nodes_by_hand() -> None:
    found = _by_name(Layout(8, 8, colocated=False))
    # Each of eight adapters brings an eighth.
    assert found["weights, fp8"] == ("InfiniBand", (16_384_000 + 4_000 + 2_000) / 8)
    assert found["samples to the trainer"] == ("Ethernet", 2 * 19_200)
    assert "activations between tensor ranks" not in found
    # The trainer is one node: seven eighths of what a GPU holds.
    assert found["gradients to owners, weights back"] == ("NVLink", pytest.approx(6 * 16_385_000 * 7 / 8))


def test_gradients_between_nodes_by_hand() -> None:
    found = _by_name(Layout(16, 16, colocated=True, tensor=2))
    # Half of the model leaves each of two nodes, over eight adapters.
    assert found["gradients to owners, weights back"] == ("InfiniBand", 6 * 16_385_000 / 2 / 8)


def test_experts_by_hand() -> None:
    shape = Shape("moe", hidden=10, layers=2, linears=18_384, experts=16_384, others=0, experts_per_token=4)
    found = _by_name(Layout(8, 8, colocated=True, expert=8), shape)
    # Experts alone are elsewhere, seven eighths of them; the dense weights are on every GPU.
    assert found["weights, fp8"] == ("NVLink", pytest.approx(16_388 * 7 / 8))
    # 200 tokens a GPU, 4 experts each, there and back in 3 passes, 2 layers, 10 channels of 2 bytes.
    assert found["tokens to experts and back"] == ("NVLink", pytest.approx(200 * 4 * 6 * 2 * 20 * 7 / 8))
    # Dense gradients among 8 copies; an expert has one copy, so nothing of it moves.
    assert found["gradients to owners, weights back"] == ("NVLink", pytest.approx(6 * 2_000 * 7 / 8))


def test_seconds_are_bytes_over_the_links_speed() -> None:
    links = Links(efficiency=0.5)
    sync = transfers(SMALL, Layout(8, 8, colocated=False), Work(), links, "fp8")[0]
    assert sync.seconds == pytest.approx(sync.bytes / 25e9)
    assert checkpoint(SMALL, Layout(16, 16, colocated=True), FULL).seconds == pytest.approx(
        12 * 16_385_000 / 2 / 12.5e9
    )


def test_state_of_a_rank_by_hand() -> None:
    # 2 + 4 bytes of a rank's part, 12 of all parameters over the ranks.
    assert state_bytes(SMALL, Layout(8, 8, colocated=True, tensor=2)) == 6 * 16_385_000 / 2 + 12 * 16_385_000 / 8


def test_layouts_cover_all_gpus() -> None:
    for model in PLANS:
        together, apart = layouts(model, 64)
        assert (together.trainers, together.rollouts) == (64, 64)
        assert (apart.trainers, apart.rollouts, apart.colocated) == (32, 32, False)


@pytest.mark.parametrize("model", list(PLANS))
def test_the_page_has_these_tables(model: str) -> None:
    assert table(model, (8, 64, 512), Work(), Links()) in PAGE.read_text()
