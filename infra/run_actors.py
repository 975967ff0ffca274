"""The actors and processes of a flow run: how they are found again, and ended, when the run's own process cannot.

Actors carry the id of their flow run in their name. On a local Ray they, and all else that a deployed run started,
carry it in their environment, where Prefect's worker put it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from infra.reachable import check_reachable

_NAME = re.compile(r"fp8-grpo-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-")
_ROLE = re.compile(r"(?:^|-)(?P<role>trainer(?:-rank-(?P<rank>\d+))?|rollout(?:-\d+)?)$")
_VARIABLE = "PREFECT__FLOW_RUN_ID"
_TIMEOUT_S = 90.0


class FreeingError(RuntimeError):
    """The actors of a cluster could not be listed or ended."""


def actor_prefix(flow_run_id: str, run_count: int) -> str:
    """Begin of the names of all actors that one attempt of a flow run starts."""
    return f"fp8-grpo-{flow_run_id}-{run_count}"


def role_of(actor: str) -> str | None:
    """What an actor of a run is, by the end of its name; None for another.

    `trainer rank 0`, `the trainer` where it has no ranks, `the rollout engine`.
    """
    found = _ROLE.search(actor)
    if found is None:
        return None
    if found["rank"] is not None:
        return f"trainer rank {found['rank']}"
    return "the trainer" if found["role"] == "trainer" else "the rollout engine"


def flow_run_of(actor: str) -> str | None:
    """The flow run that an actor's name says it is of; None for an actor that is not ours."""
    found = _NAME.match(actor)
    return None if found is None else found.group(1)


def actors_of(address: str) -> dict[str, list[str]]:
    """Names of our actors that live on the cluster at `address`, by flow run; `FreeingError` where none answers."""
    found: dict[str, list[str]] = {}
    for name in _in_another_process(address, ()):
        run = flow_run_of(name)
        if run is not None:
            found.setdefault(run, []).append(name)
    return found


def kill_actors(address: str, flow_run_ids: Collection[str]) -> list[str]:
    """End the actors of these flow runs on the cluster at `address`; returns their names, none if they are gone.

    `FreeingError` where the cluster does not answer.
    """
    return _in_another_process(address, flow_run_ids) if flow_run_ids else []


def kill_processes(flow_run_id: str) -> list[int]:
    """End what a deployed flow run left running on this machine (Linux); returns process ids.

    A run never ends itself: called within the run this does nothing, and its parents are spared.
    """
    if os.environ.get(_VARIABLE) == flow_run_id:
        return []
    ended = []
    for pid in processes_of(flow_run_id):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        ended.append(pid)
    return ended


def processes_of(flow_run_id: str) -> Iterator[int]:
    """Processes of this machine and user that a deployed flow run started, its own among them (Linux)."""
    wanted = f"{_VARIABLE}={flow_run_id}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            # Gone meanwhile, or another user's.
            continue
        if wanted in variables:
            yield int(entry.name)


def _in_another_process(address: str, flow_run_ids: Collection[str]) -> list[str]:
    """Ray holds one connection a process, and waits without end for a cluster that is gone."""
    try:
        check_reachable(address)
    except OSError as error:
        raise FreeingError(f"Ray at {address}: {error}") from error
    command = [sys.executable, "-m", "infra.run_actors", address, *sorted(flow_run_ids)]
    root = str(Path(__file__).resolve().parents[1])
    # Without the run's id: what frees a run must not look like a part of it.
    environment = {k: v for k, v in os.environ.items() if k != _VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FreeingError(f"Ray at {address}: no answer within {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise FreeingError(f"Ray at {address}: {last}")
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _free(address: str, flow_run_ids: Collection[str]) -> list[str]:
    """In a process of its own: names of our actors, or, with ids, end those and return theirs."""
    import ray

    ray.init(address=address, namespace="fp8-grpo-freeing", log_to_driver=False, logging_level="error")
    try:
        names = []
        for found in ray.util.list_named_actors(all_namespaces=True):
            run = flow_run_of(found["name"])
            if run is None or (flow_run_ids and run not in flow_run_ids):
                continue
            names.append(found["name"])
            if flow_run_ids:
                try:
                    ray.kill(ray.get_actor(found["name"], found["namespace"]), no_restart=True)
                except ValueError:
                    # It ended meanwhile.
                    names.pop()
        return sorted(names)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    print(json.dumps(_free(sys.argv[1], sys.argv[2:])))
