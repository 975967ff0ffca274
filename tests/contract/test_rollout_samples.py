"""Samples: their shape, their log-probabilities, and that nothing but the seed decides them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tasks.engines.protocols import EngineError, Prompt, RolloutBatch, RolloutEngine
from tests.contract.engines import NEW_TOKENS, POSITIONS, SAMPLES, VOCABULARY, Workbench, assert_same
from tests.contract.reference import Reference


def _by_seed(prompts: tuple[Prompt, ...], batch: RolloutBatch) -> dict[int, list[int]]:
    seeds = [seed for prompt in prompts for seed in prompt.seeds]
    return {seed: batch.response(sample) for sample, seed in enumerate(seeds)}


def _same_up_to_knife_edges(bench: Workbench, first: dict[int, list[int]], second: dict[int, list[int]]) -> int:
    """Compare samples of equal seeds; a difference must begin where the draw hits a border. Returns how many do."""
    reference = Reference(bench.model_dir, bench.payload("bf16"))
    prefixes = {seed: list(p.token_ids) for p in bench.prompts() for seed in p.seeds}
    edges = 0
    for seed in first.keys() & second.keys():
        a, b = first[seed], second[seed]
        if a == b:
            continue
        at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        allowed = bench.rollout_engine.sampler(seed, at, reference.next_logprobs(prefixes[seed] + a[:at]))
        assert allowed[a[at]] and allowed[b[at]], f"seed {seed}, token {at}: {a} and {b}"
        edges += 1
    return edges


def test_a_batch_has_prompt_and_response_side_by_side(rollouts: Workbench, recipe: str) -> None:
    batch, prompts = rollouts.batch(recipe), rollouts.prompts()
    width = max(len(p.token_ids) for p in prompts) + NEW_TOKENS
    assert batch.tokens.dtype == batch.prompt_lengths.dtype == batch.response_lengths.dtype == torch.int64
    assert batch.logprobs.dtype == torch.float32 and batch.truncated.dtype == torch.bool
    assert batch.tokens.shape == batch.logprobs.shape == (4 * SAMPLES, width)
    for sample in range(4 * SAMPLES):
        ids = prompts[sample // SAMPLES].token_ids
        end = len(ids) + NEW_TOKENS
        assert tuple(batch.tokens[sample, : len(ids)].tolist()) == ids
        assert int(batch.prompt_lengths[sample]) == len(ids)
        assert int(batch.response_lengths[sample]) == NEW_TOKENS
        assert not batch.tokens[sample, end:].any()
    assert not any(value.is_inference() for value in vars(batch).values()), "autograd must be able to use them"
    assert batch.truncated.all(), "no end token exists, so every sample ends by length"


def test_logprobs_stand_at_response_tokens_alone(rollouts: Workbench, recipe: str) -> None:
    batch = rollouts.batch(recipe)
    assert torch.equal(torch.isfinite(batch.logprobs), batch.response_mask())
    assert torch.equal(torch.isnan(batch.logprobs), ~batch.response_mask())
    assert (batch.logprobs[batch.response_mask()] <= 0).all()


def test_bf16_logprobs_are_those_of_whole_sequences(rollouts: Workbench) -> None:
    batch = rollouts.batch("bf16")
    with torch.no_grad():
        expected = Reference(rollouts.model_dir, rollouts.payload("bf16")).logprobs(batch)
    error = (batch.logprobs - expected)[batch.response_mask()].abs()
    assert float(error.mean()) < rollouts.rollout_engine.bf16_error
    assert float(error.max()) < 10 * rollouts.rollout_engine.bf16_error


def test_logprobs_are_those_of_the_sampled_temperature(rollouts: Workbench) -> None:
    batch = rollouts.rollout("bf16").generate(rollouts.request(temperature=0.5))
    reference = Reference(rollouts.model_dir, rollouts.payload("bf16"))
    mask = batch.response_mask()
    with torch.no_grad():
        cooled, plain = reference.logprobs(batch, 0.5), reference.logprobs(batch)
    assert float((batch.logprobs - cooled)[mask].abs().mean()) < 2 * rollouts.rollout_engine.bf16_error
    assert float((batch.logprobs - plain)[mask].abs().mean()) > 0.3


def test_the_seed_draws_every_token_as_the_sampler_says(rollouts: Workbench) -> None:
    batch, sampler = rollouts.batch("bf16"), rollouts.rollout_engine.sampler
    with torch.no_grad():
        logits = Reference(rollouts.model_dir, rollouts.payload("bf16")).logits(batch.tokens)
    logprobs = logits.double().log_softmax(-1)
    seeds = [seed for prompt in rollouts.prompts() for seed in prompt.seeds]
    allowed = 0
    for sample, seed in enumerate(seeds):
        start = int(batch.prompt_lengths[sample])
        for position, token in enumerate(batch.response(sample)):
            tokens = sampler(seed, position, logprobs[sample, start + position - 1])
            assert tokens[token], f"seed {seed}, token {position}"
            allowed += int(tokens.sum())
    assert allowed < 8 * len(seeds) * NEW_TOKENS, "of 128 tokens a draw must leave few, or it says nothing"


def test_samples_follow_the_distribution(rollouts: Workbench) -> None:
    """First tokens of 2,000 seeds against the reference: total variation as of 2,000 true draws."""
    draws = 2000
    prompt = replace(rollouts.prompts()[0], seeds=tuple(range(draws)))
    batch = rollouts.rollout("bf16").generate(rollouts.request((prompt,), max_new_tokens=1))
    counts = torch.bincount(batch.tokens[:, len(prompt.token_ids)], minlength=VOCABULARY).double()
    expected = Reference(rollouts.model_dir, rollouts.payload("bf16")).next_logprobs(list(prompt.token_ids)).exp()
    distance = 0.5 * float((counts / draws - expected).abs().sum())
    # E|count/n - p| is at most sqrt(p (1 - p) / n) for each token.
    bound = 0.5 * float((expected * (1 - expected) / draws).sqrt().sum())
    assert 0.2 * bound < distance < 1.2 * bound


def test_the_same_request_gives_the_same_samples(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.rollout(recipe)
    first = engine.generate(rollouts.request())
    engine.generate(rollouts.request(rollouts.prompts()[1:2], max_new_tokens=3))
    assert_same(first, engine.generate(rollouts.request()))
    assert_same(first, rollouts.rollout(recipe).generate(rollouts.request()))


def test_other_seeds_give_other_samples(rollouts: Workbench, recipe: str) -> None:
    prompts = rollouts.prompts()
    shifted = tuple(replace(p, seeds=tuple(s + 1 for s in p.seeds)) for p in prompts)
    engine = rollouts.rollout(recipe)
    first = _by_seed(prompts, engine.generate(rollouts.request()))
    second = _by_seed(shifted, engine.generate(rollouts.request(shifted)))
    assert all(first[seed] != second[seed + 1] for seed in first)
    assert len({tuple(r) for r in first.values()}) == len(first)


@pytest.mark.parametrize("batch_size", [512, 7, 2, 1])
def test_a_seed_alone_decides_a_sample(rollouts: Workbench, batch_size: int) -> None:
    """Order of the prompts, their number and the size of the decode batch decide nothing.

    Except at knife edges: BF16 products of another shape sum in another order, which moves about one sample
    of twelve on CPU.
    """
    prompts = rollouts.prompts()
    engine = rollouts.rollout("bf16", f"rollout.batch_size={batch_size}")
    whole = _by_seed(prompts, rollouts.batch("bf16"))
    turned = tuple(replace(p, seeds=p.seeds[::-1]) for p in reversed(prompts))
    halves = _by_seed(prompts[2:], engine.generate(rollouts.request(prompts[2:])))
    halves |= _by_seed(prompts[:2], engine.generate(rollouts.request(prompts[:2])))
    reordered = _by_seed(turned, engine.generate(rollouts.request(turned)))
    assert reordered.keys() == halves.keys() == whole.keys()
    assert _same_up_to_knife_edges(rollouts, whole, reordered) <= 3
    assert _same_up_to_knife_edges(rollouts, whole, halves) <= 3


def test_more_tokens_continue_the_same_samples(rollouts: Workbench) -> None:
    prompts, engine = rollouts.prompts(), rollouts.rollout("bf16")
    short = _by_seed(prompts, engine.generate(rollouts.request(max_new_tokens=3)))
    long = _by_seed(prompts, engine.generate(rollouts.request()))
    assert _same_up_to_knife_edges(rollouts, short, {seed: r[:3] for seed, r in long.items()}) <= 1


def test_greedy_takes_the_likeliest_token_whatever_the_seed(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.rollout(recipe)
    batch = engine.generate(rollouts.request(greedy=True))
    assert_same(batch, engine.generate(rollouts.request(greedy=True, temperature=0.3)))
    for first in range(0, len(batch.tokens), SAMPLES):
        assert all(batch.response(first + i) == batch.response(first) for i in range(SAMPLES))
    mask = batch.response_mask()
    # The most probable of 128 tokens has at least 1/128.
    assert (batch.logprobs[mask] >= -torch.log(torch.tensor(float(VOCABULARY)))).all()


def test_greedy_is_the_argmax_of_the_reference(rollouts: Workbench) -> None:
    batch = rollouts.rollout("bf16").generate(rollouts.request(greedy=True))
    reference = Reference(rollouts.model_dir, rollouts.payload("bf16"))
    with torch.no_grad():
        best = reference.logits(batch.tokens).log_softmax(-1).amax(-1)[:, :-1]
        taken = reference.logprobs(batch)[:, 1:]
    mask = batch.response_mask()[:, 1:]
    # Never far below the best; exactly the best unless two logits are as close as BF16 rounding.
    assert float((best - taken)[mask].max()) < 0.1
    assert float((best - taken)[mask].mean()) < 0.01
    assert float((batch.logprobs[:, 1:] - taken)[mask].abs().mean()) < rollouts.rollout_engine.bf16_error


def test_an_end_token_ends_a_response_and_stays_in_it(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.rollout(recipe)
    free = engine.generate(rollouts.request())
    ends = (free.response(0)[2], free.response(5)[0], free.response(7)[NEW_TOKENS - 1])
    stopped = engine.generate(rollouts.request(eos_token_ids=ends))
    for sample in range(len(free.tokens)):
        whole = free.response(sample)
        first = next((i for i, token in enumerate(whole) if token in ends), None)
        expected = whole if first is None else whole[: first + 1]
        assert stopped.response(sample) == expected
        assert bool(stopped.truncated[sample]) == (first is None)
        assert sum(token in ends for token in expected) == (first is not None)
    assert len(stopped.response(5)) == 1
    assert len(stopped.response(7)) <= NEW_TOKENS and not stopped.truncated[7]
    assert stopped.truncated.any()
    assert torch.equal(torch.isfinite(stopped.logprobs), stopped.response_mask())
    assert not stopped.tokens[torch.arange(stopped.tokens.shape[1]) >= stopped.lengths.unsqueeze(1)].any()
    assert stopped.tokens.shape[1] == int(stopped.lengths.max())


@pytest.mark.parametrize("limit", [1, 2])
def test_no_response_is_longer_than_asked(rollouts: Workbench, recipe: str, limit: int) -> None:
    batch = rollouts.rollout(recipe).generate(rollouts.request(max_new_tokens=limit))
    assert batch.response_lengths.tolist() == [limit] * 12
    assert batch.truncated.all()


def _refused(engine: RolloutEngine, bench: Workbench, message: str, prompt: Prompt, **changes: object) -> None:
    with pytest.raises(EngineError, match=message):
        engine.generate(bench.request((bench.prompts()[0], prompt), **changes))
    assert engine.generate(bench.request()).tokens.shape[0] == 12, "a bad request does not make the engine dirty"


def test_a_prompt_that_leaves_no_room_is_refused(rollouts: Workbench, recipe: str) -> None:
    engine = rollouts.rollout(recipe)
    fits = Prompt("brim", (7,) * (POSITIONS - NEW_TOKENS), (1, 2))
    assert engine.generate(rollouts.request((fits,))).tokens.shape == (2, POSITIONS)
    long = replace(fits, id="too long", token_ids=(*fits.token_ids, 7))
    _refused(engine, rollouts, "prompt too long: 57 tokens .* 8 exceed the model's 64 positions", long)


def test_requests_that_mean_nothing_are_refused(rollouts: Workbench) -> None:
    engine, good = rollouts.rollout("bf16"), rollouts.prompts()[1]
    _refused(engine, rollouts, "prompt p1: no tokens or no seeds", replace(good, token_ids=()))
    _refused(engine, rollouts, "prompt p1: no tokens or no seeds", replace(good, seeds=()))
    _refused(engine, rollouts, "prompt p1: token 128 .* 128 tokens", replace(good, token_ids=(5, 128)))
    _refused(engine, rollouts, "max_new_tokens 0", good, max_new_tokens=0)
    _refused(engine, rollouts, "temperature 0.0", good, temperature=0.0)
    with pytest.raises(EngineError, match="no prompts"):
        engine.generate(rollouts.request(()))
