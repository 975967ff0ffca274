"""Log-probabilities, entropy, seeds, uniforms and sampling against exact distributions."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.logprobs import (
    greedy_tokens,
    sample_seed,
    sample_tokens,
    token_entropy,
    token_logprobs,
    uniforms,
)
from tests.unit.numerics_support import randn

DRAWS = 20_000
LAST_UNIFORM = 1 - 2.0**-53
"""The largest number that `uniforms` can give."""


def uniform(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_probabilities(*p: float) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_distribution(temperature: float, seed: int) -> None:
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    want = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    logits = log_probabilities(*p).expand(DRAWS, -1)
    tokens, _ = sample_tokens(logits, temperature, uniforms([seed], DRAWS)[0])
    counts = np.bincount(tokens.numpy(), minlength=len(p))
    chi_square = ((counts - DRAWS * want) ** 2 / (DRAWS * want)).sum()
    # 6 degrees of freedom: 27.9 is exceeded with probability 1e-4, and the seeds are fixed.
    assert chi_square < 27.9
    other = np.roll(want, 1)
    assert ((counts - DRAWS * other) ** 2 / (DRAWS * other)).sum() > 1000


def test_one_draw_from_each_of_many_seeds_follows_the_distribution() -> None:
    want = np.array([0.5, 0.3, 0.15, 0.05])
    first = uniforms([sample_seed(0, 3, "prompt", i) for i in range(4000)], 1)[:, 0]
    tokens, _ = sample_tokens(log_probabilities(*want).expand(4000, -1), 1.0, first)
    counts = np.bincount(tokens.numpy(), minlength=4)
    # 3 degrees of freedom, probability 1e-4.
    assert ((counts - 4000 * want) ** 2 / (4000 * want)).sum() < 21.1


def test_intervals_of_the_cumulative_distribution() -> None:
    logits = log_probabilities(0.25, 0.5, 0.25).expand(7, -1)
    points = uniform(0.0, 0.2499, 0.2501, 0.5, 0.7499, 0.7501, LAST_UNIFORM)
    tokens, _ = sample_tokens(logits, 1.0, points)
    assert tokens.tolist() == [0, 0, 1, 1, 1, 2, 2] and tokens.dtype == torch.int64


def test_the_ends_pick_the_first_and_last_token_with_mass() -> None:
    inf = math.inf
    logits = torch.tensor([[-inf, -inf, 0.0, 1.0, -inf, 2.0, -inf, -inf]]).expand(2, -1)
    tokens, logprobs = sample_tokens(logits, 1.0, uniform(0.0, LAST_UNIFORM))
    assert tokens.tolist() == [2, 5]
    assert bool(torch.isfinite(logprobs).all())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-20, 20), st.just(-math.inf)), min_size=1, max_size=40),
    st.one_of(st.sampled_from([0.0, 5e-324, 2.0**-53, LAST_UNIFORM]), st.floats(0, LAST_UNIFORM)),
)
def test_a_token_without_mass_is_never_drawn(values: list[float], point: float) -> None:
    values[len(values) // 2] = 0.0
    logits = torch.tensor([values], dtype=torch.float32)
    tokens, logprobs = sample_tokens(logits, 1.0, uniform(point))
    assert values[int(tokens)] > -math.inf and math.isfinite(float(logprobs))
    exact = torch.softmax(logits.double(), -1)[0]
    below = float(exact[: int(tokens)].sum())
    assert below - 1e-12 <= point <= below + float(exact[int(tokens)]) + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_reported_logprob_is_that_of_the_sampled_distribution(temperature: float, dtype: torch.dtype) -> None:
    logits = randn(0, 50, 97, dtype=dtype) * 4
    tokens, logprobs = sample_tokens(logits, temperature, uniforms([5], 50)[0])
    assert logprobs.dtype == torch.float32 and logprobs.shape == (50,)
    assert torch.equal(logprobs, token_logprobs(logits, tokens, temperature))
    exact = torch.log_softmax(logits.double() / temperature, -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=2e-6)


def test_rows_do_not_influence_each_other() -> None:
    logits, points = randn(1, 33, 257), uniforms([9], 33)[0]
    tokens, logprobs = sample_tokens(logits, 1.0, points)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    shuffled_tokens, shuffled_logprobs = sample_tokens(logits[order], 1.0, points[order])
    assert torch.equal(shuffled_tokens, tokens[order]) and torch.equal(shuffled_logprobs, logprobs[order])
    for i in (0, 16, 32):
        alone_token, alone_logprob = sample_tokens(logits[i : i + 1], 1.0, points[i : i + 1])
        assert int(alone_token) == int(tokens[i]) and torch.equal(alone_logprob, logprobs[i : i + 1])


def test_token_logprobs_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0]]])
    got = token_logprobs(logits, torch.tensor([[1, 1]]), 1.0)
    assert got.shape == (1, 2) and got.dtype == torch.float32
    assert got[0].tolist() == pytest.approx([math.log(0.75), math.log(0.2)], rel=1e-6)
    # Temperature 2 takes square roots: sqrt 3 : 1 and 2 : 1.
    warm = token_logprobs(logits, torch.tensor([[1, 0]]), 2.0)[0].tolist()
    assert warm == pytest.approx([math.log(math.sqrt(3) / (1 + math.sqrt(3))), math.log(2 / 3)], rel=1e-6)


def test_bf16_logits_are_read_in_fp32() -> None:
    logits, tokens = randn(2, 4, 300, dtype=torch.bfloat16), torch.tensor([0, 5, 299, 7])
    assert torch.equal(token_logprobs(logits, tokens, 1.0), token_logprobs(logits.float(), tokens, 1.0))


def test_large_logits_do_not_overflow() -> None:
    got = token_logprobs(torch.tensor([[1e4, 0.0], [-1e4, -1e4]]), torch.tensor([0, 1]), 1.0)
    assert got.tolist() == pytest.approx([0.0, -math.log(2)], rel=1e-6)


def test_entropy_by_hand() -> None:
    logits = torch.stack([torch.zeros(8), torch.tensor([0.0] + [-1e4] * 7)])
    assert token_entropy(logits, 1.0).tolist() == pytest.approx([math.log(8), 0.0], rel=1e-6)
    p = np.array([0.5, 0.25, 0.25])
    assert float(token_entropy(log_probabilities(*p), 1.0)) == pytest.approx(1.5 * math.log(2), rel=1e-6)
    # At temperature 1/2 the odds are squared: 4 : 1 : 1.
    cold = -(2 / 3) * math.log(2 / 3) - 2 * (1 / 6) * math.log(1 / 6)
    assert float(token_entropy(log_probabilities(*p), 0.5)) == pytest.approx(cold, rel=1e-6)


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0], [-1.0, 0.0, 0.0]])
    tokens, logprobs = greedy_tokens(logits)
    assert tokens.tolist() == [1, 0, 1]
    assert torch.equal(logprobs, token_logprobs(logits, tokens, 1.0))


def test_seed_is_the_hash_of_its_four_values() -> None:
    digest = hashlib.sha256(b"7/3/ab12/5").digest()
    assert sample_seed(7, 3, "ab12", 5) == int.from_bytes(digest[:8], "little")
    assert 0 <= sample_seed(0, 0, "", 0) < 2**64


def test_every_part_of_the_key_changes_the_seed() -> None:
    keys = [(r, s, p, i) for r in range(6) for s in range(12) for p in ("a", "b", "1", "11") for i in range(12)]
    keys += [(1, 11, "1", 1), (11, 1, "1", 1), (1, 1, "1/1", 1), (1, 1, "1", 111)]
    distinct = set(keys)
    assert len({sample_seed(*key) for key in distinct}) == len(distinct)


def test_uniforms_are_determined_by_their_own_seed() -> None:
    seeds = [3, 2**64 - 1, 0, 3]
    got = uniforms(seeds, 5)
    assert got.shape == (4, 5) and got.dtype == torch.float64
    assert torch.equal(got[0], got[3]) and torch.equal(uniforms(seeds, 5), got)
    for i, seed in enumerate(seeds):
        assert torch.equal(uniforms([seed], 5)[0], got[i])
    assert len(set(got[:3].reshape(-1).tolist())) == 15
    assert bool((got >= 0).all()) and bool((got < 1).all())


def test_a_longer_count_extends_the_sequence() -> None:
    long = uniforms([1, 2], 100)
    for count in (0, 1, 3, 4, 5, 63):
        assert torch.equal(uniforms([1, 2], count), long[:, :count])


def test_no_global_generator_is_read_or_moved() -> None:
    want, before = uniforms([8], 4), torch.random.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert torch.equal(uniforms([8], 4), want)
    sample_tokens(randn(0, 4, 5), 1.0, want[0])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert uniforms([], 4).shape == (0, 4)


def test_uniforms_are_uniform_and_neighbouring_seeds_unrelated() -> None:
    x = uniforms(list(range(400)), 50).numpy()
    counts = np.histogram(x, bins=20, range=(0, 1))[0]
    # 19 degrees of freedom, probability 1e-4.
    assert ((counts - 1000) ** 2 / 1000).sum() < 50.8
    assert abs(np.corrcoef(x[:-1, 0], x[1:, 0])[0, 1]) < 0.2
    assert abs(np.corrcoef(x[:, 0], x[:, 1])[0, 1]) < 0.2


def test_no_rows() -> None:
    tokens, logprobs = sample_tokens(torch.empty(0, 5), 1.0, uniform())
    assert tokens.shape == logprobs.shape == (0,)
