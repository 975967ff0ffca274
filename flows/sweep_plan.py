"""The runs of a sweep: which there are and with which overrides; all is checked before anything starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conf.compose import CONFIG_DIR, compose, digest
from conf.overrides import groups, override_key
from conf.problems import ConfigError, nearest_word
from conf.schema import Problem, Rollout, RunConfig, Sweep, VllmRollout
from conf.schema.base import counted
from conf.schema.sharing import MOST_MEMORY
from flows.comparison_data import variant_name
from flows.corridor import CONFIG_DIGEST, PlannedChild
from flows.inputs import check_inputs
from infra.mlflow_read import SWEEP, SWEEP_ID
from tasks.engines.registry import ROLLOUT_SIDE

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_INSTEAD = {
    "sweep": "one name of a sweep, before the overrides: fp8-grpo sweep smoke",
    "recipe": "sweep.recipes=[...]",
    "seed": "sweep.seeds=[...]",
    "run_name": "--sweep-id, with which the names of its runs begin",
    "resume": "--sweep-id ID, which goes on with what is not finished",
}
_ENGINE: Final[Any] = {"model": True, "rollout": True, "recipe": ROLLOUT_SIDE}
"""What a run's rollout engine is built from."""


@dataclass(frozen=True)
class Child:
    """A run to be: `overrides` are complete, with name, tags and `resume=auto`; `config`: what they compose to."""

    planned: PlannedChild
    recipe: str
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        return self.planned.name


def plan_sweep(
    sweep: str, overrides: Sequence[str], sweep_id: str, parent: str | None
) -> tuple[RunConfig, tuple[Child, ...]]:
    """Configuration and runs, all checked; `ConfigError` with everything that cannot be run."""
    if not _ID.fullmatch(sweep_id):
        allowed = "1 to 128 letters, digits, `.`, `_`, `-`, no leading dot"
        raise ConfigError([str(Problem("sweep_id", sweep_id, "not a name", allowed))])
    problems = [
        str(Problem(key, text.partition("=")[2], "a sweep sets it for each of its runs", _INSTEAD[key]))
        for text in overrides
        if (key := override_key(text)) in _INSTEAD
    ]
    if problems:
        raise ConfigError(problems)
    config = compose_sweep(sweep, overrides)
    children = plan_children(config, overrides, sweep_id, parent)
    here = config.sweep.children != "deployment"
    if config.sweep.children == "shared":
        children = one_after_another(children, config.sweep.kept_engines)
    for recipe in dict.fromkeys(child.recipe for child in children):
        first = next(child for child in children if child.recipe == recipe)
        check_inputs(first.config, starts=here)
    return config, children


def compose_sweep(sweep: str, overrides: Sequence[str]) -> RunConfig:
    """What the sweep itself goes by: as its runs, it has its own overrides before those of the command line."""
    first = compose([f"sweep={sweep}", *filter(_is_of_the_sweep, overrides)])
    config = compose([f"sweep={sweep}", *_a_recipe(first.sweep), *first.sweep.overrides, *overrides])
    if config.sweep.children == "deployment" and config.allocation_s is not None:
        allowed = "null, or children=in_process or shared"
        wrong = "a run of a deployment that stops within it would count as done"
        raise ConfigError([str(Problem("allocation_s", config.allocation_s, wrong, allowed))])
    return config


def _a_recipe(sweep: Sweep) -> tuple[str, ...]:
    """Override of a recipe that the sweep has: the default one may be none that its engines can run."""
    options = groups(CONFIG_DIR)["recipe"]
    for name in sweep.recipes:
        if name in sweep.variants:
            return sweep.variants[name][:1]
        if name in options:
            return (f"recipe={name}",)
    return ()


