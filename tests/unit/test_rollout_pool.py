"""Which rollout engines are kept, which go first, and what a failed run takes along."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from conf.compose import compose
from conf.schema import KvPrecision, LinearPrecision
from tasks.engines.registry import rollout_kind
from tasks.rollout_pool import RolloutPool
from tests.contract.engines import make_model


class Processes:
    """Starts numbered processes and remembers which were ended."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.ended: list[Any] = []

    def start(self) -> Any:
        return next(self._numbers)


def _pool(most: int) -> tuple[RolloutPool, Processes, Callable[..., tuple[Any, bool]]]:
    processes = Processes()
    pool = RolloutPool(most, processes.ended.append)
    return pool, processes, lambda kind, in_place=False: pool.take(kind, processes.start, in_place)


def test_an_engine_of_the_same_kind_is_kept_and_the_one_used_longest_ago_goes() -> None:
    pool, processes, take = _pool(2)
    assert pool.begin(processes.start) == 1
    assert [take("a"), take("b"), take("a")] == [(1, False), (2, False), (1, True)]
    assert pool.kinds == ("b", "a")
    assert pool.begin(processes.start) is None
    assert take("c") == (3, False)
    assert processes.ended == [2] and pool.kinds == ("a", "c")
    assert take("a") == (1, True)


def test_a_pool_of_one_makes_room_in_place_where_the_engine_can() -> None:
    pool, processes, take = _pool(1)
    pool.begin(processes.start)
    assert [take("a", True), take("b", True), take("b", True)] == [(1, False), (1, False), (1, True)]
    assert processes.ended == [] and pool.kinds == ("b",)
    assert take("c", False) == (2, False)
    assert processes.ended == [1]


def test_a_failed_run_takes_along_what_it_used_and_nothing_else() -> None:
    pool, processes, take = _pool(3)
    pool.begin(processes.start)
    take("bf16"), take("fp8")
    pool.begin(processes.start)
    take("fp8"), take("kv")
    pool.throw_away()
    assert sorted(processes.ended) == [2, 3] and pool.kinds == ("bf16",)
    assert take("fp8") == (4, False)
    # Before its first engine was built, its process goes.
    empty, others, _ = _pool(3)
    empty.begin(others.start)
    empty.throw_away()
    assert others.ended == [1] and empty.begin(others.start) == 2


def test_a_kind_is_what_an_engine_is_built_from(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")

    def kind(*overrides: str, bf16: bool = False) -> str:
        config = compose(overrides)
        recipe = config.recipe
        if bf16:
            recipe = recipe.model_copy(update={"rollout_linears": LinearPrecision(), "kv": KvPrecision()})
        return rollout_kind(config, recipe, folder)

    kv = kind("recipe=fp8_rollout_kv")
    alike = (
        "seed=3",
        "steps=9",
        "algorithm.kl_coef=0.1",
        "rollout.kv_preflight.warn=0.01",
        "recipe.calibration.margin=2",
    )
    assert {kind("recipe=fp8_rollout_kv", text) for text in alike} == {kv}
    assert kind("recipe=fp8_e2e_kv") == kind("recipe=fp8_e2e_kv", "recipe.calibration.refresh=never") == kv
    assert kind("recipe=fp8_e2e_kv", bf16=True) == kind("recipe=bf16")
    others = ("recipe.calibration.granularity=head", "recipe.kv.quantize_query=false", "rollout.batch_size=9")
    found = {kind("recipe=fp8_rollout_kv", text) for text in others}
    assert len(found | {kv, kind("recipe=bf16"), kind("recipe=fp8_rollout")}) == 6
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert kind("recipe=fp8_rollout_kv") != kv


def test_kinds_tell_engines_and_folders_apart(tmp_path: Path) -> None:
    torch, vllm = compose(), compose(["rollout=vllm"])
    folders = [make_model(tmp_path / name) for name in ("a", "b")]
    found = {rollout_kind(config, config.recipe, folder) for config in (torch, vllm) for folder in folders}
    assert len(found) == 4
