"""Groups of responses on their way from an engine: put together as samples end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasks.engines.protocols import FinishedGroup, GroupStream, Prompt, RolloutBatch


class OpenGroups:
    """The responses of a request so far. Samples are numbered as in a batch: prompt by prompt, seed by seed."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._places = [(prompt, place) for prompt, p in enumerate(prompts) for place in range(len(p.seeds))]
        self._responses: list[dict[int, list[int]]] = [{} for _ in prompts]
        self._sizes = [len(p.seeds) for p in prompts]

    def add(self, ended: Iterable[tuple[int, list[int]]]) -> tuple[FinishedGroup, ...]:
        """Take samples that ended, with their token ids; returns the groups that they complete."""
        complete = []
        for sample, response in ended:
            prompt, place = self._places[sample]
            group = self._responses[prompt]
            group[place] = response
            if len(group) == self._sizes[prompt]:
                complete.append(FinishedGroup(prompt, tuple(group[i] for i in range(len(group)))))
        return tuple(complete)


def drain(stream: GroupStream) -> RolloutBatch:
    """The batch that a stream returns."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            batch: RolloutBatch = end.value
            return batch
