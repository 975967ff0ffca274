"""Everything a run holds open: folder, journal, MLflow writer, Ray, engines, data. Closed in reverse order."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import ray
import yaml
from ray.actor import ActorHandle

from conf.compose import flatten, resolved
from conf.schema import RunConfig
from flows.allocation import RunStopped
from flows.breakers import BREAKERS
from flows.console import Console
from flows.environment import tracking_uri
from flows.failures import Reason, is_interrupt, mlflow_status, reason
from flows.identity import RunIdentity, identify
from flows.placement import placement, shortage, trains_on_gpu
from flows.record import Record
from flows.side_records import CALIBRATION_SCALES, EVAL_RESULTS, StepLines
from flows.top_tokens import TOP_TOKENS, TopTokens
from infra.device import device_name
from infra.journal import Journal
from infra.mlflow_writer import MlflowWriter
from infra.provenance import git_commit
from infra.ray_cluster import ClusterError, await_ready, cluster_nodes, gpu_names, ray_cluster, spawn
from infra.run_actors import actor_prefix
from infra.store import CheckpointStore
from infra.store_files import absolute_url
from tasks.actors import RolloutActor, TrainerActor
from tasks.calls import Engines
from tasks.data.examples import Dataset
from tasks.data.grading import Grader
from tasks.data.loading import load_dataset
from tasks.engines.warm_start import GPU_ENVIRONMENT
from tasks.followers import FollowerActor
from tasks.rollout import put_to_sleep
from tasks.rollout_pool import RolloutPool
from tasks.stacks import StackDumps

_MLFLOW_START_S = 30.0
_SIDE_RECORDS = (TOP_TOKENS, EVAL_RESULTS, CALIBRATION_SCALES, BREAKERS)
_NOT_OF_A_RUN = ("sweep.", "tracking.tags.", "allocation_s")
ENDED_BY = "ended_by"
"""Tag of an MLflow run: a `flows.failures.Reason`, `-` while it goes on or where it was killed."""


@dataclass
class Session:
    """One run's open resources."""

    config: RunConfig
    identity: RunIdentity
    folder: Path
    record: Record
    engines: Engines
    dataset: Dataset
    grader: Grader
    console: Console
    flow_run_id: str

    def __post_init__(self) -> None:
        self.start_step = self.identity.start_step
        self.top_tokens = TopTokens(self.folder / TOP_TOKENS)
        self.eval_results = StepLines(self.folder / EVAL_RESULTS)
        self.scales = StepLines(self.folder / CALIBRATION_SCALES)

    @property
    def side_records(self) -> tuple[Path, ...]:
        """Files beside the journal that travel with a checkpoint and go to MLflow at the end; some may not exist."""
        return tuple(self.folder / name for name in _SIDE_RECORDS)

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
    config: RunConfig,
    identity: RunIdentity,
    flow_run_id: str,
    run_count: int,
    console: Console,
    kept: KeptEngines | None = None,
) -> Iterator[Session]:
    """Open all resources of a run. MLflow's status follows how the block ends.

    `kept`: rollout engines that outlive the run, on a Ray that this process has joined or started.
    """
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
        if kept is None:
            stack.enter_context(ray_cluster(config.cluster, namespace=f"fp8-grpo-{identity.name}"))
        stacks = StackDumps(folder, config.cluster)
        actors = RunActors(config, actor_prefix(flow_run_id, run_count), kept, stacks)
        rollout, engines = stack.enter_context(actors.engines())
        dataset = loading.result()
        grader = stack.enter_context(Grader(dataset.grader, config.data.answer_time_limit_s))
        writer = _writer(config, identity, folder, journal, flow_run_id, actors.hardware)
        stack.enter_context(_closing(writer, config, folder, stacks, console))
        writer.add_artifact(folder / "config.yaml")
        await_actors(rollout, engines, config)
        yield Session(config, identity, folder, Record(journal, writer), engines, dataset, grader, console, flow_run_id)


