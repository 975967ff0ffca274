"""One GRPO run under one precision recipe, from set-up to report: what the flow `fp8-grpo` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from conf.problems import ConfigError
from conf.schema import RunConfig
from conf.schema.base import counted
from flows.allocation import Pace, RunStopped
from flows.breakers import (
    BF16_ROLLOUT,
    BREAKERS,
    BreakerError,
    Breakers,
    Trip,
    check_something_was_trained,
)
from flows.cautions import cautions
from flows.console import Console
from flows.identity import BF16_SINCE
from flows.inputs import check_prompts
from flows.pausing import await_person
from flows.planning import correction_line, objective_line
from flows.report import summarize, write_report
from flows.session import KeptEngines, Session, find_run, open_session, storage_target
from flows.steps import Stepper
from infra.provenance import versions
from tasks import preflight
from tasks.bootstrap import bootstrap, build_engines, prepare_model, rebuild_rollout
from tasks.calls import stopwatch
from tasks.data.tokens import TextCodec
from tasks.engines.plan import rollout_linears
from tasks.engines.registry import high_precision_rollout

_NAMED: Final = 3
"""How many of the values that differ are named."""


def run_training(
    config: RunConfig,
    flow_run_id: str,
    run_count: int,
    console: Console,
    heeding: Callable[[], AbstractContextManager[None]],
    kept: KeptEngines | None = None,
    used: float = 0.0,
) -> dict[str, Any]:
    """One run from set-up to report; returns the closing figures, the run's name and its folder.

    Where its allocation was used up it returns the name, the folder and `stopped_after`, the step of its checkpoint.
    `heeding`: around what may be interrupted by a cancel; `kept`: see `flows.session.open_session`; `used`: of the
    allocation, before this call (seconds).
    """
    pace = Pace(config.allocation_s, used)
    identity = find_run(config)
    if identity.manifest is not None:
        console.say(f"resume: run {identity.name} continues after step {identity.start_step}")
    else:
        for line in (*cautions(config), *_nothing_to_resume(config)):
            console.say(line)
    console.say(f"run {identity.name}: starting Ray, the engines and the data")
    folder = ""
    try:
        with open_session(config, identity, flow_run_id, run_count, console, kept) as session, console.progress():
            folder = str(session.folder)
            with heeding():
                stepper = _prepare(session, pace)
                _train(session, stepper, pace)
                _finish(session, stepper, pace)
            summary = _report(session)
            check_something_was_trained(session.record.journal.entries(), config.algorithm.updates_per_step)
            if session.record.replay_differences:
                console.say(_differing(session.record.replay_differences))
    except RunStopped as stopped:
        return {"run": identity.name, "folder": folder, "stopped_after": stopped.step}
    console.closing(config.recipe.name, summary)
    return {"run": identity.name, "folder": folder, **summary}


def _nothing_to_resume(config: RunConfig) -> tuple[str, ...]:
    """`resume=auto` begins a run where it finds none, which is not what everybody means."""
    if config.resume != "auto":
        return ()
    whose = "of this configuration" if config.run_name is None else f"of the run {config.run_name}"
    return (f"resume: no checkpoint {whose} at {storage_target(config)[0]}; a new run",)


def _differing(values: Sequence[str]) -> str:
    """What to say of values that a step computed again did not repeat."""
    named = ", ".join(values[:_NAMED])
    named += f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return (
        f"{counted(len(values), 'value')} of repeated steps {'differs' if len(values) == 1 else 'differ'} from the "
        f"journal ({named}): this machine, its libraries or the trainer's layout do not compute as before, to the last "
        "bit"
    )


def _prepare(session: Session, pace: Pace) -> Stepper:
    """Model, engines, and either the bootstrap of a new run or the state of a continued one."""
    s, config = session, session.config

    def progress(step: int, loss: float) -> None:
        total = config.model.warm_start.steps if config.model.warm_start else 0
        s.console.advance("warm start", step, total, f"loss {loss:.3f}", line=step % 100 == 0)

    cache = Path(config.runs_dir).resolve() / "cache" / "warm_start"
    prepared = prepare_model(s.engines, config, s.dataset, cache, progress)
    model_dir = prepared["model_dir"]
    if config.model.warm_start is not None:
        how = "from the cache" if prepared["cached"] else f"in {prepared['time/warm_start_s']:.1f} s"
        s.console.say(f"warm start: {how}")
    checked = s.identity.manifest is None and preflight.wanted(config)
    fell_back = s.identity.manifest is not None and s.identity.manifest.meta.get(BF16_SINCE) is not None
    recipe = high_precision_rollout(config.recipe) if fell_back else config.recipe
    with pace.measured("build"):
        build_engines(s.engines, config, preflight.bf16_cache(recipe) if checked else recipe, model_dir)
    codec, linears = TextCodec(Path(model_dir)), rollout_linears(config, Path(model_dir))
    check_prompts(s.dataset, codec, config)
    if s.identity.manifest is None:
        stepper = Stepper(s, codec, model_dir, linears, drawn=0)
        reference = _before_fp8_cache(s, codec, model_dir, linears) if checked else None
        values = bootstrap(s.engines, config, s.dataset, codec, linears)
        s.record.add("bootstrap", 0, values | {"time/warm_start_s": prepared["time/warm_start_s"]})
        if reference is not None:
            _judge_fp8_cache(s, reference)
        _evaluate(s, stepper, 0)
        if config.checkpoint_every is not None:
            s.record.add("checkpoint", 0, stepper.checkpoint(0))
    else:
        ref = s.engines.trainer.restore.remote(s.storage_target, s.identity.name)
        restored = s.engines.answer("restore", "trainer", ref, s.engines.clock("restore_s"))
        s.start_step = restored["step"]
        stepper = Stepper(s, codec, model_dir, linears, drawn=restored["meta"]["prompts_drawn"])
        since = restored["meta"].get(BF16_SINCE)
        if since is not None:
            stepper.use_bf16(since)
        elif fell_back:
            # The checkpoint that was loaded is older than the step after which the run fell back.
            rebuild_rollout(s.engines, config, config.recipe, model_dir)
        if s.start_step != s.identity.start_step:
            s.console.say(
                f"the checkpoint of step {s.identity.start_step} is damaged; the run goes on after step {s.start_step}"
            )
        stepper.sync()
    return stepper


def _before_fp8_cache(
    session: Session, codec: TextCodec, model_dir: str, linears: tuple[str, ...]
) -> preflight.Reference:
    """The reference of the pre-flight, from the engine that is there; then the run's own engine takes its place."""
    s = session
    reference = preflight.preflight_reference(s.engines, s.config, s.dataset, codec, linears)
    with stopwatch() as watch:
        rebuild_rollout(s.engines, s.config, s.config.recipe, model_dir)
    reference.seconds += watch.seconds
    return reference


