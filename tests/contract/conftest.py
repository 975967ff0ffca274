"""One small model for the session, and a workbench for each engine under contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.engines import RECIPES, ROLLOUT_ENGINES, TRAINER_ENGINES, Workbench, engine_params, make_model


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron on CPU changes its process and bears no vLLM beside it: its tests run where nothing else does."""
    if all("megatron" in item.nodeid for item in items):
        return
    reason = "needs a pytest process of its own: pytest tests/contract -k megatron"
    for item in items:
        if "megatron" in item.nodeid and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("contract-model"))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    """Engines set the thread count of their process, which here is everybody's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=engine_params(ROLLOUT_ENGINES))
def rollouts(request: pytest.FixtureRequest, model_dir: Path) -> Workbench:
    """Each rollout engine in turn, fed by the first trainer engine."""
    return Workbench(request.param, TRAINER_ENGINES[0], model_dir)


@pytest.fixture(scope="session", params=engine_params(TRAINER_ENGINES))
def trainers(request: pytest.FixtureRequest, model_dir: Path) -> Workbench:
    """Each trainer engine in turn, with samples from the first rollout engine."""
    return Workbench(ROLLOUT_ENGINES[0], request.param, model_dir)


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)
