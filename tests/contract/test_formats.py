"""Precision formats end to end: what a sync carries, what both engines hold, how they agree, and exact checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tasks.engines.registry import build_trainer
from tests.contract.engines import Workbench, advantages, linears_of

ROLLOUT_SCALINGS = ("block", "tensor", "channel", "mxfp8")
TRAINING_SCALINGS = ("block", "tensor", "tensor_delayed", "channel", "mxfp8")
SCALES = {"block": (1, 1), "tensor": (1, 1), "channel": (128, 1), "mxfp8": (128, 4)}
"""Shape of the scales of a 128x128 weight."""


def _both(scaling: str) -> tuple[str, ...]:
    rollout = "tensor" if scaling == "tensor_delayed" else scaling
    return (f"recipe.rollout_linears.scaling={rollout}", f"recipe.training_linears.scaling={scaling}")


@pytest.mark.parametrize("scaling", ROLLOUT_SCALINGS)
def test_a_sync_carries_the_scales_of_the_format(trainers: Workbench, scaling: str) -> None:
    payload = trainers.payload("fp8_e2e", *_both(scaling))
    name = "model.layers.0.self_attn.k_proj.weight"
    scales = payload.tensors[f"{name}_scale_inv"]
    assert payload.tensors[name].shape == (128, 128) and payload.tensors[name].dtype == torch.float8_e4m3fn
    assert tuple(scales.shape) == SCALES[scaling]
    assert scales.dtype == (torch.float8_e8m0fnu if scaling == "mxfp8" else torch.float32)
    report = trainers.rollout("fp8_e2e", *_both(scaling)).report()
    assert report.problems == () and report.quantized_linears == linears_of(0, 1)
    assert report.fingerprints == payload.fingerprints


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", TRAINING_SCALINGS)
def test_every_format_trains_and_resumes_exactly(
    trainers: Workbench, scaling: str, gradients: str, tmp_path: Path
) -> None:
    options = (*_both(scaling), f"recipe.training_linears.gradient_format={gradients}")
    batch, straight = trainers.batch("fp8_e2e", *options), trainers.trainer("fp8_e2e", *options)
    scores = straight.score(batch)
    assert 1.0 <= scores.metrics["mismatch/token_mult_prob_error"] < 1.3
    straight.train(batch, scores.logprobs, advantages())
    straight.save(tmp_path)
    resumed = build_trainer(trainers.config("fp8_e2e", *options), trainers.model_dir)
    resumed.load(tmp_path)
    p = straight.score(batch).logprobs
    torch.testing.assert_close(resumed.score(batch).logprobs, p, rtol=0, atol=0, equal_nan=True)
    expected = straight.train(batch, p, advantages())
    assert math.isfinite(expected["optim/grad_norm"]) and expected["optim/grad_norm"] > 0
    assert resumed.train(batch, p, advantages()) == expected
    assert resumed.report().fingerprints == straight.report().fingerprints


def test_formats_are_different_computations(trainers: Workbench) -> None:
    batch = trainers.batch("bf16")
    mask = batch.response_mask()
    found = [trainers.trainer("fp8_e2e", *_both(s)).score(batch).logprobs[mask] for s in ROLLOUT_SCALINGS]
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert not torch.equal(one, other)


def test_delayed_scales_come_from_the_updates_before(trainers: Workbench) -> None:
    """Scoring twice is equal; an update moves the history; a history of one entry forgets what a longer one keeps."""
    options = ("recipe.training_linears.scaling=tensor_delayed", "recipe.rollout_linears.scaling=tensor")
    short = (*options, "recipe.training_linears.amax_compute=most_recent")
    batch = trainers.batch("bf16")
    one, two = trainers.trainer("fp8_e2e", *options), trainers.trainer("fp8_e2e", *short)
    for trainer in (one, two):
        first = trainer.score(batch).logprobs
        torch.testing.assert_close(trainer.score(batch).logprobs, first, rtol=0, atol=0, equal_nan=True)
        for scale in (1.0, 0.2):
            trainer.train(batch, first, advantages() * scale)
    # The second update's smaller gradients: `max` still scales by the first, `most_recent` does not.
    third = [t.train(batch, first, advantages() * 0.2)["optim/grad_norm"] for t in (one, two)]
    assert third[0] != third[1]
