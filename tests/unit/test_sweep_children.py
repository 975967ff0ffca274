"""Which runs a sweep has, with which overrides; what cannot be run is refused before anything starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import VllmRollout
from flows.cli import main
from flows.sweep import left_to_do
from flows.sweep_children import ChildError, run_here
from flows.sweep_plan import Child, compose_sweep, one_after_another, plan_children, plan_sweep
from flows.sweep_report import sweep_folder
from tests.gpu.recipes import ON_A_GPU

SMALL = ["sweep=smoke", "sweep.recipes=[bf16,fp8_rollout]"]


def _plan(*overrides: str, sweep_id: str = "s") -> tuple[Child, ...]:
    return plan_children(compose([*SMALL, *overrides]), overrides, sweep_id, "flow-7")


def test_recipes_of_a_seed_stand_together_and_share_all_but_the_recipe() -> None:
    children = _plan("steps=3")
    assert [child.name for child in children] == ["s-bf16-s0", "s-fp8_rollout-s0", "s-bf16-s1", "s-fp8_rollout-s1"]
    configs = [compose(child.overrides) for child in children]
    assert [child.config for child in children] == configs
    assert [(c.recipe.name, c.seed, c.steps) for c in configs[:3]] == [
        ("bf16", 0, 3),
        ("fp8_rollout", 0, 3),
        ("bf16", 1, 3),
    ]
    for first, second in ((configs[0], configs[1]), (configs[2], configs[3])):
        changes = {"recipe": second.recipe, "run_name": second.run_name, "tracking": second.tracking}
        # The sweep's own keys are not handed on.
        assert first.model_copy(update=changes) == second
    assert configs[0].resume == "auto" and configs[0].run_name == "s-bf16-s0"
    assert configs[0].data.eval_prompts == 64


def test_tags_say_what_a_comparison_needs() -> None:
    tags = compose(_plan("sweep.axes={algorithm.kl_coef: [0.0, 0.01]}")[2].overrides).tracking.tags
    digest = tags.pop("config_digest")
    assert len(digest) == 64
    assert tags == {
        "sweep_id": "s",
        "sweep": "smoke",
        "recipe": "bf16",
        "axes": '{"algorithm.kl_coef": 0.01}',
        "parent_flow_run_id": "flow-7",
    }


def test_axes_multiply_and_digests_tell_configurations_apart() -> None:
    children = _plan("sweep.axes={algorithm.kl_coef: [0.0, 0.01], correction: [token_truncation, token_mask]}")
    assert len(children) == 2 * 2 * 2 * 2
    assert len({child.name for child in children}) == len({c.planned.config_digest for c in children}) == 16
    last = compose(children[-1].overrides)
    assert (last.algorithm.kl_coef, last.correction.name) == (0.01, "token_mask")
    assert children[-1].planned.variant == "fp8_rollout, algorithm.kl_coef=0.01, correction=token_mask"
    plain = {c.planned.config_digest for c in _plan()}
    assert plain == {c.planned.config_digest for c in _plan(sweep_id="other")}
    assert plain.isdisjoint(c.planned.config_digest for c in _plan("steps=5"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "sweep = nothing: no such option"),
        (["smoke", "sweep.recipes=[bf16,fp8_rolout]"], "did you mean fp8_rollout?"),
        (["smoke", "sweep.seeds=[1,1]"], "sweep.seeds = [1, 1]: one of them twice"),
        (["smoke", "sweep.seeds=[]"], "sweep.seeds = []: too few items"),
        (["smoke", "sweep.axes={seed: [1, 2]}"], "sweep.axes.seed = [1, 2]: a key that the sweep sets itself"),
        (
            ["smoke", "sweep.axes={algorithm.kl_coff: [1]}"],
            "bf16, algorithm.kl_coff=1, seed 0 (and 3 more runs): algorithm.kl_coff = 1: unknown key",
        ),
        (["smoke", "sweep.axes={data.parameters.x: [[[1], {a: 1}]]}"], "a map; allowed: plain values and lists"),
        (["smoke", "sweep.axes={algorithm.kl_coef: 0.1}"], "kl_coef = 0.1: not a list; allowed: a list, each item any"),
        (["smoke", "sweep.axes={algorithm.kl_coef: [1, 1.0]}"], "kl_coef = [1, 1.0]: no values, or one twice"),
        (
            ["smoke", "sweep.axes={algorithm: [{name: x}]}"],
            'sweep.axes.algorithm = {"name": "x"}: a map; allowed: plain',
        ),
        (
            ["smoke", "sweep.axes={data.task: [a-b, a_b]}"],
            "both have runs called new-bf16-task-a_b-s0; allowed: values",
        ),
        (["smoke", "algorithm.group_size=1"], "algorithm.group_size = 1"),
        (["smoke", "--sweep-id", "a/b"], "sweep_id = a/b: not a name"),
        (["smoke", "nightly"], "smoke nightly: more than one sweep"),
        (["smoke", "sweep.corridor.notify=x"], "sweep.corridor.notify = x"),
        (["smoke", "sweep.prices.gpu_hour_usd.H200=-1"], "sweep.prices.gpu_hour_usd.H200 = -1"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    # No embedded server comes up for what is refused; this names one that nobody asks.
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert main(["sweep", *arguments, f"runs_dir={tmp_path}/runs"]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_values_that_differ_in_kind_are_not_the_same() -> None:
    assert len(_plan("sweep.axes={data.parameters.x: [1, true, [1], [true]]}", "sweep.seeds=[0]")) == 4 * 2
    names = [child.name for child in _plan('sweep.axes={data.parameters.x: ["ä"]}')]
    assert all(name.isascii() for name in names)


def test_a_list_with_a_wrong_item_is_not_said_to_be_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "smoke", "sweep.seeds=[-1]"]) == 2
    said = capsys.readouterr().err
    assert "sweep.seeds[0] = -1: too small" in said and "too few" not in said


def _child(tmp_path: Path, *overrides: str) -> Child:
    chosen = (f"runs_dir={tmp_path}/runs", *overrides)
    return Child(_plan()[0].planned, "bf16", chosen, compose(()))


def test_a_child_that_fails_says_how_and_where(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    with pytest.raises(ChildError, match=r"s-bf16-s0: exit code 2: .*stepz.*; see .*child\.log"):
        run_here(_child(tmp_path, "stepz=3"), log, 120.0, None)


def test_a_child_that_was_killed_is_said_to_be(tmp_path: Path) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 60
        while not (children := set(psutil.Process().children()) - before):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children.pop().kill()

    before = set(psutil.Process().children())
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ChildError, match=r"^s-bf16-s0: killed by SIGKILL; see .*child\.log$"):
        run_here(_child(tmp_path, "steps=100000"), tmp_path / "child.log", 120.0, None)
    killer.join()


def test_a_child_that_is_late_is_ended(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ChildError, match=r"not done within sweep\.child_timeout_s=0\.5"):
        run_here(_child(tmp_path, "stepz=3"), tmp_path / "child.log", 0.5, None)
    assert set(psutil.Process().children()) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_child_does_not_outlive_a_killed_sweep(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from flows.corridor import PlannedChild;"
        "from flows.sweep_children import run_here; from flows.sweep_plan import Child;"
        "from conf.compose import compose;"
        "child = Child(PlannedChild('n', 'bf16', 0, ''), 'bf16', tuple(sys.argv[2:]), compose(sys.argv[2:]));"
        "run_here(child, Path(sys.argv[1]), 600.0, None)"
    )
    root = str(Path(__file__).parents[2])
    arguments = [str(tmp_path / "log"), f"runs_dir={tmp_path}/runs", "steps=100000"]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=os.environ | {"PYTHONPATH": root}, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (children := psutil.Process(parent.pid).children()):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=100)
    assert not alive


@pytest.mark.parametrize("sweep_id", ["", "a" * 129, ".a", "a/b"])
def test_an_id_that_is_no_name_is_refused(sweep_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "smoke", "--sweep-id", sweep_id]) == 2
    assert "allowed: 1 to 128 letters, digits" in capsys.readouterr().err


def test_a_foreign_id_stays_below_the_folder_of_sweeps(tmp_path: Path) -> None:
    config = compose([f"runs_dir={tmp_path}"])
    for sweep_id in ("../../evil", "/etc/x", "..", "", "my sweep", "n" * 300):
        assert sweep_folder(config, sweep_id).parent == tmp_path / "sweeps"
    assert sweep_folder(config, "nightly-1.a").name == "nightly-1.a"


def test_a_folder_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "smoke", "runs_dir=/proc/none/x"]) == 2
    assert "runs_dir = /proc/none/x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("seed=7", "sweep.seeds"),
        ("recipe=bf16", "sweep.recipes"),
        ("run_name=x", "--sweep-id"),
        ("resume=nope", "--sweep-id"),
        ("sweep=nightly", "one name of a sweep"),
        ("sweep.baseline=nope", "one of bf16, fp8_e2e"),
    ],
)
def test_what_a_sweep_sets_itself_is_refused(text: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "smoke", text]) == 2
    said = capsys.readouterr().err
    assert text.partition("=")[0] in said and instead in said


def test_rows_of_a_sweep_may_be_recipes_with_changes() -> None:
    uncorrected = '["recipe=fp8_rollout", "correction=none", "correction.allow_uncorrected=true"]'
    children = _plan(
        "sweep.recipes=[bf16,fp8_rollout,bare]", f"sweep.variants={{bare: {uncorrected}}}", "correction=token_mask"
    )
    assert [child.name for child in children[:3]] == ["s-bf16-s0", "s-fp8_rollout-s0", "s-bare-s0"]
    bf16, corrected, bare = (compose(child.overrides) for child in children[:3])
    # What all runs get does not reach what a row is about.
    assert (bf16.correction.name, corrected.correction.name, bare.correction.name) == (
        "token_mask",
        "token_mask",
        "none",
    )
    assert bare.recipe == corrected.recipe and bare.tracking.tags["recipe"] == "bare"
    # Compared at equal values of the axes, of which there are none: with the corrected baseline.
    assert {config.tracking.tags["axes"] for config in (bf16, bare)} == {"{}"}
    assert children[2].planned.variant == "bare"


def test_when_scales_are_measured_is_an_axis() -> None:
    children = _plan("sweep.recipes=[fp8_rollout_kv]", "sweep.axes={recipe.calibration.refresh: [step, once, never]}")
    assert [compose(child.overrides).recipe.calibration.refresh for child in children[:3]] == ["step", "once", "never"]
    assert children[2].planned.variant == "fp8_rollout_kv, recipe.calibration.refresh=never"


def test_a_shared_process_runs_formats_one_after_another() -> None:
    recipes = "sweep.recipes=[bf16,fp8_rollout_kv,fp8_e2e,fp8_rollout]"
    _, children = plan_sweep("smoke", (recipes, "sweep.children=shared"), "s", None)
    assert [child.name for child in children] == [
        "s-bf16-s0",
        "s-bf16-s1",
        "s-fp8_rollout_kv-s0",
        "s-fp8_rollout_kv-s1",
        "s-fp8_e2e-s0",
        "s-fp8_rollout-s0",
        "s-fp8_e2e-s1",
        "s-fp8_rollout-s1",
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["sweep.variants={bare: []}"], "sweep.variants.bare = []: does not begin with a recipe"),
        (["sweep.variants={bare: ['seed=1']}"], "does not begin with a recipe"),
        (["sweep.variants={bare: ['recipe=bf16', 'seed=1']}"], "sets seed, which the sweep sets itself"),
        (["sweep.variants={bf16: ['recipe=fp8_e2e']}"], "sweep.variants.bf16 = "),
        (["sweep.variants={a.b: ['recipe=fp8_e2e']}"], "sweep.variants.a.b"),
        (["sweep.recipes=[bare]"], "sweep.recipes = bare: no such option"),
        (["sweep.axes={allocation_s: [3]}"], "sweep.axes.allocation_s = [3]: a key that the sweep sets itself"),
        (
            ["sweep.children=deployment", "sweep.allocation_s=9"],
            "sweep.allocation_s = 9.0: bounds runs on this machine",
        ),
        (["sweep.kept_engines=0"], "sweep.kept_engines = 0: too small"),
        (
            ["sweep.children=shared", "sweep.axes={cluster.sync_buffer_mb: [1, 2]}"],
            "sweep.children = shared: runs ask for different Ray clusters",
        ),
        (
            [
                "sweep.children=shared",
                "rollout=vllm",
                "rollout.gpu_memory_utilization=0.4",
                "rollout.kv_cache_memory_bytes=null",
            ],
            "sweep.kept_engines = 3: as many engines with rollout.gpu_memory_utilization 0.4 do not fit",
        ),
    ],
)
def test_refusals_of_rows_and_shared_processes(
    overrides: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "smoke", *overrides]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["sweep.allocation_s=600", "checkpoint_every=null"],
            "bf16, seed 0 (and 3 more runs): sweep.allocation_s = 600.0: checkpoint_every is null, and a run that is "
            "stopped could not go on; allowed: null, or a number of steps as checkpoint_every",
        ),
        (
            ["sweep.children=deployment", "allocation_s=60"],
            "allocation_s = 60.0: a run of a deployment that stops within it would count as done; allowed: null, or "
            "children=in_process or shared",
        ),
    ],
)
def test_refusals_of_allocations(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sweep("smoke", overrides, "s", None)
    assert line in caught.value.problems


def _planned(sweep: str, overrides: list[str]) -> tuple[Child, ...]:
    """The runs of a shared process, whatever this machine lacks for them."""
    config = compose_sweep(sweep, overrides)
    return one_after_another(plan_children(config, overrides, "s", None), config.sweep.kept_engines)


@pytest.mark.parametrize(
    ("share", "kept", "most"), [(0.5, 2, "1"), (0.33, 3, "1 to 2"), (0.3, 3, None), (0.9, 1, None)]
)
def test_engines_that_stay_awake_leave_room_for_the_next_ones_start(share: float, kept: int, most: str | None) -> None:
    overrides = ["rollout=vllm", f"rollout.gpu_memory_utilization={share}", "rollout.kv_cache_memory_bytes=null"]
    overrides += ["sweep.children=shared", f"sweep.kept_engines={kept}"]
    if most is None:
        assert _planned("smoke", overrides)
        return
    with pytest.raises(ConfigError, match=rf"sweep.kept_engines = {kept}: .* allowed: {most}, or"):
        _planned("smoke", overrides)


@pytest.mark.parametrize("sweep", ["recipes_h200", "calibration_ablation"])
def test_the_sweeps_of_a_gpu_take_the_settings_of_a_gpu(sweep: str) -> None:
    """Settings of the engine that the sweep itself chooses, or that stands beside it."""
    chosen = ["rollout=vllm", "trainer=megatron"] if sweep == "calibration_ablation" else []
    children = _planned(sweep, [*chosen, *ON_A_GPU, "model=qwen3_small"])
    for config in (compose(child.overrides) for child in children):
        assert isinstance(config.rollout, VllmRollout) and config.rollout.kv_cache_memory_bytes == 4 * 2**30
        assert (config.cluster.share_gpus, config.rollout.sleep_level, config.trainer.engine) == (True, 2, "megatron")


def test_what_failed_before_is_tried_after_what_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that always fails would take a part of each allocation before all others."""
    children = _planned("smoke", ["sweep.seeds=[0,1]"])
    names = [child.name for child in children]
    status = dict(zip(names, ("FAILED", "FINISHED", "KILLED"), strict=False))
    records = [SimpleNamespace(name=n, status=s, finished=s == "FINISHED") for n, s in status.items()]
    monkeypatch.setattr("flows.sweep.open_client", lambda uri: None)
    monkeypatch.setattr("flows.sweep.stored_plan", lambda *_: None)
    monkeypatch.setattr("flows.sweep.sweep_runs", lambda *_: records)
    left = [child.name for child in left_to_do("uri", "experiment", "s", children)]
    assert left == [*names[2:], names[0]] and len(names) == 4


