"""What of a run may be cancelled, and what an interrupt means then; the whole way is in test_sweep_deployment_slow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal

from flows.cancellation import Cancellation
from flows.failures import mlflow_status
from flows.hooks import cluster_address, tracking_place


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def _run(deployment: bool = False) -> FlowRun:
    return FlowRun(flow_id=uuid4(), deployment_id=uuid4() if deployment else None)


def test_an_ignored_ctrl_c_stays_ignored_until_a_cancel_asks(handler: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cancellation = Cancellation(_run())
    with cancellation.heeded():
        os.kill(os.getpid(), signal.SIGINT)
        cancellation._asked = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(5)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_of_ones_own_is_left_in_place(handler: None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Cancellation(_run()).heeded():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("deployment", [True, False])
def test_runs_of_workers_and_other_threads_are_not_watched(deployment: bool, handler: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seen = []

    def look() -> None:
        with Cancellation(_run(deployment)).heeded():
            seen.append(signal.getsignal(signal.SIGINT))

    if deployment:
        look()
    else:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [signal.SIG_IGN]


def test_the_status_of_what_a_signal_ends() -> None:
    assert mlflow_status(SystemExit(143)) == "KILLED"
    assert mlflow_status(TerminationSignal(signal=signal.SIGTERM)) == "KILLED"
    assert mlflow_status(KeyboardInterrupt()) == "KILLED"
    assert mlflow_status(ValueError()) == "FAILED"


def test_cluster_and_store_of_a_run_do_not_lean_on_its_other_keys() -> None:
    overrides = ["model=local", "model.path=/x", "tracking.tags.m=${model.path}", "cluster=existing"]
    overrides += [
        "cluster.address=h:1",
        "tracking.uri=sqlite:////tmp/x.db",
        "tracking.experiment=e",
        "runs_dir=${oc.env:NO_X}",
    ]
    assert cluster_address({"overrides": overrides}) == "h:1"
    assert tracking_place({"overrides": overrides[:-1]}) == ("sqlite:////tmp/x.db", "e")
    assert tracking_place({"overrides": overrides}) is None
    assert cluster_address({"overrides": "cluster=existing"}) is None