def _judge_fp8_cache(session: Session, reference: preflight.Reference) -> None:
    """Record the pre-flight; `ConfigError` where it refuses the run."""
    limits = session.config.rollout.kv_preflight
    measured = preflight.preflight_compare(session.engines, reference, version=0)
    session.record.add("preflight", 0, measured)
    found = preflight.verdict(measured[preflight.MEAN], limits)
    if found == "refuse":
        raise ConfigError([str(preflight.refusal(measured, limits))])
    said = f"warning: {preflight.warning(measured, limits)}" if found == "warn" else preflight.described(measured)
    session.console.say(f"pre-flight, {measured['time/preflight_s']:.1f} s: {said}")


def _evaluate(session: Session, stepper: Stepper, step: int) -> None:
    values = stepper.evaluate(step)
    session.record.add("eval", step, values)
    session.console.say(f"step {step}: eval accuracy {values['eval/accuracy']:.3f}")


def _train(session: Session, stepper: Stepper, pace: Pace) -> None:
    """All steps that are left; `RunStopped`, with a checkpoint, after the last one that the allocation has room for."""
    config = session.config
    pace.learn(session.record.journal.entries())
    breakers = _breakers(session)
    session.console.advance("train", session.start_step, config.steps, line=False)
    for step in range(session.start_step + 1, config.steps + 1):
        with pace.measured("step"):
            metrics = stepper.step(step)
        session.record.add("step", step, metrics)
        session.console.step(step, config.steps, metrics)
        trips = _judge(session, breakers, step, metrics)
        if any(trip.rule.action == BF16_ROLLOUT for trip in trips) and not stepper.in_bf16:
            stepper.fall_back(step)
        pausing = next((trip for trip in trips if trip.rule.action == "pause"), None)
        if step % config.eval_every == 0 or step == config.steps:
            with pace.measured("eval"):
                _evaluate(session, stepper, step)
        stops = step < config.steps and not pace.allows(*_parts(config, step + 1))
        every = config.checkpoint_every
        due = every is not None and (pausing is not None or step % every == 0 or step == config.steps)
        if stops or due:
            with pace.measured("checkpoint"):
                values = stepper.checkpoint(step)
            if session.record.journal.find("checkpoint", step) is None:
                session.record.add("checkpoint", step, values)
        if stops:
            _stop(session, step)
        if pausing is not None:
            _pause(session, pausing, step, pace)


