"""Log-probabilities of given responses: those of the engine's own weights and precision, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.engines.protocols import EngineError, RolloutBatch, RolloutEngine, TokenRows, WeightVersionError
from tasks.preflight import MEAN, TOKENS, cache_mismatch
from tests.contract.engines import KV_RECIPES, POSITIONS, Workbench, make_outlier_model
from tests.contract.reference import Reference, effect_share

ONLY_KV = "recipe.rollout_linears.format=bf16"


def _score(engine: RolloutEngine, batch: RolloutBatch) -> Tensor:
    """Of the response tokens, `[tokens]`."""
    return engine.logprobs(0, batch.rows(), batch.prompt_lengths)[batch.response_mask()]


def _noise(bench: Workbench) -> float:
    """Bound on the mean difference between two ways through one engine: the order of sums in BF16.

    Far above what vLLM shows on CPU (6e-7; the PyTorch engine shows none) and far below what a format changes.
    """
    return bench.rollout_engine.bf16_error / 4


def test_a_sample_scores_as_when_it_was_sampled(rollouts: Workbench, recipe: str) -> None:
    batch = rollouts.batch(recipe)
    found = rollouts.rollout(recipe).logprobs(0, batch.rows(), batch.prompt_lengths)
    mask = batch.response_mask()
    assert found.dtype == torch.float32 and not found.is_inference()
    assert torch.equal(torch.isfinite(found), mask) and torch.equal(torch.isnan(found), ~mask)
    assert float((found - batch.logprobs)[mask].abs().mean()) < _noise(rollouts)


@pytest.mark.parametrize("recipe", KV_RECIPES)
def test_the_format_of_the_cache_is_in_them(rollouts: Workbench, recipe: str) -> None:
    """Tokens that a BF16 cache gave, under an FP8 one: the values of a reference that rounds as the recipe says."""
    batch, payload = rollouts.batch("bf16"), rollouts.payload(recipe, ONLY_KV)
    found = _score(rollouts.rollout(recipe, ONLY_KV), batch)
    mask = batch.response_mask()
    with torch.no_grad():
        plain, rounded = (
            Reference(rollouts.model_dir, payload, kv_scales=scales, dtype=torch.bfloat16)
            .logprobs(batch)[mask]
            .double()
            for scales in (None, payload.kv_scales)
        )
    assert float((found - rounded).abs().mean()) < rollouts.rollout_engine.fp8_error
    assert float((found - batch.logprobs[mask]).abs().mean()) > 2 * _noise(rollouts)
    assert effect_share(found, rounded, plain) > 0.5


def test_they_are_those_of_temperature_one(rollouts: Workbench) -> None:
    engine = rollouts.rollout("bf16")
    batch = engine.generate(rollouts.request(temperature=0.5))
    with torch.no_grad():
        expected = Reference(rollouts.model_dir, rollouts.payload("bf16")).logprobs(batch)[batch.response_mask()]
    assert float((_score(engine, batch) - expected).abs().mean()) < rollouts.rollout_engine.bf16_error


@pytest.mark.parametrize("batch_size", [512, 5, 1])
def test_a_row_is_scored_alike_in_any_company(rollouts: Workbench, batch_size: int) -> None:
    batch = rollouts.batch("bf16")
    engine = rollouts.rollout("bf16", f"rollout.batch_size={batch_size}")
    whole = engine.logprobs(0, batch.rows(), batch.prompt_lengths)
    order = torch.arange(len(batch.tokens) - 1, -1, -2)
    some = engine.logprobs(0, TokenRows(batch.tokens[order], batch.lengths[order]), batch.prompt_lengths[order])
    mask = batch.response_mask()[order]
    assert torch.equal(torch.isfinite(some), mask)
    assert float((some - whole[order])[mask].abs().mean()) < _noise(rollouts)


def test_a_shorter_response_scores_as_the_start_of_the_longer(rollouts: Workbench) -> None:
    """Responses of 0 to 7 tokens side by side; what is behind a sequence's end is nobody's business."""
    engine, batch = rollouts.rollout("bf16"), rollouts.batch("bf16")
    lengths = batch.prompt_lengths + torch.arange(len(batch.tokens)) % 8
    beyond = torch.arange(batch.tokens.shape[1]) >= lengths.unsqueeze(1)
    rows = TokenRows(torch.where(beyond, -1, batch.tokens), lengths)
    found = engine.logprobs(0, rows, batch.prompt_lengths)
    kept = batch.response_mask() & ~beyond
    assert torch.equal(torch.isfinite(found), kept) and torch.equal(torch.isnan(found), ~kept)
    assert float((found - batch.logprobs)[kept].abs().mean()) < _noise(rollouts)


def test_scoring_changes_no_later_sample(rollouts: Workbench, recipe: str) -> None:
    engine, batch = rollouts.rollout(recipe), rollouts.batch(recipe)
    before = engine.generate(rollouts.request())
    first = _score(engine, batch)
    after = engine.generate(rollouts.request())
    assert torch.equal(after.tokens, before.tokens)
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(_score(engine, batch), first)


def test_another_version_is_refused(rollouts: Workbench) -> None:
    batch = rollouts.batch("bf16")
    with pytest.raises(WeightVersionError, match="expects version 1, the engine holds 0"):
        rollouts.rollout("bf16").logprobs(1, batch.rows(), batch.prompt_lengths)
    with pytest.raises(WeightVersionError, match="expects version 0, the engine holds None"):
        rollouts.empty_rollout("bf16").logprobs(0, batch.rows(), batch.prompt_lengths)


def _rows(*sequences: list[int]) -> TokenRows:
    width = max(map(len, sequences))
    return TokenRows(
        torch.tensor([s + [0] * (width - len(s)) for s in sequences]), torch.tensor([len(s) for s in sequences])
    )


def test_sequences_that_cannot_be_scored_are_refused(rollouts: Workbench) -> None:
    engine, batch = rollouts.rollout("bf16"), rollouts.batch("bf16")
    good = [5, 6, 7]

    def refused(message: str, rows: TokenRows, *prompts: int) -> None:
        with pytest.raises(EngineError, match=message):
            engine.logprobs(0, rows, torch.tensor(prompts, dtype=torch.int64))

    refused("sequence 1: token 128 is not one of the model's 128 tokens", _rows(good, [5, 128]), 1, 1)
    refused("sequence 0: token -1 is not one", _rows([5, -1], good), 1, 1)
    refused("sequence 1: a prompt of 0 tokens in a sequence of 3", _rows(good, good), 1, 0)
    refused("sequence 0: a prompt of 4 tokens in a sequence of 3", _rows(good, good), 4, 1)
    refused("a sequence of 4, 3 columns wide", TokenRows(torch.tensor([good]), torch.tensor([4])), 1)
    refused("2 sequences need as many lengths and prompt lengths", _rows(good, good), 1)
    refused("there are no sequences to score", TokenRows(torch.zeros(0, 3, dtype=torch.int64), torch.tensor([])))
    room = POSITIONS - rollouts.rollout_engine.spare_positions
    fits = engine.logprobs(0, _rows([7] * room), torch.tensor([room - 2]))
    assert torch.isfinite(fits[0]).nonzero().flatten().tolist() == [room - 2, room - 1]
    refused(f"sequence 1: {room + 1} tokens exceed the model's 64 positions", _rows(good, [7] * (room + 1)), 1, 1)
    # A bad request leaves the engine as it was.
    assert float((_score(engine, batch) - batch.logprobs[batch.response_mask()]).abs().mean()) < _noise(rollouts)


def test_rows_of_very_different_lengths_are_scored_together(rollouts: Workbench) -> None:
    """The longest prompt and the longest response belong to different rows, and together exceed the positions."""
    engine = rollouts.rollout("bf16")
    room = POSITIONS - rollouts.rollout_engine.spare_positions
    sequences = [[3 + i % 90 for i in range(room)], [4 + i % 80 for i in range(room)]]
    prompts = torch.tensor([room - 1, 1])
    both = engine.logprobs(0, _rows(*sequences), prompts)
    for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        alone = engine.logprobs(0, _rows(sequence), prompt.unsqueeze(0))[0]
        live = torch.isfinite(alone)
        assert torch.equal(torch.isfinite(both[row]), live) and int(live.sum()) == room - int(prompt)
        assert float((both[row] - alone)[live].abs().mean()) < _noise(rollouts)


def test_an_outlier_channel_of_k_shows_under_an_fp8_cache_alone(rollouts: Workbench, tmp_path: Path) -> None:
    """What the pre-flight is for: E4M3 spans 2^15 of normal values, and the scale of a layer follows the largest."""
    found = []
    for factor in (1.0, 2.0**18):
        model = make_outlier_model(tmp_path / f"{factor:g}", factor)
        bench = Workbench(rollouts.rollout_engine, rollouts.trainer_engine, model)
        batch = bench.batch("bf16")
        p, q = (
            bench.rollout(*recipe).logprobs(0, batch.rows(), batch.prompt_lengths)
            for recipe in (("fp8_rollout_kv", ONLY_KV), ("bf16",))
        )
        found.append((batch, q, cache_mismatch(p, q, batch.response_mask())))
    (plain, plain_q, fine), (outlier, outlier_q, lost) = found
    assert torch.equal(plain.tokens, outlier.tokens)
    torch.testing.assert_close(outlier_q, plain_q, rtol=0, atol=0, equal_nan=True)
    assert fine[TOKENS] == lost[TOKENS] == 96
    assert lost[MEAN] > 5 * fine[MEAN] > 0
