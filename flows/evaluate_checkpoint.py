"""The flow `evaluate`: accuracy of a run's checkpoint on the eval prompts, under its own recipe or another."""

# Annotations are evaluated here and now: Prefect runs a served flow where their names would not be found.
from collections.abc import Sequence
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from pydantic import Field

from flows.console import Console, outlive_readers
from flows.environment import prepare_environment
from flows.evaluation_plan import plan_evaluation
from flows.form import EvaluationRecipe, Override, RunField
from flows.hooks import FREEING


@flow(name="evaluate", persist_result=False, validate_parameters=True, **FREEING)
def evaluate(
    run: RunField,
    step: Annotated[int | None, Field(ge=0)] = None,
    recipe: EvaluationRecipe = "own",
    overrides: Sequence[Override] = (),
) -> dict[str, Any]:
    """Share of the eval prompts that a checkpoint solves, greedy; logged to the MLflow run that it belongs to.

    Args:
        run: Name of the run, as its folder and its checkpoints have it.
        step: Step of the checkpoint; empty takes the newest complete one.
        recipe: Precision of the rollout engine: the run's own, or another recipe's.
        overrides: Where the run's store is (`storage.url=...`), the cluster, or keys that differ from the run's.
    """
    found = plan_evaluation(run, step, recipe, overrides)
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    outlive_readers()
    prepare_environment(local_ray=found.config.cluster.kind == "local")
    # Imported here: ray and mlflow read their settings from the environment on import.
    from flows.evaluation import record_accuracy, run_evaluation

    accuracy = run_evaluation(found, str(context.flow_run.id), context.flow_run.run_count)
    logged = record_accuracy(found, accuracy)
    done = found.manifest
    text = f"run {run}, step {done.step}, {found.config.recipe.name}: {found.metric} {accuracy:.3f} ({logged})"
    Console().say(text)
    create_markdown_artifact(text, key="evaluation", description=f"{run}, step {done.step}")
    return {"run": run, "step": done.step, "recipe": found.config.recipe.name, "metric": found.metric} | {
        "accuracy": accuracy
    }
