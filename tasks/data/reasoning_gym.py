"""Questions of a procedural reasoning-gym task."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from tasks.data.child import Child, ChildDied
from tasks.data.examples import DataError, Example, GraderSpec
from tasks.data.split import prompt_id
from tasks.data.wire import WireError, decode, encode

if TYPE_CHECKING:
    from conf.schema import ReasoningGymData

WORKER_MODULE = "tasks.data.generator_worker"
# The questions are part of the task, not of a run: every run seed sees the same pool and the same split.
POOL_SEED = 0
_RESERVED = {"seed": "the pool is the same for every run", "size": "use data.pool_size"}


def draw_examples(config: ReasoningGymData) -> list[Example]:
    """The distinct questions among the first `pool_size` that the task's generator makes, in that order.

    The metadata of an example is the generator's own; a task without a reference answer gives examples with
    `has_answer` False. Raises DataError for an unknown task, parameters that the task refuses, or a generator
    that fails.
    """
    for name, reason in _RESERVED.items():
        if name in config.parameters:
            raise DataError(
                f"data.parameters.{name}={config.parameters[name]!r}; allowed: parameters of the task except "
                f"{' and '.join(_RESERVED)} ({reason})"
            )
    child = Child(WORKER_MODULE)
    try:
        return _received(child, config)
    except ChildDied as death:
        raise DataError(f"data.task={config.task!r}: the generator's process {death}") from death
    except WireError as error:
        raise DataError(f"data.parameters: {error}") from error
    finally:
        child.kill()


def verifier(config: ReasoningGymData) -> GraderSpec:
    """The task's own verifier."""
    return GraderSpec(
        kind="reasoning_gym",
        target=config.task,
        parameters=dict(config.parameters),
        partial_credit=config.partial_credit,
    )


def _received(child: Child, config: ReasoningGymData) -> list[Example]:
    child.send(
        {
            "task": config.task,
            "parameters": encode(dict(config.parameters), "data.parameters"),
            "seed": POOL_SEED,
            "count": config.pool_size,
        }
    )
    examples: dict[str, Example] = {}
    for _ in range(config.pool_size):
        message = child.receive()
        if "error" in message:
            raise DataError(_refusal(config, message))
        identifier = prompt_id(message["question"])
        if identifier not in examples:
            examples[identifier] = _example(identifier, message, config.task)
    return list(examples.values())


def _example(identifier: str, message: dict[str, Any], task: str) -> Example:
    answer = message["answer"]
    if answer is not None and not isinstance(answer, str):
        raise DataError(
            f"data.task={task!r}: its reference answers are of type {type(answer).__name__}; "
            "allowed: tasks with text answers"
        )
    return Example(
        id=identifier,
        prompt=message["question"],
        answer=answer or "",
        metadata=decode(message["metadata"]),
        has_answer=answer is not None,
    )


def _refusal(config: ReasoningGymData, message: dict[str, Any]) -> str:
    if "known" in message:
        nearest = difflib.get_close_matches(config.task, message["known"], n=1, cutoff=0.0)
        return (
            f"data.task={config.task!r} is no reasoning-gym task; nearest: {nearest[0]!r}; "
            f"allowed: one of the {len(message['known'])} names in reasoning_gym.factory.DATASETS"
        )
    if "parameters" in message:
        names = ", ".join(name for name in message["parameters"] if name not in _RESERVED)
        return (
            f"data.parameters={dict(config.parameters)!r} refused by task {config.task!r}: "
            f"{message['error']}; allowed: {names}"
        )
    return f"data.task={config.task!r}: its generator failed on {message['error']}"
