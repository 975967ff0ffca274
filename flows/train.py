"""The flow `fp8-grpo`: GRPO post-training under one precision recipe."""

# Annotations are evaluated here and now: Prefect runs a served flow where their names would not be found.
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.allocation import process_age_s
from flows.cancellation import cancellable
from flows.console import Console, outlive_readers
from flows.environment import prepare_environment
from flows.form import (
    AlgorithmName,
    CorrectionName,
    ModelName,
    Override,
    RecipeName,
    ResumeField,
    Seed,
    Steps,
    form_overrides,
)
from flows.hooks import FREEING
from flows.unfinished import unfinished_state

if TYPE_CHECKING:
    from flows.session import KeptEngines


@flow(name="fp8-grpo", persist_result=False, validate_parameters=True, **FREEING)
def fp8_grpo(
    recipe: RecipeName = "fp8_e2e_kv",
    algorithm: AlgorithmName = "grpo",
    correction: CorrectionName = "token_truncation",
    model: ModelName = "tiny_qwen3",
    steps: Steps = None,
    seed: Seed = None,
    resume: ResumeField = "never",
    overrides: Sequence[Override] = (),
) -> Any:
    """Train a policy with GRPO; rollout, calibration, scale-sync, training and evaluation are its tasks.

    Args:
        recipe: Precision recipe: what is quantised, where and how (conf/recipe).
        algorithm: Objective and batch (conf/algorithm).
        correction: Importance weights and rejection between rollout and trainer (conf/correction).
        model: The policy (conf/model); `local` needs the override `model.path=FOLDER`.
        steps: Training steps; empty takes the configuration's (20).
        seed: Seed of sampling and data order; empty takes the configuration's (0).
        resume: never (a new run), auto (newest checkpoint of the same configuration), or the name of a run.
        overrides: Any other key, `key=value` or `group=option` (`rollout=vllm`); wins over the key's own field.
    """
    fields = {
        "recipe": recipe,
        "algorithm": algorithm,
        "correction": correction,
        "model": model,
        "steps": steps,
        "seed": seed,
        "resume": resume,
    }
    return _ended(_run(compose(form_overrides(fields, list(overrides))), process_age_s()))


def run_in_flow(name: str, overrides: Sequence[str], kept: "KeptEngines", sent: float) -> dict[str, Any]:
    """A run of a sweep in this process, as a flow run of its own called `name`, with engines that are kept.

    Its allocation counts from `sent` (epoch).
    """

    @flow(name="fp8-grpo", flow_run_name=name, persist_result=False, validate_parameters=True, **FREEING)
    def of_a_sweep(overrides: Sequence[Override]) -> Any:
        return _ended(_run(compose(list(overrides)), time.time() - sent, kept))

    result: dict[str, Any] = of_a_sweep(list(overrides))
    return result


def _ended(result: dict[str, Any]) -> dict[str, Any] | State[dict[str, Any]]:
    """Of a run that its allocation has stopped, the state of that name."""
    if "stopped_after" not in result:
        return result
    return unfinished_state(result, f"stopped after step {result['stopped_after']}; resume={result['run']} goes on")


def _run(config: RunConfig, used: float, kept: "KeptEngines | None" = None) -> dict[str, Any]:
    """What the flow run does that is going on; `used`: of its allocation (seconds)."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    prepare_environment(local_ray=config.cluster.kind == "local")
    # Imported here: ray and mlflow read their settings from the environment on import; and the form needs no torch.
    from flows.inputs import check_inputs, pausing_problems
    from flows.training import run_training

    check_inputs(config)
    deployed = context.flow_run.deployment_id is not None
    if problems := pausing_problems(config, server=True, deployed=deployed):
        raise ConfigError(problems)
    log = None
    if deployed:
        log = get_run_logger().info
        outlive_readers()
    with cancellable(context.flow_run) as cancellation:
        run = (str(context.flow_run.id), context.flow_run.run_count)
        return run_training(config, *run, Console(log=log), cancellation.heeded, kept, used)
