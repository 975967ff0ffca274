"""What the flow `evaluate` does: engines for a checkpoint, accuracy, and its point in MLflow."""

from __future__ import annotations

import time
from pathlib import Path

from flows.environment import tracking_uri
from flows.evaluation_plan import Evaluation
from flows.session import RunActors, await_actors, storage_target
from infra.journal import Entry
from infra.mlflow_run import TrackedRun
from infra.ray_cluster import ray_cluster
from infra.run_actors import actor_prefix
from tasks.bootstrap import build_engines, prompt_rows
from tasks.calls import Engines
from tasks.data.grading import Grader
from tasks.data.loading import load_dataset
from tasks.data.tokens import TextCodec
from tasks.engines.plan import rollout_linears
from tasks.evaluate import evaluate
from tasks.stacks import StackDumps
from tasks.sync import sync


def run_evaluation(evaluation: Evaluation, flow_run_id: str, run_count: int) -> float:
    """Share of the eval prompts solved, greedy, at the checkpoint's weights."""
    config, manifest = evaluation.config, evaluation.manifest
    model_dir = manifest.meta["model_dir"]
    dataset, codec = load_dataset(config.data), TextCodec(Path(model_dir))
    linears = rollout_linears(config, Path(model_dir))
    with (
        ray_cluster(config.cluster, namespace=f"fp8-grpo-evaluate-{flow_run_id}"),
        Grader(dataset.grader, config.data.answer_time_limit_s) as grader,
    ):
        actors = RunActors(config, actor_prefix(flow_run_id, run_count))
        rollout, (trainer, *followers) = actors.rollout(), actors.trainer()
        shared = actors.placement.share_gpu
        stacks = StackDumps(Path(config.runs_dir).resolve() / manifest.run, config.cluster)
        engines = Engines(rollout, trainer, config.deadlines, None, followers, share_gpu=shared, stacks=stacks)
        await_actors(rollout, engines, config)
        build_engines(engines, config, config.recipe, model_dir)
        ref = trainer.restore.remote(storage_target(config), manifest.run, manifest.step)
        engines.answer("restore", "trainer", ref, engines.clock("restore_s"))
        if evaluation.calibrates:
            examples = dataset.batch(config.seed, 0, min(config.recipe.calibration.max_sequences, len(dataset.train)))
            ref = trainer.calibrate.remote(prompt_rows(examples, codec))
            engines.answer("calibrate", "trainer", ref, engines.clock("calibrate_s"))
        sync(engines, config.recipe, linears, config.cluster)
        length = config.rollout.max_new_tokens
        found = evaluate(engines, dataset.eval, codec, grader, manifest.step, length, evaluation.metric)
    accuracy: float = found["metrics"][evaluation.metric]
    return accuracy


def record_accuracy(evaluation: Evaluation, accuracy: float) -> str:
    """Log to the MLflow run that the checkpoint belongs to, once for each step; says in words what happened."""
    config, manifest = evaluation.config, evaluation.manifest
    run_id = manifest.meta["mlflow_run_id"]
    run = None if run_id is None else TrackedRun.existing(_uri(evaluation), run_id)
    if run is None:
        return f"not in MLflow: {config.tracking.experiment} has no run {run_id}"
    values = {evaluation.metric: accuracy}
    stored = run.log_entry(Entry(1, "eval", manifest.step, values, int(time.time() * 1000)))
    return f"in MLflow run {run_id}" if stored else f"MLflow run {run_id} has a value of this step, which stays"


def _uri(evaluation: Evaluation) -> str:
    return tracking_uri(evaluation.config.tracking.uri, Path(evaluation.config.runs_dir))
