"""Everything a run holds open: folder, journal, MLflow writer, Ray, engines, data. Closed in reverse order."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import yaml
from ray.actor import ActorHandle

from conf.compose import flatten, resolved
from conf.schema import RunConfig
from flows.console import Console
from flows.environment import tracking_uri
from flows.failures import is_interrupt
from flows.identity import RunIdentity, identify
from flows.placement import placement, shortage
from flows.record import Record
from flows.top_tokens import TOP_TOKENS, TopTokens
from infra.journal import Journal
from infra.mlflow_writer import MlflowWriter
from infra.provenance import git_commit
from infra.ray_cluster import ClusterError, await_ready, cluster_nodes, ray_cluster, spawn
from infra.store import CheckpointStore
from infra.store_files import absolute_url
from tasks.actors import RolloutActor, TrainerActor
from tasks.calls import Engines
from tasks.data.examples import Dataset
from tasks.data.grading import Grader
from tasks.data.loading import load_dataset
from tasks.followers import FollowerActor

_MLFLOW_START_S = 30.0


class Session:
    """One run's open resources. A plain class on purpose: Prefect walks through dataclasses it is handed."""

    def __init__(
        self,
        config: RunConfig,
        identity: RunIdentity,
        folder: Path,
        record: Record,
        engines: Engines,
        dataset: Dataset,
        grader: Grader,
        console: Console,
    ) -> None:
        self.config = config
        self.identity = identity
        self.folder = folder
        self.record = record
        self.engines = engines
        self.dataset = dataset
        self.grader = grader
        self.console = console
        self.start_step = identity.start_step
        self.top_tokens = TopTokens(folder / TOP_TOKENS)

    @property
    def storage_target(self) -> tuple[str, dict[str, Any]]:
        return storage_target(self.config)

    def mlflow_run_id(self) -> str | None:
        """Id of the MLflow run, None while its store cannot be reached."""
        return self.record.writer.run_id


def storage_target(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Storage url and options that hold in every process: a local path is made absolute."""
    return absolute_url(config.storage.url), dict(config.storage.options)


def find_run(config: RunConfig) -> RunIdentity:
    """Check that the store answers, and decide which run this is."""
    store = CheckpointStore(*storage_target(config))
    store.check()
    return identify(config, store)


@contextmanager
def open_session(
    config: RunConfig, identity: RunIdentity, flow_run_id: str, run_count: int, console: Console
) -> Iterator[Session]:
    """Open all resources of a run. MLflow's status follows how the block ends."""
    folder = Path(config.runs_dir).resolve() / identity.name
    if identity.manifest is None:
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved(config), sort_keys=False))
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        journal = stack.enter_context(Journal(folder / "journal.jsonl"))
        journal.claim()
        _take_over_records(config, identity, journal)
        loading = pool.submit(load_dataset, config.data)
        stack.enter_context(ray_cluster(config.cluster, namespace=f"fp8-grpo-{identity.name}"))
        actors = RunActors(config, f"fp8-grpo-{flow_run_id}-{run_count}")
        rollout, (trainer, *followers) = actors.rollout(), actors.trainer()
        engines = Engines(rollout, trainer, actors.replace_rollout, followers)
        dataset = loading.result()
        grader = stack.enter_context(Grader(dataset.grader, config.data.answer_time_limit_s))
        writer = _writer(config, identity, folder, journal, flow_run_id)
        stack.enter_context(_closing(writer, config, console))
        writer.add_artifact(folder / "config.yaml")
        _await_actors(engines, config)
        yield Session(config, identity, folder, Record(journal, writer), engines, dataset, grader, console)


def _set_aside(folder: Path) -> None:
    """Move what an attempt left that died before its first checkpoint; a live one is a `JournalError`."""
    if not folder.exists():
        return
    with Journal(folder / "journal.jsonl") as journal:
        journal.claim()
        folder.rename(folder.with_name(f"{folder.name}.abandoned-{secrets.token_hex(3)}"))


