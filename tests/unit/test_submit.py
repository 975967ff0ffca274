"""What `fp8-grpo submit` refuses before it asks a server."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from conf.problems import ConfigError
from flows.cli import CONFIG_ERROR, main
from flows.submit import Submitted, submit, watch


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_PROFILES_PATH", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))


def test_a_configuration_that_train_refuses(no_server: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "stepz=3"]) == CONFIG_ERROR
    assert "stepz" in capsys.readouterr().err


def test_no_server_is_configured(no_server: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "steps=3"]) == CONFIG_ERROR
    assert "PREFECT_API_URL: no Prefect server is configured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (Completed(), 0),
        (Completed(name="Unfinished", message="stopped after step 3; resume=r goes on"), 3),
        (Failed(), 1),
        (Cancelled(), 1),
    ],
)
def test_watching_tells_how_a_run_ended(state: State, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its allocation stopped is not done, whatever the type of its state."""
    client = MagicMock()
    client.__enter__.return_value.read_flow_run.return_value.state = state
    monkeypatch.setattr("flows.submit.get_client", lambda **_: client)
    assert watch(Submitted(uuid4(), "run", "url")) == code


@pytest.mark.parametrize("name", ["fp8-grpo", "a/b/c"])
def test_a_name_without_its_flow(name: str) -> None:
    with pytest.raises(ConfigError, match="FLOW/NAME"):
        submit([], name)
