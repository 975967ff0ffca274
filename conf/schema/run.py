"""One training run: all sections together, and the rules that hold between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationInfo, field_validator, model_validator

from conf.schema.algorithm import Algorithm, nearest_divisor
from conf.schema.base import Problem, Refusal, Section
from conf.schema.benchmark import Benchmark
from conf.schema.breakers import Breakers
from conf.schema.correction import Correction
from conf.schema.data import Data, SyntheticData
from conf.schema.deadlines import Deadlines
from conf.schema.engines import Rollout, VllmRollout
from conf.schema.environment import Cluster, Storage, Tracking
from conf.schema.megatron import architecture_sizes, megatron_problems, split_problems
from conf.schema.model import Model
from conf.schema.recipe import Recipe
from conf.schema.sharing import sharing_problems, with_what_sharing_decides
from conf.schema.sweep import Sweep
from conf.schema.trainers import MegatronTrainer, TorchTrainer, Trainer
from conf.schema.vllm import stale_scale_problems, vllm_problems

RESUME_WORDS: Final = ("never", "auto")
_NAME_PATTERN: Final = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"
_NAME_FORM: Final = "letters, digits, `.`, `_`, `-`, no leading dot"
RunName = Annotated[str, Field(pattern=_NAME_PATTERN, json_schema_extra={"allowed": f"a name ({_NAME_FORM})"})]
Resume = Annotated[
    str,
    Field(
        pattern=_NAME_PATTERN,
        json_schema_extra={"allowed": f"never, auto or the name of a run ({_NAME_FORM})"},
    ),
]


class RunConfig(Section):
    """The whole configuration of a run."""

    recipe: Recipe
    """Which layers compute in which precision, on both sides."""

    algorithm: Algorithm
    """Objective and batch."""

    correction: Correction
    """Importance weighting between rollout and trainer; an FP8 rollout needs one."""

    model: Model
    """The policy."""

    data: Data
    """Prompts and verifier."""

    rollout: Rollout
    """The engine that samples."""

    trainer: Trainer
    """The engine that scores and trains."""

    cluster: Cluster
    """The Ray cluster."""

    deadlines: Deadlines
    """Longest waits for the engines."""

    breakers: Breakers
    """Rules on the metrics of each step."""

    tracking: Tracking
    """MLflow."""

    storage: Storage
    """Checkpoints."""

    benchmark: Benchmark
    """What fp8-grpo benchmark measures; a training run does not read it."""

    sweep: Sweep
    """What fp8-grpo sweep runs and how it is judged; a training run does not read it."""

    steps: int = Field(default=20, ge=1)
    """Training steps (>= 1)."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of sampling and data order (0 to 2^32 - 1); the split does not depend on it."""

    eval_every: int = Field(default=5, ge=1)
    """Steps between evaluations (>= 1); there is one at step 0 and one at the end besides."""

    checkpoint_every: int | None = Field(default=5, ge=1)
    """Steps between checkpoints (>= 1), with one at the end besides; null makes none, and nothing can be resumed."""

    runs_dir: str = Field(default="runs", min_length=1)
    """Folder of journals, reports, caches and the default tracking store."""

    allocation_s: float | None = Field(default=None, gt=0.0)
    """Wall time that this call may take, from the start of its process (seconds, > 0): before it is over the run stops
    after a step, with a checkpoint (exit code 3), and resume goes on; one step is done in any case. null: no limit."""

    @field_validator("allocation_s")
    @classmethod
    def _a_stopped_run_can_go_on(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("checkpoint_every", 1) is None:
            wrong = "checkpoint_every is null: a run that stops before its end could not go on"
            raise Refusal(Problem("allocation_s", value, wrong, "null, or checkpoint_every=STEPS"))
        return value

    run_name: RunName | None = None
    """Name of the run (letters, digits, `.`, `_`, `-`; no leading dot; not never or auto); null makes one."""

    resume: Resume = "never"
    """never starts anew, auto continues the newest complete checkpoint, a run's name continues that run."""

    @model_validator(mode="before")
    @classmethod
    def _what_sharing_decides(cls, raw: Any) -> Any:
        return with_what_sharing_decides(raw) if isinstance(raw, Mapping) else raw

    @field_validator("correction")
    @classmethod
    def _fp8_rollout_is_corrected(cls, value: Correction, info: ValidationInfo) -> Correction:
        recipe = info.data.get("recipe")
        if not isinstance(recipe, Recipe) or value.corrects or value.allow_uncorrected:
            return value
        fp8 = [
            f"{key} {kind}"
            for key, kind, quantized in (
                (
                    "recipe.rollout_linears.format",
                    recipe.rollout_linears.format,
                    recipe.rollout_linears.quantized,
                ),
                ("recipe.kv.dtype", recipe.kv.dtype, recipe.kv.quantized),
            )
            if quantized
        ]
        if fp8:
            raise Refusal(
                Problem(
                    "correction.weight",
                    value.weight,
                    f"an FP8 rollout ({', '.join(fp8)}) samples from another policy than the one trained",
                    "a weight or a rejection rule (correction=token_truncation), or correction.allow_uncorrected=true",
                )
            )
        return value

    @field_validator("storage")
    @classmethod
    def _kernels_have_a_folder(cls, value: Storage, info: ValidationInfo) -> Storage:
        cluster = info.data.get("cluster")
        if value.keep_kernels and isinstance(cluster, Cluster) and cluster.kernel_cache is None:
            wrong = "there is no folder of kernels to keep: cluster.kernel_cache is null"
            raise Refusal(Problem("storage.keep_kernels", True, wrong, "false, or cluster.kernel_cache=FOLDER"))
        return value

    @field_validator("model")
    @classmethod
    def _some_layer_is_left(cls, value: Model, info: ValidationInfo) -> Model:
        recipe = info.data.get("recipe")
        if isinstance(recipe, Recipe) and value.architecture is not None:
            problems = kept_layer_problems(recipe, value.architecture.num_hidden_layers)
            if problems:
                raise Refusal(*problems)
        return value

    @field_validator("data")
    @classmethod
    def _a_warm_start_has_answers(cls, value: Data, info: ValidationInfo) -> Data:
        model = info.data.get("model")
        if value.kind == "synthetic" and isinstance(model, Model) and model.warm_start is not None:
            wrong = "data.kind synthetic has no answers to learn from"
            raise Refusal(Problem("model.warm_start", model.warm_start.model_dump(), wrong, "null, or other data"))
        return value

    @field_validator("rollout")
    @classmethod
    def _answer_fits_context(cls, value: Rollout, info: ValidationInfo) -> Rollout:
        algorithm, model = info.data.get("algorithm"), info.data.get("model")
        if isinstance(algorithm, Algorithm) and (algorithm.overlong.buffer or 0) > value.max_new_tokens:
            buffer, limit = algorithm.overlong.buffer, value.max_new_tokens
            wrong, allowed = f"exceeds rollout.max_new_tokens {limit}", f"an integer from 1 to {limit}, or null"
            raise Refusal(Problem("algorithm.overlong.buffer", buffer, wrong, allowed))
        if isinstance(model, Model) and model.architecture is not None:
            own = model.architecture.max_position_embeddings
            context = value.positions(own)
            if value.max_new_tokens >= context:
                what = "model.architecture.max_position_embeddings" if context == own else "rollout.max_model_len"
                wrong = f"leaves a prompt no room in {what} {context}"
                allowed = f"an integer from 1 to {context - 1}"
                raise Refusal(Problem("rollout.max_new_tokens", value.max_new_tokens, wrong, allowed))
        return value

    @field_validator("rollout")
    @classmethod
    def _random_prompt_fits_context(cls, value: Rollout, info: ValidationInfo) -> Rollout:
        data, model = info.data.get("data"), info.data.get("model")
        if isinstance(data, SyntheticData) and isinstance(model, Model) and model.architecture is not None:
            context = value.positions(model.architecture.max_position_embeddings)
            room = context - value.max_new_tokens
            if data.prompt_digits > room:
                wrong = f"with rollout.max_new_tokens {value.max_new_tokens} it exceeds the model's {context} positions"
                allowed = f"an integer from 4 to {room}" if room >= 4 else "a smaller rollout.max_new_tokens"
                raise Refusal(Problem("data.prompt_digits", data.prompt_digits, wrong, allowed))
        return value

    @field_validator("rollout")
    @classmethod
    def _engine_runs_the_recipe(cls, value: Rollout, info: ValidationInfo) -> Rollout:
        recipe = info.data.get("recipe")
        if isinstance(value, VllmRollout) and isinstance(recipe, Recipe):
            problems = (*vllm_problems(value, recipe), *stale_scale_problems(value, recipe))
            if problems:
                raise Refusal(*problems)
        return value

    @field_validator("trainer")
    @classmethod
    def _micro_batches_fill_an_update(cls, value: Trainer, info: ValidationInfo) -> Trainer:
        algorithm = info.data.get("algorithm")
        if not isinstance(algorithm, Algorithm) or not isinstance(value, TorchTrainer):
            return value
        samples, micro = algorithm.samples_per_update, value.micro_batch_size
        if micro < samples and samples % micro:
            raise Refusal(
                Problem(
                    "trainer.micro_batch_size",
                    micro,
                    f"does not divide the {samples} samples of an update (algorithm.prompts_per_step "
                    f"{algorithm.prompts_per_step} * algorithm.group_size {algorithm.group_size} / "
                    f"algorithm.updates_per_step {algorithm.updates_per_step})",
                    f"a divisor of {samples}, or {samples} and more",
                    str(nearest_divisor(samples, micro)),
                )
            )
        return value

    @field_validator("trainer")
    @classmethod
    def _megatron_can_run_it(cls, value: Trainer, info: ValidationInfo) -> Trainer:
        recipe, algorithm, model = (info.data.get(key) for key in ("recipe", "algorithm", "model"))
        if not isinstance(value, MegatronTrainer) or not isinstance(recipe, Recipe):
            return value
        linears = recipe.training_linears
        problems: list[Problem] = []
        if isinstance(algorithm, Algorithm):
            problems += megatron_problems(value, linears, algorithm)
        if isinstance(model, Model) and model.architecture is not None:
            problems += split_problems(value, linears, architecture_sizes(model.architecture), "model.architecture")
        if problems:
            raise Refusal(*problems)
        return value

    @field_validator("cluster")
    @classmethod
    def _a_rank_has_its_own_gpu(cls, value: Cluster, info: ValidationInfo) -> Cluster:
        trainer = info.data.get("trainer")
        if not isinstance(trainer, MegatronTrainer) or trainer.device == "cpu" or trainer.ranks == 1:
            return value
        if value.trainer_gpus is not None and value.trainer_gpus <= 0.5:
            wrong = f"two of the {trainer.ranks} ranks (trainer.ranks) could share a GPU, which NCCL refuses"
            raise Refusal(Problem("cluster.trainer_gpus", value.trainer_gpus, wrong, "more than 0.5 up to 1, or null"))
        return value

    @field_validator("cluster")
    @classmethod
    def _engines_that_share_can(cls, value: Cluster, info: ValidationInfo) -> Cluster:
        rollout, trainer = info.data.get("rollout"), info.data.get("trainer")
        if rollout is not None and trainer is not None:
            problems = tuple(sharing_problems(value, rollout, trainer))
            if problems:
                raise Refusal(*problems)
        return value

    @field_validator("run_name")
    @classmethod
    def _name_is_not_a_word_of_resume(cls, value: str | None) -> str | None:
        if value in RESUME_WORDS:
            raise Refusal(Problem("run_name", value, f"resume={value} means something else", "any other name, or null"))
        return value


def kept_layer_problems(recipe: Recipe, layers: int) -> tuple[Problem, ...]:
    """Refusals of keep_first_layers and keep_last_layers that leave none of `layers` decoder layers.

    Keys are relative to the run.
    """
    problems: list[Problem] = []
    for side, linears in (
        ("rollout_linears", recipe.rollout_linears),
        ("training_linears", recipe.training_linears),
    ):
        kept = {"keep_first_layers": linears.keep_first_layers, "keep_last_layers": linears.keep_last_layers}
        if sum(kept.values()) < layers:
            continue
        key, other = sorted(kept, key=lambda name: -kept[name])
        wrong = f"with {other} {kept[other]} it leaves none of the model's {layers} layers to quantise"
        allowed = f"{key} + {other} from 0 to {layers - 1}"
        problems.append(Problem(f"recipe.{side}.{key}", kept[key], wrong, allowed))
    return tuple(problems)