def _take_over_records(config: RunConfig, identity: RunIdentity, journal: Journal) -> None:
    """Where the local journal lacks steps of the checkpoint, complete it from the copy that travelled with it.

    The file of top tokens comes along.
    """
    if identity.manifest is None or (len(journal) and _knows(journal, identity.start_step)):
        return
    with TemporaryDirectory(prefix="fp8-grpo-journal-") as folder:
        target = Path(folder) / "checkpoint"
        CheckpointStore(*storage_target(config)).fetch(identity.manifest, target)
        journal.import_copy(target / "journal.jsonl")
        if (target / TOP_TOKENS).exists():
            shutil.copyfile(target / TOP_TOKENS, journal.path.with_name(TOP_TOKENS))


def _knows(journal: Journal, step: int) -> bool:
    return step == 0 or journal.find("step", step) is not None


class RunActors:
    """Starts the actors of a run, each under a name that no other has had, on the cluster that was joined.

    `ClusterError` where all of it together could not hold them.
    """

    def __init__(self, config: RunConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._rollouts = 0
        nodes = cluster_nodes()
        self._placement = placement(config, sum(node.gpus for node in nodes))
        lack = shortage(self._placement, nodes, "the cluster")
        if lack is not None:
            raise ClusterError(f"cluster.kind={config.cluster.kind}: {lack}")

    def trainer(self) -> tuple[ActorHandle, ...]:
        """The trainer's ranks, of which rank 0 leads."""
        config, gpus = self._config, self._placement.trainer_gpus
        names = [f"{self._name}-trainer"]
        if config.trainer.ranks > 1:
            # Ray's own messages say the name of an actor that died.
            names = [f"{self._name}-trainer-rank-{rank}" for rank in range(config.trainer.ranks)]
        return tuple(
            spawn(FollowerActor if rank else TrainerActor, name, config.trainer.threads, config.cluster, gpus)
            for rank, name in enumerate(names)
        )

    def rollout(self) -> ActorHandle:
        config = self._config
        self._rollouts += 1
        name = f"{self._name}-rollout-{self._rollouts}"
        return spawn(RolloutActor, name, config.rollout.threads, config.cluster, self._placement.rollout_gpus)

    def replace_rollout(self, old: ActorHandle) -> ActorHandle:
        """A new process for the rollout engine, after the end of the old one and of what it held."""
        ray.kill(old)
        new = self.rollout()
        await_ready({"rollout": new}, self._config.cluster)
        return new


def _await_actors(engines: Engines, config: RunConfig) -> None:
    ranks = {f"trainer rank {rank}": follower for rank, follower in enumerate(engines.followers, 1)}
    leader = "trainer rank 0" if ranks else "trainer"
    await_ready({"rollout": engines.rollout, leader: engines.trainer} | ranks, config.cluster)


def _writer(config: RunConfig, identity: RunIdentity, folder: Path, journal: Journal, flow_run_id: str) -> MlflowWriter:
    known = None if identity.manifest is None else identity.manifest.meta["mlflow_run_id"]
    tags = {
        "recipe": config.recipe.name,
        "algorithm": config.algorithm.name,
        "correction": config.correction.name,
        "engine.rollout": config.rollout.engine,
        "engine.trainer": config.trainer.engine,
        "model": config.model.name,
        "seed": str(config.seed),
        "flow_run_id": flow_run_id,
        "git_commit": git_commit(Path(__file__).parent),
    }
    return MlflowWriter(
        tracking_uri=tracking_uri(config.tracking.uri, Path(config.runs_dir)),
        experiment=config.tracking.experiment,
        journal=journal,
        cursor_path=folder / "mlflow.cursor.json",
        run_id=known,
        run_name=identity.name,
        params=flatten(config),
        tags=tags,
        patience_s=config.tracking.outage_patience_s,
    )


@contextmanager
def _closing(writer: MlflowWriter, config: RunConfig, console: Console) -> Iterator[None]:
    writer.start()
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except BaseException as error:
        if is_interrupt(error):
            status = "KILLED"
            raise KeyboardInterrupt from error
        raise
    finally:
        report = writer.close(status, timeout_s=config.tracking.outage_patience_s + _MLFLOW_START_S)  # type: ignore[arg-type]
        if report.pending or report.error:
            console.say(
                f"MLflow: {report.pending} entries are not stored yet ({report.error}); they are in the journal, and "
                f"resume brings them"
            )