def _set_aside(folder: Path) -> None:
    """Move what an attempt left that died before its first checkpoint; a live one is a `JournalError`."""
    if not folder.exists():
        return
    with Journal(folder / "journal.jsonl") as journal:
        journal.claim()
        folder.rename(folder.with_name(f"{folder.name}.abandoned-{secrets.token_hex(3)}"))


def _take_over_records(config: RunConfig, identity: RunIdentity, journal: Journal) -> None:
    """Where the local journal lacks steps of the checkpoint, complete it from the copy that travelled with it.

    The files beside it come along.
    """
    if identity.manifest is None or (len(journal) and _knows(journal, identity.start_step)):
        return
    with TemporaryDirectory(prefix="fp8-grpo-journal-") as folder:
        target = Path(folder) / "checkpoint"
        CheckpointStore(*storage_target(config)).fetch(identity.manifest, target)
        journal.import_copy(target / "journal.jsonl")
        for name in _SIDE_RECORDS:
            if (target / name).exists():
                shutil.copyfile(target / name, journal.path.with_name(name))


def _knows(journal: Journal, step: int) -> bool:
    return step == 0 or journal.find("step", step) is not None


class KeptEngines:
    """Rollout engines of one run, or of the runs that follow each other in this process and then outlive each.

    `name`: how the names of their actors begin, which no other has had; `most`: engines that are kept at once.
    """

    def __init__(self, name: str, most: int = 1, shared: bool = False) -> None:
        self.pool = RolloutPool(most)
        self.names = (f"{name}-rollout-{number}" for number in count(1))
        self.shared = shared


class RunActors:
    """Starts the actors of a run, each under a name that no other has had, on the cluster that was joined.

    `stacks`: see `Engines`; `placement`: what it asks for. `ClusterError` where all of it together could not hold them.
    """

    def __init__(
        self, config: RunConfig, name: str, kept: KeptEngines | None = None, stacks: StackDumps | None = None
    ) -> None:
        self._config = config
        self._stacks = stacks
        self._name = name
        self._kept = kept or KeptEngines(name)
        nodes = cluster_nodes()
        self.placement = placement(config, sum(node.gpus for node in nodes))
        lack = shortage(self.placement, nodes, "the cluster")
        if lack is not None:
            raise ClusterError(f"cluster.kind={config.cluster.kind}: {lack}")

    @property
    def hardware(self) -> dict[str, str]:
        """What the run holds, as tags: GPUs and their name, or the CPU threads of its engines."""
        threads = self._config.rollout.threads + self.placement.ranks * self._config.trainer.threads
        device = gpu_names() if self.placement.gpus else device_name()
        return {"gpus": str(self.placement.gpus), "device": device, "cpu_threads": str(threads)}

    @contextmanager
    def engines(self) -> Iterator[tuple[ActorHandle | None, Engines]]:
        """Engines of the run, and the process that was started ahead of a rollout engine, if any; none are ready yet.

        Where rollout engines are kept, the trainer's processes end with the run: what Megatron, Transformer Engine and
        CUDA keep for a process is nothing to build a second trainer on. After a failure the run's rollout engines go,
        too.
        """
        pool = self._kept.pool
        ranks: tuple[ActorHandle, ...] = ()
        try:
            rollout = pool.begin(self.rollout)
            ranks = self.trainer()
            trainer, *followers = ranks
            shared = self.placement.share_gpu
            keeps, limits = pool.most > 1, self._config.deadlines
            engines = Engines(rollout, trainer, limits, self._take, followers, keeps, shared, self._stacks)
            yield rollout, engines
            if keeps and pool.kinds and engines.has_rollout:
                # The next run's first engine is built beside this one.
                put_to_sleep(engines, self._config)
        except BaseException as error:
            if self._kept.shared and not isinstance(error, RunStopped):
                pool.throw_away()
            raise
        finally:
            if self._kept.shared:
                for handle in ranks:
                    ray.kill(handle)

    def trainer(self) -> tuple[ActorHandle, ...]:
        """The trainer's ranks, of which rank 0 leads."""
        config, gpus = self._config, self.placement.trainer_gpus
        names = [f"{self._name}-trainer"]
        if config.trainer.ranks > 1:
            # Ray's own messages say the name of an actor that died.
            names = [f"{self._name}-trainer-rank-{rank}" for rank in range(config.trainer.ranks)]
        # Whether or not the cache has the warm start, so that the training after it computes alike.
        warms_up = config.model.warm_start is not None and trains_on_gpu(config)
        variables = GPU_ENVIRONMENT if warms_up else None
        kinds = [FollowerActor if rank else TrainerActor for rank in range(len(names))]
        return tuple(
            spawn(kind, name, config.trainer.threads, config.cluster, gpus, variables)
            for kind, name in zip(kinds, names, strict=True)
        )

    def _take(self, kind: str, in_place: bool) -> tuple[ActorHandle, bool]:
        return self._kept.pool.take(kind, self.ready_rollout, in_place)

    def rollout(self) -> ActorHandle:
        """A process for a rollout engine, with its part of what all that are kept at once reserve of a GPU."""
        config = self._config
        # Ray counts in ten-thousandths: rounded up, the last of them would find no room.
        gpus = math.floor(self.placement.rollout_gpus * 1e4 / self._kept.pool.most) / 1e4
        return spawn(RolloutActor, next(self._kept.names), config.rollout.threads, config.cluster, gpus)

    def ready_rollout(self) -> ActorHandle:
        new = self.rollout()
        await_ready({"rollout": new}, self._config.cluster)
        return new