def _breakers(session: Session) -> Breakers:
    rules, path = session.config.breakers.rules, session.folder / BREAKERS
    return Breakers(rules, path, session.console, session.record.journal.entries(), session.start_step)


def _judge(session: Session, breakers: Breakers, step: int, metrics: dict[str, float]) -> tuple[Trip, ...]:
    """`BreakerError` where a rule stops the run, whose last checkpoint stays the newest."""
    trips = breakers.judge(step, metrics)
    for trip in trips:
        if trip.rule.action == "stop":
            raise BreakerError(trip.rule.metric, trip.text)
    return trips


def _pause(session: Session, trip: Trip, step: int, pace: Pace) -> None:
    """Wait for a person; `BreakerError` where nobody comes, `RunStopped` where the allocation has no room for more."""
    config = session.config
    limit = min(config.breakers.pause_timeout_s, pace.left())
    session.console.say(f"step {step}: paused for at most {limit:g} s; goes on when the flow run is resumed in Prefect")
    resumed = await_person(session.flow_run_id, limit, trip.text)
    if step < config.steps and not pace.allows(*_parts(config, step + 1)):
        _stop(session, step)
    if not resumed:
        late = f"{trip.text}; nobody resumed the run within breakers.pause_timeout_s = {limit:g} s"
        raise BreakerError(trip.rule.metric, late)
    session.console.say(f"step {step}: resumed")


def _parts(config: RunConfig, step: int) -> tuple[str, ...]:
    """What has to be done from here to the end of a step, should it be the last of the allocation.

    Another checkpoint comes before it where one is due now.
    """
    evaluated = step % config.eval_every == 0 or step == config.steps
    return ("checkpoint", "step", *(["eval"] if evaluated else []), "checkpoint")


def _stop(session: Session, step: int) -> None:
    config = session.config
    session.console.say(
        f"allocation_s = {config.allocation_s:g} is used up: stopped after step {step} of {config.steps}, with a "
        f"checkpoint; resume={session.identity.name} goes on"
    )
    raise RunStopped(step)


def _finish(session: Session, stepper: Stepper, pace: Pace) -> None:
    """Accuracy of the same weights on a BF16 rollout engine."""
    if session.start_step < session.config.steps and not pace.allows("build", "eval"):
        _stop(session, session.config.steps)
    if session.record.journal.find("final", session.config.steps) is None:
        session.record.add("final", session.config.steps, stepper.evaluate_bf16(session.config.steps))


def _report(session: Session) -> dict[str, float | None]:
    config, journal = session.config, session.record.journal
    facts = {
        "recipe": config.recipe.name,
        "algorithm": f"{config.algorithm.name}: {objective_line(config.algorithm)}",
        "correction": f"{config.correction.name}: {correction_line(config.correction)}",
        "model": config.model.name,
        "engines": f"rollout {config.rollout.engine}, trainer {config.trainer.engine}",
        "steps, seed": f"{config.steps}, {config.seed}",
        "samples a step": f"{config.algorithm.prompts_per_step} prompts x {config.algorithm.group_size}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    written = write_report(journal, session.folder, f"fp8-grpo run {session.identity.name}", facts)
    for path in (*written, *session.side_records):
        if path.exists():
            session.record.writer.add_artifact(path)
    return summarize(journal)
