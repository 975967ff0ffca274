"""Engines that share a GPU: what is refused, in which order they are built, and what memory they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose, digest
from conf.problems import ConfigError
from conf.schema import Deadlines, RunConfig, VllmRollout
from flows import inputs, session
from flows.cautions import cautions
from flows.cli import OK, main
from flows.inputs import check_inputs
from flows.placement import placement
from flows.session import RunActors
from flows.sharing import host_shortage, sharing_shortages, sync_bytes
from infra.device import Node
from tasks.bootstrap import build_engines, prepare_model, rebuild_rollout
from tasks.calls import Engines
from tasks.data.examples import Dataset, Example, GraderSpec
from tasks.engines.plan import plan_run
from tests.unit.test_sleep import Course, _Actor

ENGINES = ("rollout=vllm", "trainer=megatron", "recipe=bf16")
SHARED = (*ENGINES, "cluster=colocated")
SHARE = ("rollout.gpu_memory_utilization=0.5", "rollout.kv_cache_memory_bytes=null")


def _memory_keys(config: RunConfig) -> tuple[int, bool]:
    return config.rollout.sleep_level, config.trainer.offload  # type: ignore[union-attr]


def test_sharing_decides_what_nobody_set() -> None:
    assert _memory_keys(compose(SHARED)) == (2, True)
    assert _memory_keys(compose(ENGINES)) == (0, False)
    assert _memory_keys(compose([*SHARED, "rollout.sleep_level=1"])) == (1, True)
    assert _memory_keys(compose([*ENGINES, "cluster.share_gpus=true"])) == (2, True)
    # On CPU nothing is shared, and nothing could sleep.
    assert _memory_keys(compose([*SHARED, "trainer.device=cpu"])) == (0, False)
    # What the engines are given back changes no result.
    assert digest(compose(SHARED)) == digest(compose(ENGINES))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "rollout.sleep_level=0",
            "rollout.sleep_level = 0: with cluster.share_gpus the trainer computes where the engine's weights and KV "
            "cache are; allowed: 1, 2, or null (2)",
        ),
        (
            "trainer.offload=false",
            "trainer.offload = false: with cluster.share_gpus the rollout engine samples where masters, moments and "
            "parameters are; allowed: true, or null (true)",
        ),
        (
            "cluster.rollout_gpus=0.5 cluster.trainer_gpus=0.6",
            "cluster.rollout_gpus = 0.5: with cluster.trainer_gpus 0.6 it is more than one GPU; allowed: a share above "
            "0 up to 0.4, or null",
        ),
        (
            "cluster.rollout_gpus=0",
            "cluster.rollout_gpus = 0.0: with cluster.share_gpus it is no share of a GPU; allowed: a share above 0 and "
            "below 1, or null",
        ),
        (
            "cluster.trainer_gpus=1",
            "cluster.trainer_gpus = 1.0: with cluster.share_gpus it is no share of a GPU; allowed: a share above 0 and "
            "below 1, or null",
        ),
    ],
)
def test_what_cannot_share_is_refused(overrides: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*SHARED, *overrides.split()])
    assert caught.value.problems == (line,)
    # Each is fine without sharing.
    compose([*ENGINES, *overrides.split()])


def test_a_share_that_leaves_the_trainer_nothing_is_refused() -> None:
    share = ("rollout.gpu_memory_utilization=0.95", "rollout.kv_cache_memory_bytes=null")
    with pytest.raises(ConfigError) as caught:
        compose([*SHARED, *share])
    (line,) = caught.value.problems
    assert line.startswith(
        "rollout.gpu_memory_utilization = 0.95: with cluster.share_gpus it leaves the trainer nothing"
    )
    assert line.endswith("allowed: a number > 0 and <= 0.9")
    compose([*ENGINES, *share])


def test_engines_share_also_where_there_is_room_for_both() -> None:
    for gpus in (1, 2, 8):
        found = placement(compose(SHARED), gpus)
        assert (found.rollout_gpus, found.trainer_gpus, found.gpus, found.share_gpu) == (0.4, 0.6, 1, True)
    found = placement(compose([*SHARED, "cluster.rollout_gpus=0.3"]), 2)
    assert (found.rollout_gpus, found.trainer_gpus) == (0.3, 0.7)
    # The same cluster without a GPU: the CPU default's engines, and vLLM's and Megatron's on CPU, ask for none.
    assert placement(compose(["cluster=colocated"]), 0).gpus == 0
    assert placement(compose([*SHARED, "trainer.device=cpu"]), 0).gpus == 0
    assert "1 GPU (rollout 0.4, trainer 0.6), which they share;" in placement(compose(SHARED), 2).describe()
    ranks = placement(compose([*SHARED, "trainer.ranks=2"]), 2)
    assert "2 GPUs (rollout 0.4, trainer 0.6 each), one of which rollout shares;" in ranks.describe()
    assert not placement(compose(ENGINES), 2).share_gpu and placement(compose(ENGINES), 1).share_gpu
    assert not placement(compose([]), 0).share_gpu


def test_engines_that_have_nothing_to_share_are_told() -> None:
    (said,) = cautions(compose(["cluster=colocated"]))
    assert "cluster.share_gpus with rollout=torch trainer=torch: these engines share no GPU" in said
    (said,) = cautions(compose([*SHARED, "trainer.device=cpu", "model=tiny_qwen3"]))
    assert "rollout=vllm trainer=megatron trainer.device=cpu" in said
    assert cautions(compose(SHARED)) == ()


def _course(act: Callable[[Engines], object], share_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> Course:
    """What is asked of the actors (`*name*`), and what is waited for (`phase`)."""
    course: Course = []
    monkeypatch.setattr(Engines, "answer", lambda self, phase, *_: course.append(phase))
    rollout, trainer = _Actor(course, "*rollout "), _Actor(course, "*trainer ")
    new: Any = _Actor(course, "*new rollout ")
    act(Engines(rollout, trainer, Deadlines(), lambda kind, in_place: (new, False), (), False, share_gpu))  # type: ignore[arg-type]
    return course


def test_engines_on_one_gpu_are_built_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's memory is given back before vLLM measures; then vLLM's, before the trainer calibrates."""
    config = compose(SHARED)
    course = _course(lambda e: build_engines.fn(e, config, config.recipe, "m"), True, monkeypatch)
    assert course == [
        "*trainer build",
        "build (trainer)",
        "*trainer offload",
        "put the trainer away",
        "*new rollout build",
        "build (rollout)",
        "*new rollout sleep",
        "sleep",
    ]


