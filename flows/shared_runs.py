"""The process in which runs of a sweep follow each other: one Ray, and rollout engines that are kept between runs.

`main` has the descriptor of a socket to the sweep's process (`flows.sweep_shared`): a `Setup` comes first, then one
`Request` for each run, which is answered with its exit code. The process ends when the other end is closed, and with
whatever is no typed failure of a run.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from conf.compose import compose
from conf.problems import ConfigError
from flows.environment import prepare_environment
from flows.exits import CONFIG_ERROR, INTERRUPTED, OK, UNFINISHED

if TYPE_CHECKING:
    from flows.session import KeptEngines


@dataclass(frozen=True)
class Setup:
    """What all runs share. `cluster`: overrides of it; `name`: how the names of kept actors begin; `most` are kept."""

    cluster: tuple[str, ...]
    name: str
    most: int


@dataclass(frozen=True)
class Request:
    """A run to be: its name, its overrides, the file that takes its output, and when it was asked for (epoch)."""

    name: str
    overrides: tuple[str, ...]
    log: str
    sent: float


def main(descriptor: int) -> int:
    """Serve until the other end closes."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        _serve(connection, connection.recv())
    except (EOFError, BrokenPipeError):
        # Nobody waits for an answer any more.
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _serve(connection: Connection, setup: Setup) -> None:
    config = compose(setup.cluster)
    prepare_environment(local_ray=config.cluster.kind == "local")
    # Imported here: prefect, ray and mlflow read their settings from the environment on import.
    from flows.session import KeptEngines
    from infra.ray_cluster import ray_cluster

    with _closing_undisturbed(), ray_cluster(config.cluster, namespace=setup.name):
        kept = KeptEngines(setup.name, setup.most, shared=True)
        while True:
            request: Request = connection.recv()
            with _output_to(Path(request.log)):
                code = _run(request, kept)
            connection.send(code)


def _run(request: Request, kept: KeptEngines) -> int:
    """Exit code of a run; what is no typed failure is raised, and ends the process."""
    from flows.failures import RUN_FAILURES, run_failed
    from flows.inputs import check_inputs
    from flows.train import run_in_flow

    try:
        # As the command does it: what is refused becomes no flow run.
        check_inputs(compose(request.overrides))
        result = run_in_flow(request.name, request.overrides, kept, request.sent)
    except ConfigError as error:
        print(f"fp8-grpo: {error}", file=sys.stderr)
        return CONFIG_ERROR
    except RUN_FAILURES as error:
        return run_failed(error)
    except Exception:
        # To the run's own output; then the process ends, and the next run gets a fresh one.
        traceback.print_exc()
        raise
    return UNFINISHED if "stopped_after" in result else OK


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """All that this process and those it starts print goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = [(stream, os.dup(stream.fileno())) for stream in (sys.stdout, sys.stderr)]
    with log.open("ab") as out:
        for stream, _ in before:
            stream.flush()
            os.dup2(out.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, held in before:
            stream.flush()
            os.dup2(held, stream.fileno())
            os.close(held)


@contextmanager
def _closing_undisturbed() -> Iterator[None]:
    """An interrupt comes from the terminal and again from the sweep: the second must not disturb the clean-up."""
    interrupted = False

    def once(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
