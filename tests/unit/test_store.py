"""The checkpoint store on a disk and on a real S3 server: whole or not at all, and damage by name."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.store import CheckpointStore, StoreError
from infra.store_files import StoreFiles
from tests.unit.store_support import FILES, META, RUN, Place, attempt_path, contents


def test_publish_latest_fetch(place: Place, files: dict[str, Path], tmp_path: Path) -> None:
    published = place.store.publish(RUN, 3, files, META)
    assert {entry.path: (entry.size, entry.sha256) for entry in published.files} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
    }
    other = CheckpointStore(place.url, place.options)
    latest = other.latest(RUN)
    assert latest == published
    assert latest.meta == META and latest.run == RUN and latest.step == 3 and latest.format == 1
    other.fetch(latest, tmp_path / "back" / "here")
    assert contents(tmp_path / "back" / "here") == FILES
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["here"]


def test_layout(place: Place, files: dict[str, Path]) -> None:
    manifest = place.store.publish(RUN, 3, files, META)
    assert manifest.attempt.startswith("00000003-")
    assert place.names() == {
        *(attempt_path(manifest, name) for name in FILES),
        f"{RUN}/manifests/{manifest.attempt}.json",
        f"{RUN}/LATEST",
    }
    assert place.read(f"{RUN}/LATEST").decode() == f"{manifest.attempt}\n"
    assert json.loads(place.read(f"{RUN}/manifests/{manifest.attempt}.json"))["meta"] == META


def test_nothing_published(place: Place) -> None:
    assert place.store.latest(RUN) is None
    assert place.store.runs() == ()
    place.store.prune(RUN, 1)


def test_newest_is_the_highest_step_then_the_latest_written(place: Place, files: dict[str, Path]) -> None:
    place.store.publish(RUN, 20, files, {"n": 1})
    place.store.publish(RUN, 9, files, {"n": 2})
    second = place.store.publish(RUN, 20, files, {"n": 3})
    assert place.store.latest(RUN) == second
    assert [manifest.meta["n"] for manifest in place.store.complete(RUN)] == [3, 1, 2]


def test_runs_are_separate(place: Place, files: dict[str, Path]) -> None:
    b = place.store.publish("b", 1, files, {})
    a = place.store.publish("a", 2, files, {})
    place.write("c/attempts/00000001-" + "0" * 32 + "/weights.bin", b"half")
    assert place.store.runs() == ("a", "b")
    assert place.store.latest("a") == a and place.store.latest("b") == b


@pytest.mark.parametrize("survivors", [0, 1, 2, 3])
def test_a_crash_before_the_manifest_leaves_no_checkpoint(
    place: Place, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, survivors: int
) -> None:
    """The process dies after `survivors` files; with all three, right before the manifest."""
    first = place.store.publish(RUN, 1, files, {})
    put, calls = StoreFiles.put, []

    def dying_put(self: StoreFiles, source: Path, name: str) -> None:
        if len(calls) == survivors:
            raise KeyboardInterrupt
        calls.append(name)
        put(self, source, name)

    def dying_write(self: StoreFiles, data: bytes, name: str, staging: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreFiles, "put", dying_put)
        patch.setattr(StoreFiles, "write", dying_write)
        with pytest.raises(KeyboardInterrupt):
            place.store.publish(RUN, 2, files, {})
    assert len(calls) == survivors
    assert place.store.latest(RUN) == first
    second = place.store.publish(RUN, 2, files, {})
    assert place.store.latest(RUN) == second


def test_a_short_upload_is_not_published(
    place: Place, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = StoreFiles.put
    short = tmp_path / "short"
    short.write_bytes(FILES["weights.bin"][:-1])

    def short_put(self: StoreFiles, source: Path, name: str) -> None:
        put(self, short if name.endswith("weights.bin") else source, name)

    monkeypatch.setattr(StoreFiles, "put", short_put)
    with pytest.raises(StoreError, match=r"publishing step 2 .*weights\.bin has 4999 bytes, want 5000"):
        place.store.publish(RUN, 2, files, {})
    assert place.store.latest(RUN) is None


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_newest_is_skipped_with_a_warning(
    place: Place, files: dict[str, Path], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = place.store.publish(RUN, 1, files, {})
    second = place.store.publish(RUN, 2, files, {})
    if damage == "truncated":
        place.write(attempt_path(second, "weights.bin"), FILES["weights.bin"][:100])
    else:
        place.remove(attempt_path(second, "weights.bin"))
    with caplog.at_level(logging.WARNING):
        assert place.store.latest(RUN) == first
    words = {"truncated": "weights.bin has 100 bytes, want 5000", "missing": "weights.bin is missing"}
    assert f"attempts/{second.attempt} is not complete and skipped: {words[damage]}" in caplog.text


def test_a_flipped_byte_is_refused_on_fetch(place: Place, files: dict[str, Path], tmp_path: Path) -> None:
    manifest = place.store.publish(RUN, 1, files, {})
    flipped = bytearray(FILES["weights.bin"])
    flipped[2500] ^= 1
    place.write(attempt_path(manifest, "weights.bin"), bytes(flipped))
    assert place.store.latest(RUN) == manifest
    want, got = (hashlib.sha256(data).hexdigest() for data in (FILES["weights.bin"], flipped))
    with pytest.raises(StoreError, match=rf"weights\.bin: want sha256 {want}, got {got}"):
        place.store.fetch(manifest, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_file_that_vanished_is_named_on_fetch(place: Place, files: dict[str, Path], tmp_path: Path) -> None:
    manifest = place.store.publish(RUN, 1, files, {})
    place.remove(attempt_path(manifest, "state/optimizer.bin"))
    with pytest.raises(StoreError, match=r"state/optimizer\.bin: missing, want sha256"):
        place.store.fetch(manifest, tmp_path / "back")


@pytest.mark.parametrize("text", [b"", b'{"format": 1, "run": "run-1"', b'{"format": 2}', b"\xff\xfe"])
def test_an_unreadable_manifest_is_skipped_and_its_files_stay(
    place: Place, files: dict[str, Path], caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    first = place.store.publish(RUN, 1, files, {})
    second = place.store.publish(RUN, 2, files, {})
    third = place.store.publish(RUN, 3, files, {})
    place.write(f"{RUN}/manifests/{second.attempt}.json", text)
    with caplog.at_level(logging.WARNING):
        assert [manifest.step for manifest in place.store.complete(RUN)] == [3, 1]
    assert f"{second.attempt}.json is damaged and skipped" in caplog.text
    place.store.prune(RUN, 1)
    left = place.names()
    assert attempt_path(second, "weights.bin") in left and attempt_path(third, "weights.bin") in left
    assert attempt_path(first, "weights.bin") not in left


def test_a_manifest_of_another_attempt_is_skipped(place: Place, files: dict[str, Path]) -> None:
    first = place.store.publish(RUN, 1, files, {})
    copied = place.read(f"{RUN}/manifests/{first.attempt}.json")
    place.write(f"{RUN}/manifests/00000009-{'a' * 32}.json", copied)
    assert place.store.latest(RUN) == first


@pytest.mark.parametrize("pointer", [None, b"", b"00000099-" + b"f" * 32, b"\xff garbage"])
def test_the_pointer_is_only_a_hint(
    place: Place, files: dict[str, Path], caplog: pytest.LogCaptureFixture, pointer: bytes | None
) -> None:
    place.store.publish(RUN, 1, files, {})
    second = place.store.publish(RUN, 2, files, {})
    if pointer is None:
        place.remove(f"{RUN}/LATEST")
    else:
        place.write(f"{RUN}/LATEST", pointer)
    with caplog.at_level(logging.WARNING):
        assert place.store.latest(RUN) == second
    assert f"the newest complete checkpoint is {second.attempt}: the pointer is not followed" in caplog.text


def test_a_pointer_that_cannot_be_written_does_not_undo_a_checkpoint(
    place: Place, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = StoreFiles.write

    def no_pointer(self: StoreFiles, data: bytes, name: str, staging: str) -> None:
        if name.endswith("LATEST"):
            raise PermissionError("read only")
        write(self, data, name, staging)

    monkeypatch.setattr(StoreFiles, "write", no_pointer)
    with caplog.at_level(logging.WARNING):
        manifest = place.store.publish(RUN, 1, files, {})
    assert "writing run-1/LATEST" in caplog.text and "PermissionError: read only" in caplog.text
    assert place.store.latest(RUN) == manifest


def test_prune_keeps_the_newest_and_what_may_be_in_progress(place: Place, files: dict[str, Path]) -> None:
    manifests = {step: place.store.publish(RUN, step, files, {}) for step in (1, 2, 3, 4)}
    orphans = {step: f"{RUN}/attempts/{step:08d}-{'d' * 32}/weights.bin" for step in (2, 4, 5)}
    for name in orphans.values():
        place.write(name, b"half")
    place.store.prune(RUN, 2)
    kept = {attempt_path(manifests[step], name) for step in (3, 4) for name in FILES}
    kept |= {f"{RUN}/manifests/{manifests[step].attempt}.json" for step in (3, 4)}
    assert place.names() == kept | {f"{RUN}/LATEST", orphans[4], orphans[5]}
    place.store.prune(RUN, 5)
    assert [manifest.step for manifest in place.store.complete(RUN)] == [4, 3]


def test_unfinished_attempts_go_when_nobody_writes_them(place: Place, files: dict[str, Path]) -> None:
    assert place.store.remove_unfinished(RUN, 0) == 0
    place.store.publish(RUN, 3, files, {})
    before = place.names()
    orphans = {step: f"{RUN}/attempts/{step:08d}-{'d' * 32}/weights.bin" for step in (2, 3, 4)}
    for name in orphans.values():
        place.write(name, b"half")
    assert place.store.remove_unfinished(RUN, 3600) == 0
    # S3 rounds times to seconds.
    assert place.store.remove_unfinished(RUN, -2) == 1
    assert place.names() == before | {orphans[3], orphans[4]}


def test_a_crash_in_the_middle_of_a_prune_is_made_good_by_the_next(
    place: Place, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = place.store.publish(RUN, 1, files, {})
    second = place.store.publish(RUN, 2, files, {})

    def die(self: StoreFiles, name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreFiles, "remove_folder", die)
        with pytest.raises(KeyboardInterrupt):
            place.store.prune(RUN, 1)
    assert list(place.store.complete(RUN)) == [second]
    assert attempt_path(first, "weights.bin") in place.names()
    place.store.prune(RUN, 1)
    assert attempt_path(first, "weights.bin") not in place.names()
    assert place.store.latest(RUN) == second


def test_check_leaves_nothing(place: Place) -> None:
    place.store.check()
    assert place.names() == set()


def test_fetch_refuses_a_folder_in_use(place: Place, files: dict[str, Path], tmp_path: Path) -> None:
    manifest = place.store.publish(RUN, 1, files, {})
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("x")
    with pytest.raises(StoreError, match="used: not an empty folder"):
        place.store.fetch(manifest, tmp_path / "used")
    assert contents(tmp_path / "used") == {"mine": b"x"}
    (tmp_path / "empty").mkdir()
    place.store.fetch(manifest, tmp_path / "empty")
    assert contents(tmp_path / "empty") == FILES


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "a b", "a*", "run\n"])
def test_bad_run_names(tmp_path: Path, files: dict[str, Path], run: str) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    with pytest.raises(StoreError, match="a run name is made of letters, digits"):
        store.publish(run, 1, files, {})
    with pytest.raises(StoreError, match="a run name is made of letters, digits"):
        store.latest(run)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", ".hidden", "a\\b", "-x", "a/"])
def test_bad_file_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(StoreError, match="is not a relative path of letters"):
        CheckpointStore(str(tmp_path / "store")).publish(RUN, 1, {name: tmp_path / "f"}, {})


def test_bad_requests_are_named(tmp_path: Path, files: dict[str, Path]) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    with pytest.raises(StoreError, match="step=-1: a step is an integer >= 0"):
        store.publish(RUN, -1, files, {})
    with pytest.raises(StoreError, match="a checkpoint has at least one file"):
        store.publish(RUN, 1, {}, {})
    with pytest.raises(StoreError, match=r"files: gone=.*/gone: no such file"):
        store.publish(RUN, 1, {"gone": tmp_path / "gone"}, {})
    with pytest.raises(StoreError, match="keep_last=0: an integer >= 1"):
        store.prune(RUN, 0)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"scale": float("nan")}, r"meta\.scale=nan"),
        ({"a": [1, {"b": float("inf")}]}, r"meta\.a\[1\]\.b=inf"),
        ({"layers": {0: 1.0}}, r"meta\.layers: key 0 is a int, JSON keeps strings only"),
        ({"path": Path("x")}, r"meta\.path=.*allowed: None, bool, int, finite float, str, list, dict"),
    ],
)
def test_meta_that_json_would_change_is_refused(
    tmp_path: Path, files: dict[str, Path], meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        CheckpointStore(str(tmp_path / "store")).publish(RUN, 1, files, meta)


def test_meta_floats_come_back_bit_by_bit(place: Place, files: dict[str, Path]) -> None:
    meta = {"scales": [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0], "pair": (1, 2)}
    returned = place.store.publish(RUN, 1, files, meta)
    latest = place.store.latest(RUN)
    assert [value.hex() for value in latest.meta["scales"]] == [value.hex() for value in meta["scales"]]
    assert latest.meta["pair"] == [1, 2] and latest == returned


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "http://host/x", "s3://", "file://", "simplecache::s3://b/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"allowed are a path, file://PATH and s3://BUCKET/PREFIX"):
        CheckpointStore(url)


def test_a_plain_path_and_a_file_url_are_one_store_whatever_the_working_folder(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = CheckpointStore("some/store [1]")
    monkeypatch.chdir("/")
    manifest = relative.publish(RUN, 1, files, {})
    assert CheckpointStore(f"file://{tmp_path}/some/store [1]").latest(RUN) == manifest
    relative.publish(RUN, 2, files, {})
    relative.prune(RUN, 1)
    assert len(list((tmp_path / "some" / "store [1]" / RUN / "attempts").iterdir())) == 1


def test_a_local_store_leaves_no_temporary_files(tmp_path: Path, files: dict[str, Path]) -> None:
    CheckpointStore(str(tmp_path / "store")).publish(RUN, 1, files, {})
    assert not [path for path in (tmp_path / "store").rglob(".*")]


def test_a_full_or_read_only_disk_is_a_store_error(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StoreError, match=r"publishing step 1 .*OSError: .*No space left on device"):
        CheckpointStore(str(tmp_path / "store")).publish(RUN, 1, files, {})
