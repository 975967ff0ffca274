"""What a new run is warned of, and how a plan names linear layers."""

from __future__ import annotations

from pathlib import Path

from conf.compose import compose
from flows.cautions import cautions
from flows.planning import _by_kind, describe
from tasks.engines.plan import plan_run

RANDOM = "warning: model.path is null and model.warm_start is null: the weights are random"
MEGATRON = ("recipe=bf16", "trainer=megatron", "trainer.device=cpu")


def test_random_weights_are_told(tmp_path: Path) -> None:
    assert cautions(compose(["model.warm_start=null"])) == (RANDOM,)
    assert cautions(compose(["model=qwen3_8b_base"])) == (RANDOM,)
    assert cautions(compose([])) == ()
    assert cautions(compose([f"model.path={tmp_path}"])) == ()


def test_a_dry_run_tells_them() -> None:
    config = compose(["model.warm_start=null"])
    assert describe(config, plan_run(config)).splitlines()[-2] == RANDOM


def test_more_threads_than_cores_are_told() -> None:
    """Nothing counts them on a local Ray; on an existing cluster they are reserved, and on GPUs those are."""
    config = compose([*MEGATRON, "trainer.ranks=4", "trainer.threads=2"])
    wanted = "warning: trainer.ranks = 4 with trainer.threads = 2: 8 threads on a machine of 7 cores"
    assert [line.startswith(wanted) for line in cautions(config, cores=7)] == [True]
    assert cautions(config, cores=8) == ()
    existing = ("cluster=existing", "cluster.address=head:6379")
    assert cautions(compose([*MEGATRON, "trainer.ranks=4", *existing]), cores=1) == ()
    assert cautions(compose(["recipe=bf16", "trainer=megatron", "trainer.ranks=4"]), cores=1) == ()


def test_linears_of_layers_are_grouped() -> None:
    gates = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(48))
    assert _by_kind((*gates, "lm_head")) == "48 x mlp.gate, lm_head"
    assert _by_kind(("model.layers.3.mlp.up_proj", "lm_head")) == "model.layers.3.mlp.up_proj, lm_head"
    assert _by_kind(()) == "none"