def test_engines_that_share_nothing_are_built_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(ENGINES)
    course = _course(lambda e: build_engines.fn(e, config, config.recipe, "m"), False, monkeypatch)
    assert course == ["*trainer build", "*new rollout build", "build (trainer)", "build (rollout)"]


@pytest.mark.parametrize("share_gpu", [True, False])
def test_a_rebuilt_rollout_engine_finds_the_gpu_free(share_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a checkpoint, for which the trainer takes all of its state back, it has to go again."""
    config = compose(SHARED if share_gpu else ENGINES)
    course = _course(lambda e: rebuild_rollout(e, config, config.recipe, "m", "BF16 rollout"), share_gpu, monkeypatch)
    built = ["*new rollout build", "build (BF16 rollout)"]
    away, asleep = ["*trainer offload", "put the trainer away"], ["*new rollout sleep", "sleep"]
    assert course == ([*away, *built, *asleep] if share_gpu else built)


@pytest.mark.parametrize(("trainer", "device"), [("gpu", "cuda"), ("cpu", "cpu")])
def test_the_warm_start_is_where_the_trainer_computes(
    trainer: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, specs = compose([*ENGINES, f"trainer.device={trainer}"]), []
    monkeypatch.setattr(Engines, "answer", lambda *_: ("folder", True))
    monkeypatch.setattr("tasks.bootstrap.ray.wait", lambda refs, timeout: (refs, []))
    actor: Any = type(
        "Trainer", (), {"warm_start": type("Method", (), {"remote": lambda self, *a: specs.append(a)})()}
    )()
    engines = Engines(actor, actor, Deadlines())
    data = Dataset((Example("id", "1 + 1 = ", "2"),), (), GraderSpec("math_verify"))
    prepare_model.fn(engines, config, data, tmp_path, lambda step, loss: None)
    ((spec, *_),) = specs
    assert spec.device == device


@pytest.mark.parametrize(
    ("overrides", "variables"),
    [
        (SHARED, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ((*SHARED, "model.warm_start=null"), None),
        ((*SHARED, "trainer.device=cpu"), None),
    ],
)
def test_a_trainer_that_may_warm_up_has_the_variables_for_it(
    overrides: tuple[str, ...], variables: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached or not: the training that follows must not depend on it."""
    monkeypatch.setattr(session, "cluster_nodes", lambda: (Node(8.0, 1.0),))
    monkeypatch.setattr(session, "spawn", lambda kind, name, threads, cluster, gpus, given=None: given)
    assert RunActors(compose(overrides), "run").trainer() == (variables,)


def test_a_gpu_that_does_not_hold_both_is_told_with_what_it_would_hold() -> None:
    config = compose([*SHARED, *SHARE, "model=qwen3_8b_base"])
    plan = plan_run(config)
    assert plan.rank_memory is not None
    # BF16 weights of the trainer, as many that it sends, and two chunks of 128 MiB.
    assert sync_bytes(config, plan) == plan.rank_memory.weights + plan.rollout.weight_bytes + 2 * 128 * 2**20
    lines = list(sharing_shortages(config, plan, 60e9))
    assert lines[0].startswith(
        "trainer.ranks = 1: a rank trains with 147.4 GB and its activations, and shares a GPU of"
    )
    assert lines[1] == (
        "rollout.gpu_memory_utilization = 0.5: in a sync the trainer holds 33.0 GB beside the rollout engine's 30.0 "
        "GB, and they share a GPU of 60.0 GB; allowed: up to 0.44"
    )
    fits = compose([*SHARED, "rollout.gpu_memory_utilization=0.44", SHARE[1], "model=qwen3_8b_base"])
    assert len(list(sharing_shortages(fits, plan, 60e9))) == 1
    small = compose([*SHARED, "rollout.gpu_memory_utilization=0.2", SHARE[1], "model=qwen3_8b_base"])
    (line,) = list(sharing_shortages(small, plan, 60e9))[1:]
    assert line.endswith("it does not hold the engine's weights, 16.4 GB; allowed: a larger share")
    by_bytes = compose([*SHARED, "rollout.kv_cache_memory_bytes=20000000000", "model=qwen3_8b_base"])
    (line,) = list(sharing_shortages(by_bytes, plan, 60e9))[1:]
    assert "beside the rollout engine's 36.4 GB" in line
    assert int(line.rpartition(" ")[2]) == 60_000_000_000 - sync_bytes(config, plan) - plan.rollout.weight_bytes
    assert list(sharing_shortages(compose([*ENGINES, "model=qwen3_8b_base"]), plan, 1e9)) == []


def test_the_last_evaluations_engine_counts_whose_weights_and_cache_are_bf16() -> None:
    model, h200 = "model=qwen3_8b_base", 141e9
    config = compose([*SHARED, "recipe=fp8_e2e_kv", "rollout.gpu_memory_utilization=0.8", SHARE[1], model])
    plan = plan_run(config)
    assert plan.rollout.weight_bytes < 2 * plan.parameters and plan.rank_memory is not None
    assert sync_bytes(config, plan) == 4 * 8_190_735_360 + 2 * 128 * 2**20
    # A rank alone takes more than that; so it says, too.
    _, line = sharing_shortages(config, plan, h200)
    assert line.endswith(
        "in a sync the trainer holds 33.0 GB beside the rollout engine's 112.8 GB, and they share a GPU of 141.0 GB; "
        "allowed: up to 0.76"
    )
    # As many tokens in BF16 take twice the bytes.
    by_bytes = compose([*SHARED, "recipe=fp8_e2e_kv", "rollout.kv_cache_memory_bytes=60000000000", model])
    _, line = sharing_shortages(by_bytes, plan, h200)
    most = int(line.rpartition(" ")[2])
    assert most == (141_000_000_000 - sync_bytes(config, plan) - 2 * 8_190_735_360) // 2
    fits = compose([*SHARED, "recipe=fp8_e2e_kv", f"rollout.kv_cache_memory_bytes={most}", model])
    assert len(list(sharing_shortages(fits, plan, h200))) == 1


def test_the_reference_of_a_kl_term_is_held_moved_and_trained_beside() -> None:
    plain, kl = (compose([*SHARED, *SHARE, f"algorithm.kl_coef={value}", "model=qwen3_8b_base"]) for value in (0, 0.1))
    before, after = plan_run(plain), plan_run(kl)
    assert before.rank_memory is not None and after.rank_memory is not None
    copy = 2 * 8_190_735_360
    assert (before.rank_memory.reference, after.rank_memory.reference) == (0, copy)
    assert after.rank_memory.held - before.rank_memory.held == copy
    assert sync_bytes(kl, after) - sync_bytes(plain, before) == copy
    assert host_shortage(kl, after, 16 * 8_190_735_360) is None and host_shortage(kl, after, 15 * 8_190_735_360)


def test_this_machines_gpu_is_asked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "gpu_count", lambda: 1)
    monkeypatch.setattr(inputs, "gpu_memory", lambda: 60_000_000_000)
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: name)
    small = compose([*SHARED, *SHARE, "model=qwen3_small"])
    assert isinstance(small.rollout, VllmRollout)
    check_inputs(small)
    with pytest.raises(ConfigError, match=r"rollout.gpu_memory_utilization = 0.5: in a sync .* allowed: up to 0.44"):
        check_inputs(compose([*SHARED, *SHARE, "model=qwen3_8b_base"]))
    monkeypatch.setattr(inputs, "gpu_memory", lambda: None)
    monkeypatch.setattr(inputs, "host_memory", lambda: 115_000_000_000)
    check_inputs(compose([*SHARED, *SHARE, "model=qwen3_8b_base"]))


