"""The Python of the engines' actors, where it is not the driver's: found on every machine and fit for the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conf.schema import Cluster

_PROBE: Final = (
    "import importlib.metadata, json, sys\n"
    "try:\n"
    "    ray = importlib.metadata.version('ray')\n"
    "except importlib.metadata.PackageNotFoundError:\n"
    "    ray = None\n"
    "print(json.dumps({'python': '%d.%d' % sys.version_info[:2], 'ray': ray}))\n"
)
"""Runs under the other Python, so that it imports nothing of this project."""

R = TypeVar("R")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def problem_here(cluster: Cluster) -> str | None:
    """Why `cluster.worker_python` cannot serve on this machine; None where it can, or is not set."""
    return None if cluster.worker_python is None else _problem(cluster, "this machine", subprocess.run)


def problem_on_nodes(cluster: Cluster) -> str | None:
    """As `problem_here`, for each machine of the joined Ray that has CPU slots or GPUs to give."""
    if cluster.worker_python is None:
        return None
    for node in ray.nodes():
        held = node["Resources"]
        if not node["Alive"] or not (held.get("CPU") or held.get("GPU")):
            continue
        run = on_node(node["NodeID"], subprocess.run, cluster.startup_timeout_s)
        found = _problem(cluster, f"node {node['NodeManagerAddress']}", run)
        if found is not None:
            return found
    return None


def on_node(node_id: str, function: Callable[..., R], timeout_s: float, python: str | None = None) -> Callable[..., R]:
    """`function` as a Ray task on that node, under `python` (an executable) or the node's own.

    Ray finds a function of the standard library in any environment, one of this project where the project is.
    """
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    environment = None if python is None else {"py_executable": python}
    task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, runtime_env=environment)

    def call(*arguments: Any, **options: Any) -> R:
        answer: R = ray.get(task.remote(*arguments, **options), timeout=timeout_s)
        return answer

    return call


def _problem(cluster: Cluster, where: str, run: Run) -> str | None:
    python = str(cluster.worker_python)
    key = f"cluster.worker_python={python} on {where}"
    try:
        done = run([python, "-c", _PROBE], capture_output=True, text=True, timeout=cluster.startup_timeout_s)
    except (OSError, subprocess.SubprocessError, RayError) as error:
        # Ray's own text is the traceback of its worker; its last line says what happened.
        return f"{key}: could not be run: {str(error).strip().splitlines()[-1]}"
    try:
        found = json.loads(done.stdout)
        version, its_ray = found["python"], found["ray"]
    except (ValueError, TypeError, KeyError):
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        return f"{key}: is not a Python that works (exit {done.returncode}, it said: {said})"
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != ours:
        return f"{key}: is Python {version}; allowed: {ours}, the driver's, since Ray pickles between the two"
    if its_ray != ray.__version__:
        has = "has no Ray" if its_ray is None else f"has Ray {its_ray}"
        return f"{key}: {has}; allowed: {ray.__version__}, the driver's"
    return None
