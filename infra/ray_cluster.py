"""A Ray cluster for the length of a run: a local one on loopback, or an existing one that is only joined."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from conf.schema import Cluster
from infra.device import Node

_CONNECT_S = 5.0


class ClusterError(RuntimeError):
    """Ray could not be started or joined, or an actor could not be placed in time."""


@contextmanager
def ray_cluster(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Start or join Ray; at the end stop what was started, and only disconnect from what was joined."""
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already; one run has one connection")
    _check_reachable(cluster)
    try:
        ray.init(**_arguments(cluster, namespace))
    except Exception as error:  # Ray raises bare Exception for a node that does not come up in time.
        where = cluster.address if cluster.kind == "existing" else f"a local Ray with {cluster.num_cpus} CPU slots"
        raise ClusterError(f"cluster.kind={cluster.kind}: could not connect to {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(cluster: Cluster) -> None:
    """Ray waits without end for an address where nobody listens; a plain connection tells at once."""
    if cluster.address is None or cluster.address == "auto":
        return
    host, _, port = cluster.address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"cluster.address={cluster.address}: could not connect: {error}") from error


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


def spawn(actor_class: type, name: str, threads: int, cluster: Cluster, gpus: float = 0.0) -> ActorHandle:
    """Start an actor under a name that must be new: a leftover of another run is never adopted.

    The actor dies with the driver. `threads` bounds its CPU threads; `gpus` are reserved for it, and it sees no
    others. It is not ready yet: see `await_ready`.
    """
    options = {
        "name": name,
        "max_restarts": 0,
        # A local Ray serves this run alone, and its engines take turns.
        "num_cpus": threads if cluster.kind == "existing" else 0,
        "num_gpus": gpus,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
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
            f"the cluster has {free.get('CPU', 0):g} free CPU slots and {free.get('GPU', 0):g} free GPUs"
        )
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            # It died, or its environment or the object store could not be set up.
            raise ClusterError(f"the {refs[ref]} actor died while it started: {error}") from error