def test_the_table_of_a_gpu_compares_with_and_without_correction() -> None:
    model = "model=tiny_qwen3"
    config = compose(["sweep=recipes_h200", model])
    children = plan_children(config, [model], "g", None)
    assert (len(children), config.sweep.baseline, config.sweep.children) == (18, "bf16", "shared")
    found = {child.recipe: compose(child.overrides) for child in children[:6]}
    assert found["fp8_rollout_uncorrected"].recipe == found["fp8_rollout"].recipe
    corrections = {row: config.correction.corrects for row, config in found.items()}
    assert corrections == dict.fromkeys(config.sweep.recipes, True) | {"fp8_rollout_uncorrected": False}
    assert {(c.steps, c.rollout.engine, c.trainer.engine) for c in found.values()} == {(100, "vllm", "megatron")}


def test_the_ablation_of_calibration_has_scales_measured_frozen_and_one() -> None:
    children = plan_children(compose(["sweep=calibration_ablation"]), [], "a", None)
    found = {child.recipe: compose(child.overrides).recipe for child in children}
    refresh = {row: recipe.calibration.refresh for row, recipe in found.items() if recipe.kv.quantized}
    assert refresh == {"fp8_rollout_kv": "step", "scales_frozen": "once", "scales_of_one": "never"}
    assert len(children) == 8 and "bf16" in found


def test_a_sweep_whose_engines_cannot_run_the_default_recipe() -> None:
    """FP8 products of Megatron need a GPU, and the default recipe trains with them."""
    children = _planned("calibration_ablation", ["trainer=megatron", "trainer.device=cpu", "sweep.seeds=[0]"])
    assert [child.recipe for child in children] == ["bf16", "fp8_rollout_kv", "scales_frozen", "scales_of_one"]
