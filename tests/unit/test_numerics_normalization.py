"""Coefficients of the loss: three denominators by hand, and what they have in common."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.normalization import Normalization, loss_coefficients

MODES: tuple[Normalization, ...] = ("token_mean", "sequence_mean", "fixed_length")

# Responses of 3, 0 and 1 tokens: N = 4, B = 2.
MASK = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])


def masks() -> st.SearchStrategy[Tensor]:
    return st.tuples(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.floats(0, 1)).map(
        lambda t: torch.rand(t[1], t[2], generator=torch.Generator().manual_seed(t[0])) < t[3]
    )


def test_token_mean_by_hand() -> None:
    got = loss_coefficients(MASK, "token_mean")
    assert got.dtype == torch.float32
    assert got.tolist() == [[0.25, 0.0, 0.25, 0.25], [0.0] * 4, [0.0, 0.25, 0.0, 0.0]]


def test_sequence_mean_by_hand_leaves_out_the_empty_response() -> None:
    sixth = float(np.float32(1 / 6))
    got = loss_coefficients(MASK, "sequence_mean")
    assert got.tolist() == [[sixth, 0.0, sixth, sixth], [0.0] * 4, [0.0, 0.5, 0.0, 0.0]]


def test_fixed_length_by_hand() -> None:
    got = loss_coefficients(MASK, "fixed_length", 8)
    assert got.tolist() == [[0.0625, 0.0, 0.0625, 0.0625], [0.0] * 4, [0.0, 0.0625, 0.0, 0.0]]


def test_fixed_length_does_not_depend_on_the_length_of_the_padding_or_the_answer() -> None:
    short = torch.tensor([[True, False]])
    long = torch.ones(1, 5, dtype=torch.bool)
    assert loss_coefficients(short, "fixed_length", 4)[0, 0] == loss_coefficients(long, "fixed_length", 4)[0, 0] == 0.25


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_an_unused_fixed_length_changes_nothing(mode: Normalization) -> None:
    assert torch.equal(loss_coefficients(MASK, mode, 7), loss_coefficients(MASK, mode))
    assert torch.equal(loss_coefficients(MASK, mode, 0), loss_coefficients(MASK, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (0, 0)])
def test_an_empty_selection_gives_zeros(mode: Normalization, shape: tuple[int, int]) -> None:
    got = loss_coefficients(torch.zeros(shape, dtype=torch.bool), mode, 16)
    assert got.shape == shape and not got.any()


def test_a_long_response_is_counted_exactly() -> None:
    # 1 / 8192 is a power of two, so a length counted in too small a type would show.
    mask = torch.ones(2, 8192, dtype=torch.bool)
    assert set(loss_coefficients(mask, "sequence_mean").unique().tolist()) == {2.0**-14}
    assert set(loss_coefficients(mask, "token_mean").unique().tolist()) == {2.0**-14}


@settings(max_examples=40, deadline=None)
@given(masks())
def test_means_weigh_one_in_total_and_sequences_alike(mask: Tensor) -> None:
    lengths = mask.sum(1)
    present = lengths > 0
    want = 1.0 if bool(present.any()) else 0.0
    for mode in ("token_mean", "sequence_mean"):
        got = loss_coefficients(mask, mode)
        assert float(got.sum(dtype=torch.float64)) == pytest.approx(want, rel=1e-6)
    per_sequence = loss_coefficients(mask, "sequence_mean").sum(1, dtype=torch.float64)
    assert per_sequence[present].tolist() == pytest.approx(
        [1 / max(1, int(present.sum()))] * int(present.sum()), rel=1e-6
    )


@settings(max_examples=40, deadline=None)
@given(masks(), st.sampled_from(MODES), st.integers(1, 50))
def test_equals_the_mean_written_out(mask: Tensor, mode: Normalization, fixed_length: int) -> None:
    values = np.random.default_rng(0).normal(size=mask.shape)
    rows = [values[i][mask[i].numpy()] for i in range(mask.shape[0])]
    rows = [row for row in rows if row.size]
    want = 0.0
    if rows and mode == "token_mean":
        want = float(np.concatenate(rows).mean())
    elif rows and mode == "sequence_mean":
        want = float(np.mean([row.mean() for row in rows]))
    elif rows:
        want = float(np.mean([row.sum() / fixed_length for row in rows]))
    coefficients = loss_coefficients(mask, mode, fixed_length)
    got = float((coefficients.double() * torch.from_numpy(values)).sum())
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert not coefficients[~mask].any() and bool((coefficients[mask] > 0).all())


@pytest.mark.parametrize("fixed_length", [None, 0, -3])
def test_fixed_length_needs_a_length(fixed_length: int | None) -> None:
    with pytest.raises(ValueError, match=rf"fixed_length = {fixed_length}: allowed are lengths of at least 1 token"):
        loss_coefficients(MASK, "fixed_length", fixed_length)


def test_an_unknown_mode_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="mode = 'sum': allowed are token_mean, sequence_mean, fixed_length"):
        loss_coefficients(MASK, "sum")  # type: ignore[arg-type]


def test_other_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask must be \[sequences, tokens\] bool, got \(4,\) torch.bool"):
        loss_coefficients(MASK[0], "token_mean")
    with pytest.raises(ValueError, match=r"got \(3, 4\) torch.int64"):
        loss_coefficients(MASK.long(), "token_mean")