@pytest.mark.parametrize(("level", "host"), [(2, 14 * 8_190_735_360), (1, 16 * 8_190_735_360)])
def test_host_memory_holds_what_is_away(level: int, host: int) -> None:
    """Weights in BF16, fp32 masters and two moments; at level 1 the rollout engine's weights, too."""
    config = compose([*SHARED, "model=qwen3_8b_base", f"rollout.sleep_level={level}"])
    plan = plan_run(config)
    assert host_shortage(config, plan, host) is None
    lack = host_shortage(config, plan, host - 1)
    assert lack is not None and lack.startswith(
        f"cluster.share_gpus = true: the engines move {host / 1e9:.1f} GB to host"
    )
    assert host_shortage(compose([*ENGINES, "model=qwen3_8b_base"]), plan, 1) is None


def test_a_plan_says_how_they_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: name)
    monkeypatch.setattr("flows.planning.gpu_count", lambda: 1)
    assert main(["train", "--dry-run", *SHARED, *SHARE, "model=qwen3_8b_base"]) == OK
    shown = capsys.readouterr().out
    assert "  shared GPU       sync: trainer 33.03 GB beside the rollout engine; then it is away" in shown
    assert "(rollout.sleep_level 2)" in shown and "1 GPU (rollout 0.4, trainer 0.6), which they share" in shown
    assert "  on 80 GB         trainer.ranks = 1: a rank trains with 147.4 GB" in shown
    assert main(["train", "--dry-run", *ENGINES, *SHARE]) == OK
    assert "shared GPU" not in capsys.readouterr().out
