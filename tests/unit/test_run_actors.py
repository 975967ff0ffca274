"""How actors and processes of a flow run are found again."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import uuid4

import pytest

from flows.hooks import cluster_address
from infra.run_actors import FreeingError, actor_prefix, actors_of, flow_run_of, kill_processes, processes_of


def test_an_actors_name_says_its_flow_run() -> None:
    run = str(uuid4())
    assert flow_run_of(f"{actor_prefix(run, 2)}-trainer-rank-1") == run
    for name in ("fp8-grpo-trainer", f"other-{run}-1-trainer", f"x-{actor_prefix(run, 1)}-trainer", run):
        assert flow_run_of(name) is None


def test_processes_end_by_the_run_in_their_environment() -> None:
    mine, others = str(uuid4()), str(uuid4())
    started = {
        run: subprocess.Popen(["sleep", "60"], env=os.environ | {"PREFECT__FLOW_RUN_ID": run}) for run in (mine, others)
    }
    try:
        assert list(processes_of(mine)) == [started[mine].pid]
        assert kill_processes(mine) == [started[mine].pid]
        assert started[mine].wait(10) == -9 and started[others].poll() is None
        assert kill_processes(mine) == []
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_run_does_not_end_itself() -> None:
    run = str(uuid4())
    text = f"from infra.run_actors import kill_processes; print(kill_processes({run!r}))"
    environment = os.environ | {"PREFECT__FLOW_RUN_ID": run}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("parameters", "address"),
    [
        ({}, None),
        ({"overrides": ["steps=3"]}, None),
        ({"overrides": ["cluster=existing", "cluster.address=10.0.0.1:6379"]}, "10.0.0.1:6379"),
        ({"overrides": ["cluster=existing", "cluster.address=10.0.0.1:6379", "stepz=3"]}, "10.0.0.1:6379"),
        ({"overrides": ["cluster=existing"]}, None),
        ({"overrides": "cluster=existing"}, None),
        ({"overrides": None}, None),
    ],
)
def test_the_cluster_of_a_run(parameters: dict[str, object], address: str | None) -> None:
    assert cluster_address(parameters) == address


def test_a_cluster_that_is_gone_is_an_error_in_words() -> None:
    with pytest.raises(FreeingError, match=r"Ray at 127\.0\.0\.1:1: "):
        actors_of("127.0.0.1:1")
