"""Shared fixtures. Telemetry of every tool is off before any of them is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.s3_server import SeaweedServer

os.environ.update(
    {
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)


LONGEST = ("test_train.py", "test_resume_slow.py", "test_sweep_deployment_slow.py", "test_trainer_ranks.py")
"""Files that begin, so that none of them is left over when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.addinivalue_line("markers", "s3: needs the S3 server of the s3_server fixture")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test that calls a command in this process leaves none of the variables behind that commands set.

    Ray's, say: with a token of the user at hand a later test's local Ray would ask its own driver for it in vain.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """One S3 server for the whole session; take a prefix of your own in its bucket."""
    with SeaweedServer() as server:
        yield server
