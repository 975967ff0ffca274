"""Streams: groups as they end, and the same batch as without."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from tasks.engines.groups import drain
from tasks.engines.protocols import FinishedGroup, GroupStream, RolloutBatch, SyncError, WeightVersionError
from tests.contract.engines import NEW_TOKENS, SAMPLES, Workbench, assert_same


def _follow(stream: GroupStream) -> tuple[list[FinishedGroup], RolloutBatch]:
    groups: list[FinishedGroup] = []
    while True:
        try:
            groups += next(stream)
        except StopIteration as end:
            return groups, end.value


@pytest.mark.parametrize("batch_size", [2, SAMPLES, 512])
def test_a_stream_hands_out_every_prompt_once_and_returns_the_batch(rollouts: Workbench, batch_size: int) -> None:
    """Also where the samples of a prompt do not fit a decode batch together, and where they end at different times."""
    engine = rollouts.rollout("bf16", f"rollout.batch_size={batch_size}")
    free = engine.generate(rollouts.request())
    request = rollouts.request(eos_token_ids=(free.response(4)[1], free.response(9)[0]))
    groups, batch = _follow(engine.stream(request))
    assert len(set(batch.response_lengths.tolist())) > 1
    assert_same(batch, engine.generate(request))
    assert sorted(group.prompt for group in groups) == [0, 1, 2, 3]
    for group in groups:
        expected = [batch.response(group.prompt * SAMPLES + place) for place in range(SAMPLES)]
        assert list(group.responses) == expected


def test_groups_may_be_of_different_sizes(rollouts: Workbench) -> None:
    engine = rollouts.rollout("bf16", "rollout.batch_size=2")
    sizes = (2, 1, 3, 1)
    prompts = tuple(replace(p, seeds=p.seeds[:size]) for p, size in zip(rollouts.prompts(), sizes, strict=True))
    groups, batch = _follow(engine.stream(rollouts.request(prompts)))
    found = {group.prompt: list(group.responses) for group in groups}
    samples = iter(range(sum(sizes)))
    assert found == {i: [batch.response(next(samples)) for _ in range(size)] for i, size in enumerate(sizes)}


def test_a_stream_never_mixes_versions(rollouts: Workbench) -> None:
    """Whether a sync between two groups is refused or ends the stream, no batch comes of it."""
    engine = rollouts.rollout("bf16", "rollout.batch_size=1")
    request = rollouts.request(tuple(replace(p, seeds=p.seeds[:1]) for p in rollouts.prompts()))
    free = engine.generate(request)
    ends = (free.response(0)[0],)
    assert NEW_TOKENS in engine.generate(replace(request, eos_token_ids=ends)).response_lengths.tolist()
    stream = engine.stream(replace(request, eos_token_ids=ends))
    assert next(stream)[0].responses == ([ends[0]],)
    with suppress(SyncError):
        engine.load_weights(replace(rollouts.payload("bf16"), version=1))
    with pytest.raises(WeightVersionError, match=r"expects version 0, the engine holds (1|None)"):
        drain(stream)
    engine.load_weights(rollouts.payload("bf16"))
    assert_same(free, engine.generate(request))
