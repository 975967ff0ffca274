"""How a run of a sweep is run: here in a process of its own, or by a deployment."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

from conf.compose import CONFIG_DIR
from flows.exits import OK, UNFINISHED, UNFINISHED_STATE
from flows.form import form_fields
from flows.sweep_plan import Child

_INTERRUPT_S = 60.0
_POLL_S = 2.0
_PR_SET_PDEATHSIG = 1
Process = subprocess.Popen[bytes]
_PROGRAM: Final = "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))"


class ChildError(RuntimeError):
    """A run of a sweep did not complete; the message says how it ended and where to read on."""


class ChildLateError(ChildError):
    """It was not done in time, and was ended."""


def run_here(child: Child, log: Path, timeout_s: float, api_url: str | None) -> bool:
    """Run in a process of its own: one Ray each, and whatever ends it ends no other. Whether it is finished.

    Not finished is a run whose allocation was used up; all else than that is a `ChildError`. An interrupt of this
    process interrupts the child first, which then ends its own engines; on Linux it does not outlive this process
    either.
    """
    process = start_process([_PROGRAM, "train", *child.overrides], log, api_url)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise late(child, timeout_s, log) from error
    finally:
        end_process(process)
    return finished(child, code, log)


def start_process(arguments: Sequence[str], log: Path, api_url: str | None, fd: int | None = None) -> Process:
    """Start a Python program (its text and its arguments) with its output in `log`; `fd` is handed on to it."""
    environment = os.environ | ({"PREFECT_API_URL": api_url} if api_url else {})
    # What Prefect tells a flow's process about its own run is not about the child's.
    environment = {k: v for k, v in environment.items() if not k.startswith("PREFECT__FLOW_")}
    places = [str(CONFIG_DIR.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        return subprocess.Popen(
            [sys.executable, "-c", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(places)},
            pass_fds=() if fd is None else (fd,),
            preexec_fn=_interrupted_with_parent if sys.platform == "linux" else None,
        )


def end_process(process: Process, wait_s: float = 0.0) -> None:
    """Give it so long to end by itself (seconds), then interrupt it, then kill it."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_INTERRUPT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def late(child: Child, timeout_s: float, log: Path) -> ChildLateError:
    return ChildLateError(f"{child.name}: not done within sweep.child_timeout_s={timeout_s:g}; see {log}")


def finished(child: Child, code: int, log: Path) -> bool:
    """What an exit code says: finished, or stopped in time; `ChildError` for all others."""
    if code < 0:
        # What it said last is not why it ended.
        raise ChildError(f"{child.name}: killed by {signal.Signals(-code).name}; see {log}")
    if code not in (OK, UNFINISHED):
        raise ChildError(f"{child.name}: exit code {code}: {last_line(log)}; see {log}")
    return code == OK


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _interrupted_with_parent() -> None:
    # A parent in the background may have SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def submit(child: Child, deployment: str) -> UUID:
    """Create a run of the deployment and return its id; `ChildError` where there is no such deployment."""
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    try:
        run = run_deployment(deployment, parameters=form_fields(child.overrides), flow_run_name=child.name, timeout=0)
    except ObjectNotFound as error:
        raise ChildError(f"{child.name}: sweep.deployment={deployment}: no such deployment") from error
    return UUID(str(run.id))


def await_submitted(child: Child, flow_run_id: UUID, deadline: float) -> bool:
    """Wait for a submitted run until `deadline` (time.monotonic); whether it is finished. `ChildError` if it failed."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        while True:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.is_final():
                break
            if time.monotonic() > deadline:
                client.set_flow_run_state(flow_run_id, Cancelling())
                raise ChildError(f"{child.name}: flow run {flow_run_id} not done in time; it is being cancelled")
            time.sleep(_POLL_S)
    if not state.is_completed():
        raise ChildError(f"{child.name}: flow run {flow_run_id} ended {state.name}: {state.message}")
    return state.name != UNFINISHED_STATE
