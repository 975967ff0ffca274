"""What `fp8-grpo sweep` runs, and how its report judges the recipes."""

from __future__ import annotations

import itertools
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


class Gates(Section):
    """Bounds of the verdict on a recipe, against the baseline of the same seeds."""

    max_accuracy_loss: float = Field(default=0.02, ge=0.0, le=1.0)
    """Passing loss of final accuracy (share of eval prompts, 0 to 1); the whole interval has to be within it."""

    max_mismatch: float = Field(default=1.05, ge=1.0)
    """Largest passing median of mismatch/token_mult_prob_error in any seed (>= 1)."""

    min_rollout_speedup: float | None = Field(default=None, gt=0.0)
    """Smallest passing speedup/rollout_vs_bf16 of an FP8 recipe (> 0); null reports it without judging."""

    min_step_speedup: float | None = Field(default=None, gt=0.0)
    """Smallest passing speedup/step_vs_bf16 of an FP8 recipe (> 0); null reports it without judging."""


class Tolerance(Section):
    """How far a metric may be from the median of its history whatever its spread was."""

    metric: str = Field(min_length=1)
    """MLflow name of the metric."""

    relative: float = Field(default=0.0, ge=0.0)
    """As a share of that median (>= 0)."""

    absolute: float = Field(default=0.0, ge=0.0)
    """In the metric's own unit (>= 0)."""