def one_after_another(children: Sequence[Child], kept_engines: int) -> tuple[Child, ...]:
    """In the order of a shared process: runs whose rollout engines are of one kind follow each other.

    `ConfigError` where not all want the same Ray cluster, of which there is one.
    """
    configs = {child.name: child.config for child in children}
    if len({config.cluster for config in configs.values()}) > 1:
        allowed = "equal cluster.* in all runs, or children=in_process"
        raise ConfigError([str(Problem("sweep.children", "shared", "runs ask for different Ray clusters", allowed))])
    problems = [
        line for config in configs.values() if (line := _too_much_memory(config.rollout, kept_engines)) is not None
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    kinds = {
        name: config.model_dump_json(include=_ENGINE, exclude={"rollout": {"kv_preflight"}})
        for name, config in configs.items()
    }
    order = list(dict.fromkeys(kinds.values()))
    return tuple(sorted(children, key=lambda child: order.index(kinds[child.name])))


def _too_much_memory(rollout: Rollout, kept_engines: int) -> str | None:
    """Engines that do not sleep hold their share of the device's memory while others run."""
    if not isinstance(rollout, VllmRollout) or rollout.sleep_level or rollout.gpu_memory_utilization is None:
        return None
    # vLLM wants its share free when it starts, beside what the others and the trainer hold.
    most = max(1, int(MOST_MEMORY / rollout.gpu_memory_utilization))
    if kept_engines <= most:
        return None
    share = rollout.gpu_memory_utilization
    wrong = f"as many engines with rollout.gpu_memory_utilization {share:g} do not fit into a GPU's memory at once"
    allowed = (
        f"{'1' if most == 1 else f'1 to {most}'}, or rollout.sleep_level=1, with which those that are idle give it back"
    )
    return str(Problem("sweep.kept_engines", kept_engines, wrong, allowed))


def plan_children(config: RunConfig, common: Sequence[str], sweep_id: str, parent: str | None) -> tuple[Child, ...]:
    """All runs, seed by seed, so that a sweep that is cut short has whole comparisons.

    `common`: overrides of the command line, which win over those of the sweep; `parent`: id of the sweep's flow run.
    `ConfigError` with all that is wrong in any of them: nothing starts while one cannot.
    """
    sweep = config.sweep
    options = groups(CONFIG_DIR)["recipe"]
    both = [name for name in sweep.variants if name in options]
    if both:
        text = str(Problem(f"sweep.variants.{both[0]}", list(sweep.variants[both[0]]), "is a recipe", "another name"))
        raise ConfigError([text])
    known = (*options, *sweep.variants)
    problems = [
        str(Problem(key, name, "no such option", f"one of {', '.join(known)}", nearest_word(name, known)))
        for key, names in (("sweep.recipes", sweep.recipes), ("sweep.baseline", (sweep.baseline,)))
        for name in names
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    base = [*sweep.overrides, *(text for text in common if not _is_of_the_sweep(text))]
    points = [dict(zip(sweep.axes, values, strict=True)) for values in itertools.product(*sweep.axes.values())]
    children: list[Child] = []
    refused: dict[str, list[str]] = {}
    for seed, axes, recipe in itertools.product(sweep.seeds, points, sweep.recipes):
        try:
            children.append(_child(config, base, sweep_id, parent, recipe, seed, axes))
        except ConfigError as error:
            for problem in error.problems:
                refused.setdefault(problem, []).append(f"{variant_name(recipe, axes)}, seed {seed}")
    problems = [f"{_first_of(runs)}: {problem}" for problem, runs in refused.items()] or _same_names(children)
    if problems:
        raise ConfigError(problems)
    return tuple(children)


def _same_names(children: Sequence[Child]) -> list[str]:
    """Values of an axis that differ in signs alone, which a run's name cannot hold."""
    met: dict[str, Child] = {}
    problems = []
    for child in children:
        other = met.setdefault(child.name, child)
        if other is not child:
            runs = f"{other.planned.variant}; {child.planned.variant}"
            wrong = f"both have runs called {child.name}"
            problems.append(str(Problem("sweep.axes", runs, wrong, "values that differ in letters or digits")))
    return problems


def _first_of(runs: Sequence[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{runs[0]} (and {counted(len(runs) - 1, 'more run')})"


def _child(
    config: RunConfig,
    base: Sequence[str],
    sweep_id: str,
    parent: str | None,
    recipe: str,
    seed: int,
    axes: Mapping[str, Any],
) -> Child:
    first, *changes = config.sweep.variants.get(recipe, (f"recipe={recipe}",))
    kept = [text for text in base if override_key(text) not in set(map(override_key, changes))]
    chosen = [first, *kept, *changes, *(_override(key, value) for key, value in axes.items()), f"seed={seed}"]
    label = "".join(f"-{_word(key.rpartition('.')[2])}-{_word(value)}" for key, value in sorted(axes.items()))
    name = f"{sweep_id}-{recipe}{label}-s{seed}"
    tags = {
        **config.tracking.tags,
        SWEEP_ID: sweep_id,
        SWEEP: config.sweep.name,
        "axes": json.dumps(dict(axes), sort_keys=True),
        "recipe": recipe,
    }
    if parent is not None:
        tags["parent_flow_run_id"] = parent
    chosen += [f"run_name={name}", "resume=auto", *(_override(f"tracking.tags.{k}", v) for k, v in tags.items())]
    own = compose(chosen)
    if config.sweep.allocation_s is not None and own.checkpoint_every is None:
        wrong = "checkpoint_every is null, and a run that is stopped could not go on"
        allowed = "null, or a number of steps as checkpoint_every"
        raise ConfigError([str(Problem("sweep.allocation_s", config.sweep.allocation_s, wrong, allowed))])
    # Name and tags shape no result and are not in the digest; the number of steps is not in it either.
    identity = hashlib.sha256(f"{digest(own)} {own.steps}".encode()).hexdigest()
    chosen.append(_override(f"tracking.tags.{CONFIG_DIGEST}", identity))
    tagged = own.tracking.model_copy(update={"tags": {**own.tracking.tags, CONFIG_DIGEST: identity}})
    own = own.model_copy(update={"tracking": tagged})
    return Child(PlannedChild(name, variant_name(recipe, axes), seed, identity), recipe, tuple(chosen), own)


def _is_of_the_sweep(override: str) -> bool:
    return override_key(override).partition(".")[0] == "sweep"


def _override(key: str, value: Any) -> str:
    """One value as Hydra reads it back: text is quoted, also what looks like a number."""
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f"{key}={value}" if key in groups(CONFIG_DIR) else f'{key}="{quoted}"'
    return f"{key}={json.dumps(value)}"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._") else "_" for letter in text)
