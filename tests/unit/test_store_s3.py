"""The checkpoint store and what only S3 can do wrong: no answer, no access, no bucket, large objects."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from uuid import uuid4

import pytest

from infra.store import CheckpointStore, StoreError
from tests.s3_server import SeaweedServer

RUN = "run-1"

pytestmark = pytest.mark.s3


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "weights.bin").write_bytes(b"w" * 100)
    return {"weights.bin": tmp_path / "weights.bin"}


def test_an_s3_that_does_not_answer_is_an_error_soon_and_not_an_empty_store(files: dict[str, Path]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        store = CheckpointStore("s3://bucket/prefix", options)
        calls = (lambda: store.latest(RUN), store.runs, store.check, lambda: store.publish(RUN, 1, files, {}))
        for call in calls:
            start = time.monotonic()
            with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
                call()
            assert time.monotonic() - start < 8.0


def test_a_wrong_secret_and_a_missing_bucket_are_errors(s3_server: SeaweedServer, files: dict[str, Path]) -> None:
    wrong = s3_server.storage_options | {"secret": "wrong"}
    store = CheckpointStore(f"s3://{s3_server.bucket}/p", wrong)
    for call in (lambda: store.latest(RUN), lambda: store.publish(RUN, 1, files, {})):
        with pytest.raises(StoreError, match="PermissionError"):
            call()
    missing = CheckpointStore("s3://no-such-bucket/p", s3_server.storage_options)
    with pytest.raises(StoreError, match="no-such-bucket"):
        missing.latest(RUN)


@pytest.mark.slow
def test_a_multipart_upload_comes_back(s3_server: SeaweedServer, tmp_path: Path) -> None:
    """From 100 MiB on an object goes up in parts."""
    source = tmp_path / "big.bin"
    block = os.urandom(1 << 20)
    source.write_bytes(b"".join(block[i:] + block[:i] for i in range(101)) + b"tail")
    store = CheckpointStore(f"s3://{s3_server.bucket}/{uuid4().hex}", s3_server.storage_options)
    manifest = store.publish(RUN, 1, {"big.bin": source}, {})
    assert store.latest(RUN) == manifest
    store.fetch(manifest, tmp_path / "back")
    assert (tmp_path / "back" / "big.bin").read_bytes() == source.read_bytes()
    store.prune(RUN, 1)
