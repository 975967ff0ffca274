"""A checkpoint store, on a disk and on a real S3 server, and files for it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from tests.unit.store_support import FILES, Place, write_files


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        return Place(str(tmp_path / "store"), {})
    server = request.getfixturevalue("s3_server")
    return Place(f"s3://{server.bucket}/store-{uuid4().hex}", server.storage_options)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_files(tmp_path / "source", FILES)
