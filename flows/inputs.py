"""Everything about a run's inputs that can be refused before Ray, Prefect or an engine starts."""

from __future__ import annotations

from conf.preflight import preflight
from conf.problems import ConfigError
from conf.schema import JsonlData, RunConfig
from tasks.data.examples import DataError
from tasks.data.loading import load_dataset
from tasks.engines.plan import RunPlan, plan_run
from tasks.engines.protocols import EngineError


def check_inputs(config: RunConfig) -> RunPlan:
    """Files, tasks, rows, and whether the recipe fits the model; `ConfigError` with all that is wrong.

    Returns the plan that was worked out on the way.
    """
    preflight(config)
    problems: list[str] = []
    plan = None
    try:
        plan = plan_run(config)
    except EngineError as error:
        problems.append(str(error))
    if isinstance(config.data, JsonlData):
        # Rows are cheap to read; a procedural task is generated once, when the run starts.
        try:
            load_dataset(config.data)
        except DataError as error:
            problems.append(str(error))
    if problems or plan is None:
        raise ConfigError(problems)
    return plan
