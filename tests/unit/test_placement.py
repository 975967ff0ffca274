"""What a run asks of Ray on which cluster, and when that can never be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.cli import CONFIG_ERROR, OK, main
from flows.doctor import nodes_of, processes
from flows.inputs import check_inputs
from flows.placement import Placement, memory_shortage, placement, shortage
from flows.record import PHASES
from flows.steps import _merge, trainer_gpus
from infra.device import Node, host_memory
from tasks.engines.plan import plan_run

GPU = ("rollout=vllm", "trainer=megatron", "recipe=bf16")
EXISTING = ("cluster=existing", "cluster.address=head:6379")


def _config(*overrides: str, ranks: int = 1) -> RunConfig:
    return compose([*GPU, f"trainer.ranks={ranks}", *overrides])


def _gpus(config: RunConfig, have: float) -> tuple[float, float]:
    found = placement(config, have)
    return found.rollout_gpus, found.trainer_gpus


def test_engines_have_whole_gpus_where_there_are_enough_and_else_share() -> None:
    assert _gpus(_config(), 2) == (1, 1)
    assert _gpus(_config(ranks=7), 8) == (1, 1)
    # One GPU for both; and with as many ranks as GPUs, one of them has company, and no rank has another's.
    assert _gpus(_config(), 1) == (0.4, 0.6)
    assert _gpus(_config(ranks=8), 8) == (0.4, 0.6)
    assert placement(_config(ranks=8), 8).gpus == 8


def test_engines_on_cpu_reserve_none() -> None:
    assert _gpus(compose([]), 8) == (0, 0)
    assert _gpus(compose(["trainer=megatron", "trainer.device=cpu", "trainer.ranks=2", "recipe=bf16"]), 8) == (0, 0)
    # vLLM runs on CPU where there is no GPU; Megatron on GPUs does not.
    assert _gpus(_config(), 0) == (0, 1)


def test_a_key_that_is_set_holds_and_the_other_follows() -> None:
    assert _gpus(_config("cluster.rollout_gpus=0.3"), 1) == (0.3, 0.7)
    assert _gpus(_config("cluster.rollout_gpus=0.3"), 2) == (0.3, 1)
    assert _gpus(_config("cluster.trainer_gpus=0.8"), 1) == (pytest.approx(0.2), 0.8)
    assert _gpus(_config("cluster.trainer_gpus=0.8", "cluster.rollout_gpus=1"), 1) == (1, 0.8)
    assert _gpus(_config("cluster.rollout_gpus=0"), 1) == (0, 1)


@pytest.mark.parametrize(
    ("rollout", "trainer", "ranks", "gpus"),
    [(0.4, 0.6, 8, 8), (0.5, 0.6, 8, 9), (1, 1, 4, 5), (0, 1, 4, 4), (0.5, 0, 1, 1), (2, 1, 2, 4), (0.5, 0.5, 1, 1)],
)
def test_a_gpu_has_one_rank(rollout: float, trainer: float, ranks: int, gpus: int) -> None:
    assert Placement(ranks, rollout, trainer, 0, 0).gpus == gpus


def test_the_trainers_throughput_is_that_of_a_gpu() -> None:
    assert [trainer_gpus(_config(*device, ranks=4)) for device in ((), ("trainer.device=cpu",))] == [4, 1]
    assert trainer_gpus(compose([])) == 1
    times = {f"time/{phase}_s": 2.0 for phase in PHASES}
    assert _merge([times], 1200.0, 3)["throughput/train_tokens_per_s"] == 100.0


def test_what_never_fits_is_said_with_what_there_is() -> None:
    nodes = (Node(16, 2), Node(8, 1))
    assert shortage(placement(_config(*EXISTING, ranks=3), 3), nodes, "x") is None
    lack = shortage(placement(_config(*EXISTING, ranks=4), 3), nodes, "the cluster")
    assert (
        lack is not None
        and "5 Ray actors (rollout, trainer ranks 0 to 3); 4 GPUs (rollout 0.4, trainer 0.6 each)" in lack
    )
    assert lack.endswith("the cluster has 3 GPUs in all; allowed: trainer.ranks up to 3, or trainer.device=cpu")
    many = ("trainer.threads=9", "rollout.threads=9")
    lack = shortage(placement(_config(*EXISTING, *many, ranks=2), 3), nodes, "the cluster")
    assert lack is not None and lack.endswith("the cluster has 24 CPU slots in all")
    lack = shortage(placement(_config(*EXISTING, "trainer.threads=17"), 3), nodes, "the cluster")
    assert lack == "trainer.threads = 17: no node of the cluster has as many CPU slots; allowed: up to 16"
    lack = shortage(placement(_config("cluster.rollout_gpus=0.5", ranks=2), 2), (Node(2, 2),), "this machine")
    assert lack is not None and "2 ranks reserves 0.5 GPUs: two could share one; allowed: cluster.rollout_gpus" in lack


def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("inputs", "doctor"):
        monkeypatch.setattr(f"flows.{module}.gpu_count", lambda: 2)
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: name)
    check_inputs(_config(ranks=2))
    with pytest.raises(ConfigError, match=r"cluster.kind = local: the run asks for 5 Ray .* this machine has 2 GPUs"):
        check_inputs(_config(ranks=4))
    check_inputs(_config(*EXISTING, ranks=4))
    places = nodes_of(_config(ranks=4))
    assert processes(_config(ranks=4), places).endswith("this machine has 2 GPUs and 2 CPU slots in all")


@pytest.mark.parametrize(
    ("overrides", "have", "wanted"),
    [
        (("trainer=megatron", "recipe=fp8_rollout_kv"), 0, "1 GPU (rollout 0, trainer 1) / trainer.device=cpu"),
        (
            ("trainer=megatron", "recipe=fp8_e2e", "trainer.ranks=2"),
            0,
            "2 GPUs (rollout 0, trainer 1 each) / trainer.device=cpu and a recipe that trains in BF16",
        ),
        (("recipe=bf16", "cluster.rollout_gpus=1"), 0, "1 GPU (rollout 1, trainer 0) / cluster.rollout_gpus=null"),
        (
            ("trainer=megatron", "recipe=bf16", "cluster.trainer_gpus=0.6"),
            0,
            "1 GPU (rollout 0, trainer 0.6) / cluster.trainer_gpus=null with trainer.device=cpu",
        ),
        (
            ("rollout=vllm", "trainer=megatron", "recipe=bf16", "trainer.ranks=4"),
            2,
            "4 GPUs (rollout 0.4, trainer 0.6 each) / trainer.ranks up to 2, or trainer.device=cpu",
        ),
    ],
)
def test_a_run_without_its_gpus_is_told_what_it_could_do(overrides: tuple[str, ...], have: int, wanted: str) -> None:
    config = compose(overrides)
    lack = shortage(placement(config, have), (Node(2, have),), "this machine")
    asked, allowed = wanted.split(" / ")
    assert lack is not None and asked in lack
    assert lack.endswith(f"this machine has {have} GPUs in all; allowed: {allowed}")


def test_what_is_told_would_do() -> None:
    for hint in (("trainer.device=cpu",), ("trainer.device=cpu", "cluster.trainer_gpus=null")):
        config = compose(["trainer=megatron", "recipe=bf16", *hint])
        assert shortage(placement(config, 0), (Node(2, 0),), "this machine") is None


EIGHT = 8_190_735_360
"""Parameters of qwen3_8b_base."""


@pytest.mark.parametrize(
    ("overrides", "gpus", "held"),
    [
        # Rollout weights in BF16; weights, fp32 gradients, masters and two moments of the trainer.
        ((), 0, (2 + 18) * EIGHT),
        (("trainer=megatron", "trainer.device=cpu"), 0, (2 + 18) * EIGHT),
        (("rollout=vllm", "trainer=megatron", "trainer.device=cpu"), 1, 18 * EIGHT),
        (("rollout=vllm", "trainer=megatron", "trainer.device=cpu"), 0, (2 + 18) * EIGHT + 268_435_456),
        (("trainer=megatron",), 1, 2 * EIGHT),
        (("rollout=vllm", "trainer=megatron"), 2, 0),
        (EXISTING, 0, 0),
    ],
)
def test_engines_on_the_cpu_need_its_memory(overrides: tuple[str, ...], gpus: int, held: int) -> None:
    config = compose(["model=qwen3_8b_base", "recipe=bf16", *overrides])
    plan = plan_run(config)
    assert memory_shortage(config, plan, gpus, held) is None
    if held:
        lack = memory_shortage(config, plan, gpus, held - 1)
        told = f"model.name = qwen3_8b_base: the engines on this machine's CPU hold {held / 1e9:,.1f} GB ("
        assert lack is not None and lack.startswith(told)
        assert lack.endswith(
            f"it has {held / 1e9:,.1f} GB of memory; allowed: a smaller model, or rollout=vllm trainer=megatron "
            "trainer.device=gpu on GPUs"
        )


def test_a_model_that_memory_cannot_hold_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: name)
    for module in ("inputs", "planning", "doctor"):
        monkeypatch.setattr(f"flows.{module}.host_memory", lambda: 32_000_000_000)
    command = ["train", "model=qwen3_8b_base", "trainer=megatron", "trainer.device=cpu", "recipe=bf16"]
    command.append(f"runs_dir={tmp_path}/runs")
    refused = "model.name = qwen3_8b_base: the engines on this machine's CPU hold 163.8 GB (rollout weights 16.4 GB"
    assert main(command) == CONFIG_ERROR
    assert refused in capsys.readouterr().err
    # A plan may be for another machine.
    assert main([*command, "--dry-run"]) == OK
    shown = capsys.readouterr().out
    assert f"  memory here      not on this machine: {refused}" in shown and "the weights are random" in shown
    assert not (tmp_path / "runs").exists()


def test_a_containers_memory_is_its_limit(tmp_path: Path) -> None:
    limited, free, v1 = tmp_path / "limited", tmp_path / "free", tmp_path / "v1"
    limited.write_text("1000000\n")
    free.write_text("max\n")
    v1.write_text(f"{2**63 - 4096}\n")
    assert host_memory((limited, tmp_path / "none")) == 1_000_000
    assert host_memory((free, v1)) == host_memory(()) > 1_000_000


def test_a_plan_for_another_cluster_takes_it_as_large_enough() -> None:
    assert _gpus(_config(ranks=64), math.inf) == (1, 1)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.0])
def test_two_ranks_never_share_a_gpu(share: float) -> None:
    wrong = (
        rf"cluster.trainer_gpus = {share}: two of the 2 ranks \(trainer.ranks\) could share a GPU, which NCCL refuses"
    )
    with pytest.raises(ConfigError, match=wrong):
        _config(f"cluster.trainer_gpus={share}", ranks=2)
    _config(f"cluster.trainer_gpus={share}")
    _config("trainer.device=cpu", f"cluster.trainer_gpus={share}", ranks=2)


@pytest.mark.parametrize(
    ("gpus", "wrong"), [("0.00001", "not an amount of GPUs"), ("2", "too large"), ("-1", "too small")]
)
def test_a_rank_has_at_most_one_gpu(gpus: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.trainer_gpus = .*{wrong}"):
        compose([f"cluster.trainer_gpus={gpus}"])


def test_a_folder_of_runs_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "runs_dir=/proc/none/x", "steps=1"]) == CONFIG_ERROR
    assert "runs_dir = /proc/none/x" in capsys.readouterr().err
