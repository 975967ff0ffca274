"""Composition: every shipped option, the recipe table, null, threads, flattening and the digest."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from pydantic import ValidationError

from conf.compose import CONFIG_DIR, compose, digest, flatten, resolved
from conf.overrides import FREE_MAPS, groups
from conf.problems import known_keys
from conf.schema import (
    Algorithm,
    Calibration,
    Cluster,
    Correction,
    KvPrecision,
    LinearPrecision,
    Model,
    Optimizer,
    ReasoningGymData,
    RunConfig,
    Section,
    TinyArchitecture,
    TorchRollout,
    Tracking,
)

# Options that cannot stand without a value from the user, or contradict the default recipe on purpose.
COMPANIONS = {
    ("model", "local"): ["model.path=checkpoints/base"],
    ("data", "jsonl"): ["data.path=questions.jsonl"],
    ("data", "synthetic"): ["model.warm_start=null"],
    ("cluster", "existing"): ["cluster.address=127.0.0.1:6379"],
    ("storage", "s3"): ["storage.url=s3://bucket/prefix"],
    ("correction", "none"): ["correction.allow_uncorrected=true"],
}
OPTIONS = [(group, option) for group, options in groups(CONFIG_DIR).items() for option in options]


def test_the_groups_are_those_of_the_product() -> None:
    assert groups(CONFIG_DIR) == {
        "algorithm": ("cispo", "dapo", "dr_grpo", "grpo", "grpo_leave_one_out", "gspo", "reinforce_pp", "rloo"),
        "benchmark": ("ladder", "ladder_h200"),
        "breakers": ("off", "strict", "warn"),
        "cluster": ("colocated", "existing", "local"),
        "correction": (
            "geometric_mask",
            "geometric_mask_token_importance",
            "geometric_mask_token_truncation",
            "k1_token",
            "k2_sequence_max",
            "k3_sequence_mean",
            "k3_sequence_mean_token_truncation",
            "k3_token",
            "negative_sequence_mask",
            "none",
            "outlier_veto",
            "probability_trust_region",
            "product_mask_sequence_truncation",
            "self_normalized",
            "sequence_mask",
            "sequence_truncation",
            "token_importance",
            "token_mask",
            "token_truncation",
        ),
        "data": ("jsonl", "reasoning_gym", "synthetic"),
        "deadlines": ("generous",),
        "model": (
            "llama3_1_8b_instruct",
            "local",
            "moonlight_16b_a3b",
            "qwen3_30b_a3b",
            "qwen3_8b_base",
            "qwen3_small",
            "smollm2_135m",
            "tiny_qwen3",
        ),
        "recipe": ("bf16", "fp8_e2e", "fp8_e2e_kv", "fp8_rollout", "fp8_rollout_kv"),
        "rollout": ("torch", "vllm"),
        "storage": ("local", "s3"),
        "sweep": ("calibration_ablation", "h200", "nightly", "recipes_h200", "smoke"),
        "tracking": ("mlflow",),
        "trainer": ("megatron", "torch"),
    }


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_shipped_option_composes_and_says_every_key(group: str, option: str) -> None:
    config = compose([f"{group}={option}", *COMPANIONS.get((group, option), [])])
    section = getattr(config, group)
    shipped = yaml.safe_load((CONFIG_DIR / group / f"{option}.yaml").read_text(encoding="utf-8"))
    assert set(shipped) == set(type(section).model_fields)
    for name in ("name", "kind", "engine"):
        if name in shipped:
            assert getattr(section, name) == shipped[name]


@pytest.mark.parametrize(
    ("recipe", "rollout", "kv", "training"),
    [
        ("bf16", "bf16", "bf16", "bf16"),
        ("fp8_rollout", "e4m3", "bf16", "bf16"),
        ("fp8_rollout_kv", "e4m3", "e4m3", "bf16"),
        ("fp8_e2e", "e4m3", "bf16", "e4m3"),
        ("fp8_e2e_kv", "e4m3", "e4m3", "e4m3"),
    ],
)
def test_recipe_table(recipe: str, rollout: str, kv: str, training: str) -> None:
    made = compose([f"recipe={recipe}"]).recipe
    quantized_kv = kv == "e4m3"
    assert made.name == recipe
    assert made.rollout_linears == LinearPrecision.model_validate({"format": rollout})
    assert made.training_linears == LinearPrecision.model_validate({"format": training})
    assert made.kv == KvPrecision.model_validate({"dtype": kv, "quantize_query": quantized_kv})
    assert made.calibration == Calibration(enabled=quantized_kv)
    assert made.rollout_linears.quantized == (rollout == "e4m3")
    assert made.training_linears.quantized == (training == "e4m3")
    assert made.kv.quantized == quantized_kv


def test_the_default_is_the_full_fp8_recipe() -> None:
    assert compose().recipe.name == "fp8_e2e_kv"


def test_yaml_and_schema_agree_on_defaults() -> None:
    config = compose()
    assert config.algorithm == Algorithm()
    assert config.correction == Correction()
    assert config.model.architecture == TinyArchitecture()
    assert config.data.model_copy(update={"parameters": {}}) == ReasoningGymData()
    assert config.rollout == TorchRollout()
    assert config.trainer.optimizer == Optimizer()
    assert config.cluster == Cluster()
    assert config.tracking == Tracking()
    shipped = yaml.safe_load((CONFIG_DIR / "config.yaml").read_text(encoding="utf-8"))
    scalars = {name for name, field in RunConfig.model_fields.items() if not field.is_required()}
    assert set(shipped) - {"defaults"} == scalars
    assert all(RunConfig.model_fields[name].default == shipped[name] for name in scalars)


def test_every_field_is_documented() -> None:
    sections: list[type[Section]] = _subclasses(Section)
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert undocumented == []
    assert len(sections) > 15


def _subclasses(section: type[Section]) -> list[type[Section]]:
    return [found for child in section.__subclasses__() for found in (child, *_subclasses(child))]


def test_overrides_of_every_type() -> None:
    config = compose(
        [
            "steps=7",
            "trainer.optimizer.learning_rate=1e-6",
            "rollout.temperature=1",
            "recipe.rollout_linears.weight_block=[64,128]",
            "recipe.rollout_linears.exclude=[model.layers.0.mlp.down_proj]",
            "run_name='2026'",
            "storage.options.endpoint_url=http://127.0.0.1:8333",
            "storage.options.client_kwargs.region_name=eu",
            "data.parameters.max_digits=3",
            "+data.parameters.whitespace=random",
            "~data.parameters.operators",
            "~data.parameters.allow_parentheses",
            "~data.parameters.min_digits",
        ]
    )
    assert config.steps == 7
    assert config.trainer.optimizer.learning_rate == 1e-6
    assert isinstance(config.rollout.temperature, float)
    assert config.rollout.temperature == 1.0
    assert config.recipe.rollout_linears.weight_block == (64, 128)
    assert config.recipe.rollout_linears.exclude == ("model.layers.0.mlp.down_proj",)
    assert config.run_name == "2026"
    assert config.storage.options == {
        "endpoint_url": "http://127.0.0.1:8333",
        "client_kwargs": {"region_name": "eu"},
    }
    assert isinstance(config.data, ReasoningGymData)
    assert config.data.parameters == {
        "min_terms": 3,
        "max_terms": 3,
        "max_digits": 3,
        "allow_negation": False,
        "whitespace": "random",
    }


def test_small_floats_in_yaml_are_numbers() -> None:
    config = compose()
    assert config.algorithm.advantage_eps == 1e-6
    assert config.trainer.optimizer.eps == 1e-8
    assert config.trainer.optimizer.learning_rate == 2e-4


def test_the_last_of_two_overrides_counts() -> None:
    config = compose(["recipe=bf16", "steps=3", "steps=4", "recipe=fp8_e2e"])
    assert (config.recipe.name, config.steps) == ("fp8_e2e", 4)


def test_a_value_may_refer_to_another_key() -> None:
    assert compose(["steps=9", "eval_every=${steps}"]).eval_every == 9


def test_parameters_of_another_task_replace_the_shipped_ones() -> None:
    config = compose(["data.task=spell_backward", "~data.parameters", "data.parameters.max_word_len=4"])
    assert isinstance(config.data, ReasoningGymData)
    assert config.data.parameters == {"max_word_len": 4}


def test_null_stays_null() -> None:
    config = compose(["run_name=null", "model.warm_start=null"])
    nulls = (
        config.run_name,
        config.model.warm_start,
        config.model.path,
        config.rollout.top_k,
        config.tracking.uri,
    )
    assert nulls == (None,) * 5
    flat = flatten(config)
    assert [flat[key] for key in ("run_name", "model.warm_start", "model.path", "cluster.address")] == [None] * 4


def test_the_word_none_is_not_null() -> None:
    config = compose(["recipe=bf16", "correction=none"])
    assert config.correction.name == "none"


def test_a_path_alone_replaces_the_small_model() -> None:
    by_path, by_group = compose(["model.path=some/dir"]), compose(["model=local", "model.path=some/dir"])
    assert by_path.model == Model(name="local", path="some/dir", architecture=None, warm_start=None)
    assert by_group == by_path
    assert compose(["model.path=some/dir", "model.name=mine"]).model.name == "mine"


def test_samples_of_steps_and_updates() -> None:
    overrides = ["algorithm.prompts_per_step=6", "algorithm.group_size=4", "algorithm.updates_per_step=2"]
    algorithm = compose([*overrides, "trainer.micro_batch_size=4"]).algorithm
    assert (algorithm.samples_per_step, algorithm.samples_per_update) == (24, 12)


def test_micro_batch_may_exceed_an_update() -> None:
    overrides = ["algorithm.prompts_per_step=2", "algorithm.group_size=3", "trainer.micro_batch_size=100"]
    assert compose(overrides).trainer.micro_batch_size == 100


def test_config_is_immutable() -> None:
    config = compose()
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.recipe.kv.dtype = "bf16"


def test_sixteen_threads_compose_at_once() -> None:
    recipes = groups(CONFIG_DIR)["recipe"]
    barrier = threading.Barrier(16)

    def one(index: int) -> list[tuple[str, int, int]]:
        barrier.wait()
        made = []
        for repeat in range(2):
            overrides = [f"recipe={recipes[index % 5]}", f"steps={index + 1}", f"seed={repeat}"]
            config = compose(overrides)
            made.append((config.recipe.name, config.steps, config.seed))
        return made

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(16)))
    assert results == [[(recipes[i % 5], i + 1, repeat) for repeat in range(2)] for i in range(16)]


def test_resolved_is_json_and_comes_back_equal() -> None:
    config = compose(["recipe.rollout_linears.exclude=[a.b]"])
    copy = RunConfig.model_validate(json.loads(json.dumps(resolved(config))))
    assert copy == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_flatten_gives_dotted_scalars() -> None:
    flat = flatten(compose(["storage.options.anon=true"]))
    assert flat["recipe.rollout_linears.format"] == "e4m3"
    assert flat["recipe.rollout_linears.weight_block"] == "[128, 128]"
    assert flat["recipe.training_linears.exclude"] == "[]"
    assert flat["data.parameters.max_terms"] == 3
    assert flat["storage.options.anon"] is True
    assert flatten(compose())["storage.options"] == "{}"
    assert {type(value) for value in flat.values()} <= {str, int, float, bool, type(None)}
    leaves = [key for key in known_keys() if key in flat]
    free = tuple(f"{name}." for name in FREE_MAPS)
    assert len(leaves) == len([key for key in flat if not key.startswith(free)])


def test_digest_is_sha256_of_canonical_json_of_what_shapes_results() -> None:
    plain = resolved(compose())
    for neutral in ("steps", "checkpoint_every", "resume", "run_name", "allocation_s", "runs_dir"):
        del plain[neutral]
    for surroundings in ("cluster", "deadlines", "breakers", "tracking", "storage", "benchmark", "sweep"):
        del plain[surroundings]
    del plain["rollout"]["kv_preflight"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert digest(compose()) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=3"],
        ["checkpoint_every=1"],
        ["allocation_s=60"],
        ["resume=auto"],
        ["run_name=another"],
        ["runs_dir=elsewhere"],
        ["cluster=existing", "cluster.address=127.0.0.1:6379"],
        ["cluster.num_cpus=8"],
        ["tracking.uri=http://127.0.0.1:5000"],
        ["storage=s3", "storage.url=s3://bucket"],
        ["storage.keep_last=1"],
        ["benchmark.repeats=1"],
        ["sweep.seeds=[7]"],
        ["rollout.kv_preflight.enabled=false"],
        ["rollout.kv_preflight.warn=0.01", "rollout.kv_preflight.refuse=0.5"],
        ["rollout.temperature=1"],
        ["data.parameters={max_digits: 1, min_digits: 1}"],
    ],
)
def test_digest_does_not_depend_on_surroundings_or_spelling(overrides: list[str]) -> None:
    assert digest(compose(overrides)) == digest(compose())


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "eval_every=1",
        "recipe=fp8_e2e",
        "recipe.calibration.margin=1.1",
        "algorithm.kl_coef=0.1",
        "correction.cap=3",
        "model.warm_start.seed=9",
        "model.path=some/dir",
        "data.eval_share=0.4",
        "rollout.threads=1",
        "trainer.optimizer.beta1=0.8",
    ],
)
def test_digest_depends_on_what_shapes_results(override: str) -> None:
    assert digest(compose([override])) != digest(compose())
