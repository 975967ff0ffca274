"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs of a file: they share the MLflow store and the warm start's cache, as in a checkout."""
    return tmp_path_factory.mktemp("runs")
