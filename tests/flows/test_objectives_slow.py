"""Whole runs of three steps with each algorithm and each correction, those of a sweep in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import CONFIG_DIR
from conf.overrides import groups
from tests.flows.runs import FEW_SAMPLES, Finished, final_weights, fp8_grpo, journal_of, points, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SHORT = (*FEW_SAMPLES, "model.warm_start.steps=100", "data.pool_size=3000", "steps=3", "checkpoint_every=3")
ALGORITHMS, CORRECTIONS = groups(CONFIG_DIR)["algorithm"], groups(CONFIG_DIR)["correction"]
PAIRS = [(ALGORITHMS[i % len(ALGORITHMS)], correction) for i, correction in enumerate(CORRECTIONS)]
assert {algorithm for algorithm, _ in PAIRS} == set(ALGORITHMS)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that the warm start is made once."""
    return tmp_path_factory.mktemp("objectives") / "runs"


@pytest.fixture(scope="module")
def swept(runs_dir: Path) -> Finished:
    """A run of each pair: all of both groups, but not each with each."""
    rows = ",".join(
        f'{a}-{c}: ["recipe=fp8_e2e_kv", "algorithm={a}", "correction={c}", "correction.allow_uncorrected=true"]'
        for a, c in PAIRS
    )
    names = ",".join(f"{algorithm}-{correction}" for algorithm, correction in PAIRS)
    sweep = [f"sweep.variants={{{rows}}}", f"sweep.recipes=[{names}]", f"sweep.baseline={'-'.join(PAIRS[0])}"]
    sweep += ["sweep.seeds=[0]", "sweep.children=shared", "sweep.corridor.enabled=false"]
    places = [f"runs_dir={runs_dir}", f"storage.url={runs_dir}/checkpoints"]
    return fp8_grpo(["sweep", "smoke", *SHORT, *sweep, *places, "--sweep-id", "pairs"])


def _steps(runs_dir: Path, name: str, done: Finished) -> list[dict[str, float]]:
    """Metrics of the run's three steps."""
    with journal_of(runs_dir, name) as journal:
        steps = [entry.values for entry in journal.entries() if entry.kind == "step"]
    assert len(steps) == 3, done.out
    assert all(math.isfinite(value) for values in steps for value in values.values())
    return steps


@pytest.mark.parametrize(("algorithm", "correction"), PAIRS)
def test_every_algorithm_and_every_correction_runs(
    algorithm: str, correction: str, runs_dir: Path, swept: Finished
) -> None:
    name = f"{algorithm}-{correction}"
    assert f"pairs-{name}-s0: done" in swept.out, swept.out
    steps = _steps(runs_dir, f"pairs-{name}-s0", swept)
    assert any(values["optim/grad_norm"] > 0 for values in steps) or "mask" in correction
    sampled = [values.get("dynamic_sampling/generation_batches") for values in steps]
    assert all(count is not None and 1 <= count <= 10 for count in sampled) == (algorithm == "dapo")
    assert all(0.0 <= values["importance/rejected_fraction"] <= 1.0 for values in steps)
    assert all(values["mismatch/token_mult_prob_error"] > 1.0 for values in steps)


def test_runs_that_differ_in_unused_options_are_equal(runs_dir: Path) -> None:
    unused = (
        "algorithm.kl_estimator=k1",
        "algorithm.normalization_length=55",
        "algorithm.overlong.buffer=2",
        "algorithm.dynamic_sampling.max_generation_batches=4",
        "algorithm.dynamic_sampling.when_exhausted=fail",
        "correction.denominator=kept",
    )
    for name, options in {"plain": (), "with-unused": unused}.items():
        _steps(runs_dir, name, succeeded(train([*options, f"run_name={name}"], runs_dir, base=SHORT)))
    assert points(runs_dir, "plain") == points(runs_dir, "with-unused")
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "plain", step=3) == final_weights(url, "with-unused", step=3)