class Corridor(Section):
    """Regression corridor: each recipe against earlier sweeps of the same name, configuration and hardware."""

    enabled: bool = True
    """Whether a sweep that leaves the corridor fails."""

    width: float = Field(default=4.0, gt=0.0)
    """Reach on both sides of the median, in robust standard deviations of the history (> 0)."""

    min_history: int = Field(default=3, ge=1)
    """Earlier sweeps below which only missing and NaN values fail (>= 1)."""

    max_history: int = Field(default=30, ge=1)
    """Newest earlier sweeps that count (>= 1)."""

    metrics: Annotated[tuple[Tolerance, ...], ListAsTuple] = (
        Tolerance(metric="eval/accuracy", absolute=0.03),
        Tolerance(metric="mismatch/token_mult_prob_error", absolute=0.01),
        Tolerance(metric="time/step_s", relative=0.3),
        Tolerance(metric="throughput/rollout_tokens_per_s", relative=0.3),
    )
    """Metrics with their tolerance: of eval/* the last value of a run counts, of others the median over steps."""

    notify: str | None = Field(default=None, pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")
    """Prefect notification block that is told of a failure, as TYPE/NAME (slack-webhook/nightly); null tells nobody."""


class Prices(Section):
    """What an hour of hardware costs, for the report's cost column."""

    gpu_hour_usd: dict[str, float] = Field(default_factory=dict)
    """USD per GPU-hour by a part of the GPU's name (H200); a GPU without a price has no cost."""

    cpu_hour_usd: float | None = Field(default=None, ge=0.0)
    """USD per hour and CPU thread of a run without GPUs (>= 0); null gives no cost."""

    source: str = Field(default="not given", min_length=1)
    """Where the prices come from, and of which date."""

    @field_validator("gpu_hour_usd")
    @classmethod
    def _prices_are_not_negative(cls, value: dict[str, float]) -> dict[str, float]:
        problems = [
            Problem(f"gpu_hour_usd.{name}", price, "a negative price", "a number >= 0")
            for name, price in value.items()
            if price < 0
        ]
        if problems:
            raise Refusal(*problems)
        return value


class Bootstrap(Section):
    """Confidence intervals of the report."""

    confidence: float = Field(default=0.95, gt=0.0, lt=1.0)
    """Coverage of all intervals (between 0 and 1)."""

    resamples: int = Field(default=4000, ge=100)
    """Resamples of the hierarchical bootstrap over seeds and prompts (>= 100)."""


_TAKEN: Final = ("recipe", "seed", "run_name", "resume", "runs_dir", "allocation_s", "sweep", "tracking", "storage")


def _is_taken(key: str) -> bool:
    """Whether a sweep sets this key itself for each of its runs."""
    return key.split(".")[0] in _TAKEN and not key.startswith("recipe.")


def _wrong_variant(texts: tuple[str, ...]) -> str | None:
    keys = [text.lstrip("+~").partition("=")[0] for text in texts]
    if not keys or keys[0] != "recipe":
        return "does not begin with a recipe"
    taken = [key for key in keys[1:] if _is_taken(key)]
    return f"sets {taken[0]}, which the sweep sets itself" if taken else None


class Sweep(Section):
    """Recipes x seeds x further axes. Runs of one seed share prompts, data order and sampling seeds."""

    name: Word
    """Name under which sweeps share a history (letters, digits, `_`, `-`)."""

    recipes: Annotated[tuple[str, ...], ListAsTuple] = Field(min_length=1)
    """Options of the group recipe, or names of variants, each once."""

    variants: dict[Word, Annotated[tuple[str, ...], ListAsTuple]] = Field(default_factory=dict)
    """Rows of the comparison that are no option of the group recipe, by name: overrides, the first of which is
    recipe=OPTION, such as fp8_rollout_uncorrected: [recipe=fp8_rollout, correction=none, ...]. They win over those of
    every run; recipes and baseline take these names like options."""

    @field_validator("variants")
    @classmethod
    def _variants_begin_with_a_recipe(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        problems = [
            Problem(f"variants.{name}", list(texts), wrong, "[recipe=OPTION, KEY=VALUE, ...]")
            for name, texts in value.items()
            if (wrong := _wrong_variant(texts)) is not None
        ]
        if problems:
            raise Refusal(*problems)
        return value

    seeds: Annotated[tuple[Seed, ...], ListAsTuple] = Field(min_length=1)
    """Seeds of each recipe, each once; verdicts on speed and on accuracy without answers need two or more."""

    baseline: str = Field(default="bf16", min_length=1)
    """The recipe that others are compared with; without it there are neither speed-ups nor verdicts on accuracy."""

    axes: dict[str, Annotated[tuple[JsonValue, ...], ListAsTuple]] = Field(default_factory=dict)
    """Further axes: a key or group of the configuration with its values; recipes are compared at equal values."""

    overrides: Annotated[tuple[str, ...], ListAsTuple] = ()
    """Overrides of every run (key=value); those of the command line win over them."""

    children: Literal["in_process", "shared", "deployment"] = "in_process"
    """in_process runs one after another, each in a process of this machine; shared all in one, whose Ray and rollout
    engines serve the next run of the same format by a sync; deployment as runs of a Prefect deployment."""

    kept_engines: int = Field(default=3, ge=1)
    """Rollout engines that children=shared keeps at most (>= 1); the one used longest ago ends first. A recipe's own,
    its pre-flight's and the BF16 one are three; each reserves its part of the GPU."""

    deployment: str = Field(default="fp8-grpo/fp8-grpo", pattern=r"^[^/]+/[^/]+$")
    """FLOW/DEPLOYMENT of children=deployment; its worker has to see the same MLflow and checkpoints."""

    child_timeout_s: float = Field(default=86400.0, gt=0.0)
    """Longest time of one run, with the wait for a worker (seconds, > 0); then it is ended and counts as failed."""

    allocation_s: float | None = Field(default=None, gt=0.0)
    """Wall time of one call of the sweep on this machine (seconds, > 0): before it is over the run stops after a step,
    with a checkpoint, the report is written, and `--sweep-id` goes on (exit code 3); null is no limit."""

    @field_validator("allocation_s")
    @classmethod
    def _runs_of_a_deployment_have_no_allocation(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("children") == "deployment":
            wrong = "bounds runs on this machine, and children is deployment"
            raise Refusal(Problem("allocation_s", value, wrong, "null, or children=in_process or shared"))
        return value

    registry: str | None = Field(default="fp8-grpo", pattern=r"^[A-Za-z0-9_.-]+$")
    """Prefix of the models PREFIX-MODEL-RECIPE in the registry, with the best as champion; null registers none."""

    gates: Gates = Gates()
    """Bounds of the verdicts."""

    corridor: Corridor = Corridor()
    """Comparison with earlier sweeps."""

    prices: Prices = Prices()
    """Price table of the cost column."""

    bootstrap: Bootstrap = Bootstrap()
    """Confidence intervals."""

    @field_validator("recipes", "seeds")
    @classmethod
    def _each_once(cls, value: tuple[object, ...]) -> tuple[object, ...]:
        if len(set(value)) != len(value):
            key = "recipes" if isinstance(value[0], str) else "seeds"
            raise Refusal(Problem(key, list(value), "one of them twice", "each once"))
        return value

    @field_validator("axes")
    @classmethod
    def _axes_have_values(cls, value: dict[str, tuple[JsonValue, ...]]) -> dict[str, tuple[JsonValue, ...]]:
        problems = [
            Problem(f"axes.{key}", list(values), "a key that the sweep sets itself", "another key or group")
            for key, values in value.items()
            if _is_taken(key)
        ]
        problems += [
            Problem(f"axes.{key}", list(values), "no values, or one twice", "a list, each value once")
            for key, values in value.items()
            if not values or any(_same(a, b) for a, b in itertools.combinations(values, 2))
        ]
        problems += [
            Problem(f"axes.{key}", item, "a map", "plain values and lists; the keys of a map are axes of their own")
            for key, values in value.items()
            for item in values
            if _holds_a_map(item)
        ]
        if problems:
            raise Refusal(*problems)
        return value


def _same(a: JsonValue, b: JsonValue) -> bool:
    """1 and 1.0 are, 1 and true are not, nor are lists that hold them."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _holds_a_map(value: JsonValue) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_a_map, value)))
