"""Calibration: scales from real tokens of the trainer's own attention, and how the old ones fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tasks.engines.protocols import TokenRows
from tests.contract.engines import LAYERS, Workbench, advantages
from tests.contract.reference import Reference

RECIPE = "fp8_rollout_kv"
KEYS = {(layer, part) for layer in range(LAYERS) for part in "qkv"}
METRICS = {"calibration/max_rel_change", "calibration/saturated_fraction", "calibration/underflow_fraction"}


def _amax(bench: Workbench, rows: TokenRows) -> dict[tuple[int, str], float]:
    """Largest |q|, |k| and |v| of each layer over real tokens, fp32, by an independent model."""
    reference = Reference(bench.model_dir, bench.payload("bf16"))
    reference.real = torch.arange(rows.tokens.shape[1]) < rows.lengths.unsqueeze(1)
    with torch.no_grad():
        reference.logits(rows.tokens)
    return reference.amax


def _scales(bench: Workbench, rows: TokenRows, *overrides: str) -> dict[tuple[int, str], float]:
    trainer = bench.trainer(RECIPE, *overrides)
    trainer.calibrate(rows)
    return trainer.report().scales


def test_scales_are_margin_times_amax_over_448(trainers: Workbench) -> None:
    rows = trainers.prompt_rows()
    scales, amax = _scales(trainers, rows), _amax(trainers, rows)
    assert scales.keys() == amax.keys() == KEYS
    for key, scale in scales.items():
        assert scale == pytest.approx(1.05 * amax[key] / 448, rel=0.02), key
        assert scale == float(np.float32(scale)), "an fp32 number"
    plain = _scales(trainers, rows, "recipe.calibration.margin=1.0")
    doubled = _scales(trainers, rows, "recipe.calibration.margin=2.0")
    assert doubled == {key: 2 * scale for key, scale in plain.items()}


def test_scales_that_are_never_measured_are_one(trainers: Workbench) -> None:
    for granularity, one in (("layer", 1.0), ("head", (1.0,))):
        trainer = trainers.trainer(
            RECIPE, "recipe.calibration.refresh=never", f"recipe.calibration.granularity={granularity}"
        )
        assert trainer.calibrate(trainers.prompt_rows()) == {}
        assert trainer.report().scales == dict.fromkeys(KEYS, one)


def test_a_lower_percentile_gives_smaller_scales(trainers: Workbench) -> None:
    rows = trainers.prompt_rows()
    largest, most, half = (_scales(trainers, rows, f"recipe.calibration.percentile={p}") for p in (100, 99, 50))
    for key in KEYS:
        assert half[key] < 0.7 * most[key] < 0.7 * largest[key], key


def test_padding_is_not_calibrated(trainers: Workbench) -> None:
    rows, width = trainers.prompt_rows(), 48
    generator = torch.Generator().manual_seed(0)

    def padded_with_text() -> TokenRows:
        tokens = torch.randint(3, 120, (len(rows.lengths), width), generator=generator)
        for row, length in enumerate(rows.lengths.tolist()):
            tokens[row, :length] = rows.tokens[row, :length]
        return TokenRows(tokens, rows.lengths)

    first, second = padded_with_text(), padded_with_text()
    scales = _scales(trainers, first)
    assert scales == _scales(trainers, second)
    everything = _scales(trainers, replace(first, lengths=torch.full_like(rows.lengths, width)))
    assert all(everything[key] >= scales[key] for key in KEYS)
    assert sum(everything[key] > scales[key] for key in KEYS) >= 3, "the padding is larger than the text"


def test_every_sequence_counts_whatever_its_micro_batch(trainers: Workbench) -> None:
    rows = trainers.prompt_rows()
    alone = [_scales(trainers, TokenRows(rows.tokens[i : i + 1], rows.lengths[i : i + 1])) for i in range(4)]
    together = _scales(trainers, rows, "algorithm.prompts_per_step=4", "trainer.micro_batch_size=1")
    assert together == {key: max(scales[key] for scales in alone) for key in KEYS}


def test_metrics_describe_scales_in_use_and_are_absent_without(trainers: Workbench) -> None:
    trainer, rows = trainers.trainer(RECIPE, "recipe.calibration.margin=1.0"), trainers.prompt_rows()
    assert trainer.calibrate(rows).keys() == METRICS
    again = trainer.calibrate(rows)
    assert again["calibration/max_rel_change"] == 0.0
    assert again["calibration/saturated_fraction"] == 0.0
    assert 0.0 <= again["calibration/underflow_fraction"] < 0.05
    first = trainers.trainer("bf16")
    assert first.report().scales == {}
    assert first.calibrate(rows) == {}
    assert first.report().scales.keys() == KEYS


def test_scales_of_other_weights_no_longer_fit(trainers: Workbench) -> None:
    """After large updates the old scales saturate or waste range; calibration reports it and repairs it."""
    trainer = trainers.trainer(RECIPE, "trainer.optimizer.learning_rate=0.02")
    batch = trainers.batch(RECIPE)
    old = trainer.report().scales
    for _ in range(3):
        trainer.train(batch, trainer.score(batch).logprobs, advantages())
    assert trainer.report().scales == old, "training alone leaves the scales"
    changed = trainer.calibrate(batch.rows())
    new = trainer.report().scales
    expected = max(abs(new[key] / old[key] - 1) for key in KEYS)
    assert changed["calibration/max_rel_change"] == pytest.approx(expected, rel=1e-12)
    assert expected > 0.05
    assert changed["calibration/saturated_fraction"] > 0
    settled = trainer.calibrate(batch.rows())
    assert settled["calibration/saturated_fraction"] == settled["calibration/max_rel_change"] == 0.0


def test_calibration_moves_neither_weights_nor_version(trainers: Workbench) -> None:
    trainer, other, batch = trainers.trainer(RECIPE), trainers.trainer(RECIPE), trainers.batch(RECIPE)
    before = trainer.report().fingerprints
    trainer.calibrate(batch.rows())
    assert trainer.report().fingerprints == before
    assert trainer.version == 0
    p = other.score(batch).logprobs
    torch.testing.assert_close(trainer.score(batch).logprobs, p, rtol=0, atol=0, equal_nan=True)
    assert trainer.train(batch, p, advantages()) == other.train(batch, p, advantages())


def test_calibrated_scales_reach_the_rollout_engine(trainers: Workbench) -> None:
    trainer, engine = trainers.trainer(RECIPE), trainers.empty_rollout(RECIPE)
    for rows in (trainers.prompt_rows(), trainers.batch(RECIPE).rows()):
        trainer.calibrate(rows)
        engine.load_weights(trainer.export_weights(trainers.recipe(RECIPE)))
        held, own = engine.report().scales, trainer.report().scales
        assert {key: scale.hex() for key, scale in held.items()} == {key: scale.hex() for key, scale in own.items()}