def await_actors(rollout: ActorHandle | None, engines: Engines, config: RunConfig) -> None:
    """Wait until every actor answers; see `infra.ray_cluster.await_ready`."""
    roles = {} if rollout is None else {"rollout": rollout}
    ranks = {f"trainer rank {rank}": follower for rank, follower in enumerate(engines.followers, 1)}
    leader = "trainer rank 0" if ranks else "trainer"
    await_ready(roles | {leader: engines.trainer} | ranks, config.cluster)


def _writer(
    config: RunConfig,
    identity: RunIdentity,
    folder: Path,
    journal: Journal,
    flow_run_id: str,
    hardware: Mapping[str, str],
) -> MlflowWriter:
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
        ENDED_BY: "-",
        **hardware,
        **config.tracking.tags,
    }
    return MlflowWriter(
        tracking_uri=tracking_uri(config.tracking.uri, Path(config.runs_dir)),
        experiment=config.tracking.experiment,
        journal=journal,
        cursor_path=folder / "mlflow.cursor.json",
        run_id=known,
        run_name=identity.name,
        params={key: value for key, value in flatten(config).items() if not key.startswith(_NOT_OF_A_RUN)},
        tags=tags,
        patience_s=config.tracking.outage_patience_s,
    )


@contextmanager
def _closing(
    writer: MlflowWriter, config: RunConfig, folder: Path, stacks: StackDumps, console: Console
) -> Iterator[None]:
    writer.start()
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED"
    ended_by: Reason = "done"
    try:
        yield
    except BaseException as error:
        status, ended_by = mlflow_status(error), reason(error)
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        # A run that was done has sent its records with its report.
        breakers = [folder / BREAKERS] if ended_by != "done" and (folder / BREAKERS).exists() else []
        for path in (*stacks.written, *breakers):
            writer.add_artifact(path)
        limit = config.tracking.outage_patience_s + _MLFLOW_START_S
        writer.tag(ENDED_BY, ended_by)
        report = writer.close(status, timeout_s=limit)
        if report.pending or report.error:
            console.say(
                f"MLflow: {report.pending} entries are not stored yet ({report.error}); they are in the journal, and "
                f"resume={folder.name} brings them"
            )
