"""Calls from tasks to the engines' actors: phases are timed, and failures come back typed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from conf.schema import Deadlines
from tasks.deadlines import Clock, LateAnswer, LimitName, limit_of
from tasks.deaths import told
from tasks.engines.protocols import EngineError
from tasks.stacks import StackDumps


class PhaseError(EngineError):
    """A phase of a step failed; the message names the phase and the engine."""


class LateError(PhaseError):
    """An engine did not answer within its deadline; the message says which key sets it."""


Role = Literal["rollout", "trainer"]
_WHO: dict[Role, str] = {"rollout": "the rollout engine", "trainer": "the trainer"}

_RANKS_FIRST_S = 10.0
"""How much longer than the trainer's leader a task waits: the leader has the same deadline, and names the late rank."""

_PARTS: Final[Mapping[LimitName, int]] = {"build_s": 2, "restore_s": 3}
"""Calls in which the leader does a task, each of which has the whole limit; one where nothing stands."""


@dataclass
class Stopwatch:
    """Wall seconds of a phase, set when it ends."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the wall time of a block."""
    watch, start = Stopwatch(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start


Take = Callable[[str, bool], tuple[ActorHandle, bool]]
"""See `tasks.rollout_pool.RolloutPool.take`, without what starts a process."""


class Engines:
    """The actors of one run.

    `followers`: the trainer's ranks but the first, which `trainer` leads; nobody else calls them. `take`: where the
    process of each rollout engine comes from; without it there is the one, or none. `keeps`: whether an engine that
    another takes the place of may be wanted again. `share_gpu`: whether the rollout engine computes on a GPU of the
    trainer's, so that each is built while the other holds little of it. `stacks`: writes down what engines that are
    late were at.
    """

    def __init__(
        self,
        rollout: ActorHandle | None,
        trainer: ActorHandle,
        deadlines: Deadlines,
        take: Take | None = None,
        followers: Sequence[ActorHandle] = (),
        keeps: bool = False,
        share_gpu: bool = False,
        stacks: StackDumps | None = None,
    ) -> None:
        self._rollout = rollout
        self.trainer = trainer
        self.deadlines = deadlines
        self.followers = tuple(followers)
        self.keeps = keeps
        self.share_gpu = share_gpu
        self._take = take
        self._stacks = stacks
        self._follow("the rollout engine", rollout)
        for rank, actor in enumerate((trainer, *self.followers)):
            self._follow(f"trainer rank {rank}" if self.followers else "the trainer", actor)

    @property
    def rollout(self) -> ActorHandle:
        """The process of the rollout engine; `EngineError` before there is one."""
        if self._rollout is None:
            raise EngineError("the run has no rollout engine yet")
        return self._rollout

    @property
    def has_rollout(self) -> bool:
        return self._rollout is not None

    def choose_rollout(self, kind: str, in_place: bool) -> bool:
        """Go on with a process for an engine of `kind` (`rollout_kind`); whether it holds one already.

        `in_place`: whether an engine can be replaced within its process.
        """
        if self._take is None:
            return False
        self._rollout, kept = self._take(kind, in_place)
        self._follow("the rollout engine", self._rollout)
        return kept

    def clock(self, name: LimitName, times: int = 1) -> Clock:
        """A deadline that runs from now: `times` the limit of this key; where ranks are led, of all their parts."""
        if not self.followers:
            return Clock(limit_of(self.deadlines, name), times)
        return Clock(limit_of(self.deadlines, name), times * _PARTS.get(name, 1), _RANKS_FIRST_S)

    def answer(self, phase: str, role: Role, ref: Any, clock: Clock) -> Any:
        """See `wait`; an engine that is late is ended, with all others."""
        try:
            return wait(phase, ref, clock, _WHO[role])
        except LateError as late:
            self._give_up(phase, late)
            raise

    def following(self, phase: str, role: Role, stream: Any, clock: Clock) -> Any:
        """The next reference of a stream, None at its end; as `answer`, it does not wait for ever."""
        ready, _ = ray.wait([stream], timeout=clock.left(), fetch_local=False)
        if not ready:
            late = _late(phase, _WHO[role], clock)
            self._give_up(phase, late)
            raise late
        return next(stream, None)

    def _follow(self, who: str, actor: ActorHandle | None) -> None:
        if self._stacks is not None and actor is not None:
            self._stacks.arm(who, actor)

    def _give_up(self, phase: str, late: LateError) -> None:
        """End the engines; the error then says where their stacks are."""
        try:
            if self._stacks is not None:
                late.args = (f"{late}; stacks of the engines: {self._stacks.write(phase)}",)
        finally:
            self.end()

    def end(self) -> None:
        """End the engines' processes, whatever they are at."""
        for actor in (self._rollout, self.trainer, *self.followers):
            if actor is not None:
                ray.kill(actor)


def _late(phase: str, who: str, clock: Clock) -> LateError:
    return LateError(f"{phase}: {who}: {clock.missed()}")


def wait(phase: str, ref: Any, clock: Clock, who: str = "the object store") -> Any:
    """The value of an actor call; any failure is a `PhaseError` that names the phase, a `LateError` `who` is late."""
    try:
        return ray.get(ref, timeout=clock.left())
    except GetTimeoutError as error:
        raise _late(phase, who, clock) from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RayActorError):
            # Of an actor that this one called.
            raise PhaseError(f"{phase}: {told(cause)}") from error
        kind = LateError if isinstance(cause, LateAnswer) else PhaseError
        raise kind(f"{phase}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise PhaseError(f"{phase}: {told(error)}") from error
    except RayError as error:
        # A lost object, a full store, a worker that ran out of memory.
        raise PhaseError(f"{phase}: {type(error).__name__}: {error}") from error
