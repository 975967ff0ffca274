"""Whole runs of three steps with each algorithm and each correction, started as a user starts them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import CONFIG_DIR
from conf.overrides import groups
from tests.flows.runs import FEW_SAMPLES, final_weights, journal_of, points, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = (*FEW_SAMPLES, "model.warm_start.steps=100", "data.pool_size=3000", "steps=3", "checkpoint_every=3")
ALGORITHMS, CORRECTIONS = groups(CONFIG_DIR)["algorithm"], groups(CONFIG_DIR)["correction"]
PAIRS = [(ALGORITHMS[i % len(ALGORITHMS)], correction) for i, correction in enumerate(CORRECTIONS)]
assert {algorithm for algorithm, _ in PAIRS} == set(ALGORITHMS)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that the warm start is made once."""
    return tmp_path_factory.mktemp("objectives") / "runs"


def _run(runs_dir: Path, name: str, *options: str) -> list[dict[str, float]]:
    """Metrics of the run's three steps."""
    succeeded(train([*options, f"run_name={name}"], runs_dir, base=SHORT))
    steps = [entry.values for entry in journal_of(runs_dir, name).entries() if entry.kind == "step"]
    assert len(steps) == 3
    assert all(math.isfinite(value) for values in steps for value in values.values())
    return steps


@pytest.mark.parametrize(("algorithm", "correction"), PAIRS)
def test_every_algorithm_and_every_correction_runs(algorithm: str, correction: str, runs_dir: Path) -> None:
    """All of both groups; a run starts in half a minute, so each run takes one of either."""
    options = (f"algorithm={algorithm}", f"correction={correction}", "correction.allow_uncorrected=true")
    steps = _run(runs_dir, f"{algorithm}-{correction}", *options)
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
    _run(runs_dir, "plain")
    _run(runs_dir, "with-unused", *unused)
    assert points(runs_dir, "plain") == points(runs_dir, "with-unused")
    url = f"{runs_dir}/checkpoints"
    assert final_weights(url, "plain", step=3) == final_weights(url, "with-unused", step=3)
