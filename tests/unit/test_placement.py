"""What a run asks of Ray on which cluster, and when that can never be."""

from __future__ import annotations

import math

import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.doctor import processes
from flows.inputs import check_inputs
from flows.placement import Placement, placement, shortage
from flows.record import PHASES
from flows.steps import _merge, trainer_gpus
from infra.device import DeviceFacts, Node

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
    assert lack.endswith("the cluster has 3 GPUs in all")
    many = ("trainer.threads=9", "rollout.threads=9")
    lack = shortage(placement(_config(*EXISTING, *many, ranks=2), 3), nodes, "the cluster")
    assert lack is not None and lack.endswith("the cluster has 24 CPU slots in all")
    lack = shortage(placement(_config(*EXISTING, "trainer.threads=17"), 3), nodes, "the cluster")
    assert lack == "trainer.threads = 17: no node of the cluster has as many CPU slots; allowed: up to 16"
    lack = shortage(placement(_config("cluster.rollout_gpus=0.5", ranks=2), 2), (Node(2, 2),), "this machine")
    assert lack is not None and "2 ranks reserves 0.5 GPUs: two could share one; allowed: cluster.rollout_gpus" in lack


def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts("Some GPU", 2, (9, 0), "13.0", 70.0, 80.0)
    monkeypatch.setattr("flows.inputs.gpu_count", lambda: facts.count)
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: name)
    check_inputs(_config(ranks=2))
    with pytest.raises(ConfigError, match=r"cluster.kind = local: the run asks for 5 Ray .* this machine has 2 GPUs"):
        check_inputs(_config(ranks=4))
    check_inputs(_config(*EXISTING, ranks=4))
    assert processes(_config(ranks=2), facts)[1] is None
    line, lack = processes(_config(ranks=4), facts)
    assert line.endswith("this machine has 2 GPUs and 2 CPU slots in all") and lack is not None


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
