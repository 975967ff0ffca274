"""Settings that libraries read from the environment when they are imported. A user's own setting always wins."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from conf.problems import ConfigError
from infra.prefect_server import EmbeddedPrefectServer

SERVER_START_S = 120.0
"""Within which an embedded Prefect server is up."""

_DEFAULTS = {
    # Nothing is sent anywhere; a closed network would cost seconds at each start.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # The writer retries on its own; a long retry inside one call would hide an outage from it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    # The command prints what went wrong; Prefect would print its traceback besides.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    # A run that is silent for four beats is dead (see flows/janitor.py).
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment(local_ray: bool) -> None:
    """Set what is not set; call before prefect, mlflow and ray are imported.

    `local_ray`: Ray will be started by this process, and then listens on loopback alone.
    """
    if local_ray:
        # Ray has no other switch for it: 127.0.0.1 as an argument is replaced by the host's address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Each actor has an environment of its own, for which Ray starts a process; those started ahead stay idle.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    elif has_ray_token():
        # Token authentication is on in a cluster by default, but has to be asked for where the address is explicit.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def has_ray_token() -> bool:
    """Whether this user or environment has a token of Ray clusters."""
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def embedded_prefect(runs_dir: Path) -> EmbeddedPrefectServer | None:
    """Start a Prefect server for this process unless the environment or the active profile names one.

    Call before prefect is imported; the server comes up in the background. `ConfigError` for a folder that cannot be.
    """
    if prefect_api_url() is not None:
        return None
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"runs_dir = {runs_dir}: {error}; allowed: a folder that can be written"]) from error
    database = f"sqlite+aiosqlite:///{(runs_dir / 'prefect.db').resolve()}"
    os.environ.setdefault("PREFECT_SERVER_DATABASE_CONNECTION_URL", database)
    server = EmbeddedPrefectServer(runs_dir / "prefect.log")
    os.environ["PREFECT_API_URL"] = server.url
    return server


def prefect_api_url() -> str | None:
    """The Prefect server that the environment or the active profile names; None means an embedded one."""
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


def tracking_uri(configured: str | None, runs_dir: Path) -> str:
    """Where MLflow keeps runs: the configured URI, MLFLOW_TRACKING_URI, else one SQLite file for the checkout."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(runs_dir / 'mlflow.db').resolve()}"
