"""A Ray cluster for the length of a run: a local one on loopback, or an existing one that is only joined."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from conf.schema import Cluster
from conf.schema.base import counted
from infra.device import Node
from infra.reachable import check_reachable
from infra.worker_python import problem_here, problem_on_nodes


class ClusterError(RuntimeError):
    """Ray could not be started or joined, or an actor could not be placed in time."""


@contextmanager
def ray_cluster(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Start or join Ray; at the end stop what was started, and only disconnect from what was joined."""
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already; one run has one connection")
    _check_reachable(cluster)
    if cluster.kind == "local":
        _refuse(problem_here(cluster))
    try:
        ray.init(**_arguments(cluster, namespace))
    except Exception as error:  # Ray raises bare Exception for a node that does not come up in time.
        raise ClusterError(f"cluster.kind={cluster.kind}: could not connect to {_where(cluster)}: {error}") from error
    try:
        if cluster.kind == "existing":
            _refuse(problem_on_nodes(cluster))
        yield
    finally:
        ray.shutdown()


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ClusterError(problem)


def _check_reachable(cluster: Cluster) -> None:
    if cluster.address is None:
        return
    try:
        check_reachable(cluster.address)
    except OSError as error:
        raise ClusterError(f"cluster.address={cluster.address}: could not connect: {error}") from error


def _where(cluster: Cluster) -> str:
    if cluster.kind == "local":
        return f"a local Ray with {counted(cluster.num_cpus, 'CPU slot')}"
    # Ray's error is the same for a missing token, a wrong one and a head that does not answer.
    token = "with" if os.environ.get("RAY_AUTH_MODE") == "token" else "without"
    return f"{cluster.address} {token} a token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"


def _arguments(cluster: Cluster, namespace: str) -> dict[str, Any]:
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "error"}
    if cluster.kind == "existing":
        return common | {"address": cluster.address}
    # A local Ray is private to the run: an address in the environment must not turn it into a join.
    return common | {
        "address": "local",
        "num_cpus": cluster.num_cpus,
        "include_dashboard": False,
        "object_store_memory": cluster.object_store_mb * 2**20,
    }


def cluster_nodes() -> tuple[Node, ...]:
    """The machines of the cluster that are alive."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return tuple(Node(float(held.get("CPU", 0.0)), float(held.get("GPU", 0.0))) for held in found)


def gpu_names() -> str:
    """Kinds of GPU in the cluster, as Ray names them (`H200`); the driver itself need not have one."""
    mark = "accelerator_type:"
    kinds = {name.removeprefix(mark) for name in ray.cluster_resources() if name.startswith(mark)}
    return ", ".join(sorted(kinds)) or "GPU of unknown kind"


def spawn(
    actor_class: type,
    name: str,
    threads: int,
    cluster: Cluster,
    gpus: float = 0.0,
    variables: Mapping[str, str] | None = None,
) -> ActorHandle:
    """Start an actor under a name that must be new: a leftover of another run is never adopted.

    The actor dies with the driver. `threads` bounds its CPU threads; `gpus` are reserved for it, and it sees no
    others. `variables`: of its environment. It runs under `cluster.worker_python`, where that is set. It is not ready
    yet: see `await_ready`.
    """
    environment: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": str(threads), **(variables or {})}}
    if cluster.worker_python is not None:
        environment["py_executable"] = cluster.worker_python
    options = {
        "name": name,
        "max_restarts": 0,
        # A local Ray serves this run alone, and its engines take turns.
        "num_cpus": threads if cluster.kind == "existing" else 0,
        "num_gpus": gpus,
        "runtime_env": environment,
    }
    handle: ActorHandle = ray.remote(actor_class).options(**options).remote()
    return handle


def await_ready(handles: dict[str, ActorHandle], cluster: Cluster) -> None:
    """Wait until every actor answers `ping`; `ClusterError` names those later than `cluster.startup_timeout_s`."""
    refs = {handle.ping.remote(): role for role, handle in handles.items()}
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=cluster.startup_timeout_s)
    if late:
        roles = ", ".join(sorted(refs[ref] for ref in late))
        free = ray.available_resources()
        raise ClusterError(
            f"not ready within cluster.startup_timeout_s={cluster.startup_timeout_s}: {roles}; "
            f"the cluster has {counted(free.get('CPU', 0), 'free CPU slot')} and "
            f"{counted(free.get('GPU', 0), 'free GPU')}"
        )
    for ref in done:
        try:
            ray.get(ref, timeout=cluster.startup_timeout_s)
        except RayError as error:
            # It died, or its environment or the object store could not be set up.
            raise ClusterError(f"the {refs[ref]} actor died while it started: {error}") from error
