"""A checkpoint that several processes bring together: each stages its files, and one commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store import CheckpointStore, StoreError
from tests.unit.store_support import FILES, META, RUN, Place, contents


def test_processes_stage_their_files_and_one_commits(place: Place, files: dict[str, Path], tmp_path: Path) -> None:
    """Each has a store of its own; until the commit there is no checkpoint, and what is never committed is pruned."""
    others = [CheckpointStore(place.url, place.options) for _ in range(2)]
    dead = place.store.begin(RUN, 1)
    place.store.stage(RUN, dead, files)
    attempt = place.store.begin(RUN, 2)
    parts = [{"weights.bin": files["weights.bin"]}, {"state/optimizer.bin": files["state/optimizer.bin"]}]
    entries = [entry for store, part in zip(others, parts, strict=True) for entry in store.stage(RUN, attempt, part)]
    assert place.store.latest(RUN) is None and place.store.runs() == ()
    own = place.store.stage(RUN, attempt, {"journal.jsonl": files["journal.jsonl"]})
    manifest = place.store.commit(RUN, attempt, [*own, *entries], META)
    assert (manifest.step, manifest.meta) == (2, META)
    assert manifest.files == place.store.publish("other", 2, files, META).files
    assert place.store.latest(RUN) == manifest
    place.store.fetch(manifest, tmp_path / "back")
    assert contents(tmp_path / "back") == FILES
    place.store.prune(RUN, 1)
    assert not any(dead in name for name in place.names())


def test_a_commit_of_what_is_not_there_once_makes_no_checkpoint(place: Place, files: dict[str, Path]) -> None:
    attempt = place.store.begin(RUN, 2)
    entries = place.store.stage(RUN, attempt, files)
    with pytest.raises(StoreError, match=r"publishing step 2 of run run-1 to .*: journal\.jsonl was staged twice"):
        place.store.commit(RUN, attempt, [*entries, *entries], META)
    place.remove(f"{RUN}/attempts/{attempt}/weights.bin")
    with pytest.raises(StoreError, match=r"publishing step 2 .*weights\.bin is missing"):
        place.store.commit(RUN, attempt, entries, META)
    with pytest.raises(StoreError, match="files"):
        place.store.commit(RUN, attempt, [], META)
    assert place.store.latest(RUN) is None
