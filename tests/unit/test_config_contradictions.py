"""Values that contradict each other, or what the product can do; and the accepted side of each line."""

from __future__ import annotations

import pytest

from conf.compose import ConfigError, compose

DISTRIBUTION = (
    "changes the sampling distribution: the recorded log-probabilities would no longer be those of the policy"
)
URLS = "a local path, file://PATH or s3://BUCKET/PREFIX"
CREDENTIAL = (
    "a credential, which would be stored with the run's parameters; allowed: the environment "
    "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or a profile"
)


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["recipe=fp8_rollout_kv", "recipe.calibration.enabled=false", "recipe.calibration.refresh=never"],
            "recipe.calibration.enabled = false: an FP8 KV cache (kv.dtype e4m3) has no scales "
            "without calibration; "
            "allowed: true, or false with kv.dtype bf16",
        ),
        (
            ["recipe=bf16", "recipe.kv.quantize_query=true"],
            "recipe.kv.quantize_query = true: an FP8 query needs an FP8 KV cache, and dtype is bf16; "
            "allowed: false, or true with dtype e4m3",
        ),
        (
            ["recipe=fp8_rollout", "correction=none"],
            "correction.weight = none: an FP8 rollout (recipe.rollout_linears.format e4m3) samples "
            "from another policy than the one trained; allowed: a weight or a rejection rule "
            "(correction=token_truncation), or correction.allow_uncorrected=true",
        ),
        (
            ["recipe=fp8_rollout_kv", "recipe.rollout_linears.format=bf16", "correction.weight=none"],
            "correction.weight = none: an FP8 rollout (recipe.kv.dtype e4m3) samples from another policy than the one "
            "trained; allowed: a weight or a rejection rule (correction=token_truncation), or "
            "correction.allow_uncorrected=true",
        ),
        (
            ["correction.name=none"],
            "correction.name = none: a label, which selects nothing; allowed: correction=none, or another name",
        ),
        (
            ["algorithm=grpo", "algorithm.name=dapo"],
            "algorithm.name = dapo: a label, which selects nothing; allowed: algorithm=dapo, or another name",
        ),
        (
            ["algorithm=gspo", "algorithm.normalization=token_mean"],
            "algorithm.normalization = token_mean: lets long responses weigh more, and ratio sequence is one ratio a "
            "response; allowed: sequence_mean or fixed_length with ratio sequence",
        ),
        (
            ["algorithm=gspo", "algorithm.surrogate=cispo"],
            "algorithm.surrogate = cispo: is defined for a ratio of each token; allowed: clip with ratio sequence",
        ),
        (
            ["algorithm.group_size=2", "algorithm.advantage_scale=leave_one_out_std"],
            "algorithm.advantage_scale = leave_one_out_std: the standard deviation of the others needs "
            "two of them, and "
            "group_size is 2; allowed: another scale, or group_size >= 3",
        ),
        (
            ["algorithm.overlong.buffer=9"],
            "algorithm.overlong.buffer = 9: exceeds rollout.max_new_tokens 8; allowed: an integer from 1 to 8, or null",
        ),
        (
            ["recipe=bf16", "correction.weight=none", "correction.outside=mask"],
            "correction.outside = mask: weight none has no bound to be beyond; allowed: truncate, or a weight",
        ),
        (
            ["correction.rejection=[{statistic:k1,level:token,lower:1.0e-310}]"],
            "correction.rejection[0].lower = 1e-310: outside of what k1 can be bounded by; allowed: a number in "
            "(0, 1), or null",
        ),
        (
            ["correction.outside=mask", "correction.cap=null"],
            "correction.outside = mask: there is no bound to be beyond; allowed: truncate, or mask with cap or lower",
        ),
        (
            ["correction.rejection=[{statistic:k3,level:token,lower:0.1,upper:0.2}]"],
            "correction.rejection[0].lower = 0.1: k3 is 0 at agreement and has no lower bound; allowed: null",
        ),
        (
            ["correction.rejection=[{statistic:k1,level:token,lower:1.5}]"],
            "correction.rejection[0].lower = 1.5: outside of what k1 can be bounded by; allowed: a "
            "number in (0, 1), or null",
        ),
        (
            ["correction.rejection=[{statistic:k1,level:token,upper:0.5}]"],
            "correction.rejection[0].upper = 0.5: outside of what k1 can be bounded by; allowed: a number > 1, or null",
        ),
        (
            ["correction.rejection=[{statistic:probability,level:token,upper:1.5}]"],
            "correction.rejection[0].upper = 1.5: outside of what probability can be bounded by; allowed: a number in "
            "(0, 1], or null",
        ),
        (
            ["rollout=vllm", "benchmark.rungs.fp8_linear.engine_args.quantization=fp8"],
            "benchmark.rungs.fp8_linear.engine_args.quantization = fp8: is not free: the recipe; allowed: "
            "leaving it out",
        ),
        (
            ["correction.rejection=[{statistic:k1,upper:2.0}]"],
            "correction.rejection[0].level = (missing): required; allowed: one of token, sequence_mean, sequence_max, "
            "sequence_sum",
        ),
        (
            ["correction.rejection=[{statistic:k2,level:sequence_max}]"],
            "correction.rejection[0].upper = null: a rule without bounds rejects nothing; allowed: "
            "lower, upper or both",
        ),
        (["rollout.top_p=0.95"], f"rollout.top_p = 0.95: {DISTRIBUTION}; allowed: 1.0"),
        (["rollout.top_k=50"], f"rollout.top_k = 50: {DISTRIBUTION}; allowed: null"),
        (
            ["algorithm.prompts_per_step=5", "algorithm.group_size=4", "algorithm.updates_per_step=3"],
            "algorithm.updates_per_step = 3: does not divide the 20 samples of a step "
            "(prompts_per_step 5 * group_size 4); allowed: a divisor of 20; did you mean 2?",
        ),
        (
            [
                "algorithm.prompts_per_step=6",
                "algorithm.group_size=4",
                "algorithm.updates_per_step=2",
                "trainer.micro_batch_size=5",
            ],
            "trainer.micro_batch_size = 5: does not divide the 12 samples of an update "
            "(algorithm.prompts_per_step "
            "6 * algorithm.group_size 4 / algorithm.updates_per_step 2); allowed: a divisor of 12, "
            "or 12 and more; "
            "did you mean 4?",
        ),
        (
            ["model.architecture.num_hidden_layers=3", "recipe.rollout_linears.keep_last_layers=3"],
            "recipe.rollout_linears.keep_last_layers = 3: with keep_first_layers 0 it leaves none "
            "of the model's "
            "3 layers to quantise; allowed: keep_last_layers + keep_first_layers from 0 to 2",
        ),
        (
            ["model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=3"],
            "model.architecture.num_key_value_heads = 3: does not divide num_attention_heads 4; "
            "allowed: a divisor of 4",
        ),
        (
            ["model.architecture.max_position_embeddings=64", "rollout.max_new_tokens=64"],
            "rollout.max_new_tokens = 64: leaves a prompt no room in "
            "model.architecture.max_position_embeddings 64; "
            "allowed: an integer from 1 to 63",
        ),
        (
            ["model.architecture=null"],
            "model.path = null: no model: architecture is null too; allowed: a folder with config.json, "
            "a tokenizer and *.safetensors, or model=tiny_qwen3",
        ),
        (
            ["model=local"],
            "model.path = null: no model: architecture is null too; allowed: a folder with config.json, "
            "a tokenizer and *.safetensors, or model=tiny_qwen3",
        ),
        (
            ["model.path=some/dir", "model.architecture.hidden_size=512"],
            "model.architecture.hidden_size = 512: has no effect beside model.path some/dir; "
            "allowed: leaving one of them out",
        ),
        (["data=jsonl"], "data.path = (missing): required; allowed: text that is not empty"),
        (
            ["data=jsonl", "data.path=x.jsonl", "data.prompt_template='Solve {q}'"],
            "data.prompt_template = Solve {q}: the question has no place in it; allowed: text that contains {question}",
        ),
        (["storage=s3"], "storage.url = (missing): required; allowed: text that is not empty"),
        (
            ["storage.url=gs://b/x"],
            f"storage.url = gs://b/x: a protocol that is not supported; allowed: {URLS}",
        ),
        (
            ["storage.url=simplecache::s3://b"],
            f"storage.url = simplecache::s3://b: a protocol that is not supported; allowed: {URLS}",
        ),
        (["storage.url=s3:b"], f"storage.url = s3:b: a protocol that is not supported; allowed: {URLS}"),
        (["storage.url=s3://"], f"storage.url = s3://: names no bucket or folder; allowed: {URLS}"),
        (["storage.url=s3:///x"], f"storage.url = s3:///x: names no bucket; allowed: {URLS}"),
        (["storage.options.secret=abc"], f"storage.options.secret = (hidden): {CREDENTIAL}"),
        (
            ["storage.options.client_kwargs.aws_secret_access_key=abc"],
            f"storage.options.client_kwargs.aws_secret_access_key = (hidden): {CREDENTIAL}",
        ),
        (
            ["tracking.uri=postgresql://me:word@host/db"],
            "tracking.uri = postgresql://...: holds a password, which would be stored with the "
            "run's parameters; "
            "allowed: a URI without one, or null with the URI in the environment variable "
            "MLFLOW_TRACKING_URI",
        ),
        (
            ["tracking.uri=mlruns"],
            "tracking.uri = mlruns: not an MLflow tracking URI; allowed: null, or a URI that "
            "begins with one of "
            "http:, https:, sqlite:, postgresql:, mysql:, mssql:, file:, databricks:",
        ),
        (
            ["cluster=existing"],
            "cluster.address = null: not the address of a Ray cluster; allowed: HOST:PORT or auto, on a machine of the "
            "cluster",
        ),
        (
            ["cluster=existing", "cluster.address=ray://head:10001"],
            "cluster.address = ray://head:10001: Ray's client cannot stream samples from an actor; allowed: HOST:PORT "
            "or auto, on a machine of the cluster",
        ),
        (
            ["cluster.worker_python=venv/bin/python"],
            "cluster.worker_python = venv/bin/python: not the path of an executable; allowed: an absolute path of "
            "letters, digits and . _ + - /, such as /opt/engines/bin/python; or null",
        ),
        (
            ["cluster.worker_python='/bin/python;date'"],
            "cluster.worker_python = /bin/python;date: not the path of an executable; allowed: an absolute path of "
            "letters, digits and . _ + - /, such as /opt/engines/bin/python; or null",
        ),
        (
            ["cluster.address=10.0.0.1:6379"],
            "cluster.address = 10.0.0.1:6379: a local cluster is started by the run itself; "
            "allowed: null, or cluster=existing with this address",
        ),
    ],
)
def test_contradictions(overrides: list[str], line: str) -> None:
    assert problems(overrides) == [line]


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=fp8_e2e_kv", "correction=none", "correction.allow_uncorrected=true"],
        ["recipe=bf16", "correction=none"],
        ["recipe=bf16", "recipe.training_linears.format=e4m3", "correction=none"],
        ["rollout.top_p=1"],
        ["recipe.calibration.margin=1"],
        ["storage.url=file:///var/checkpoints"],
        ["storage.url=runs/a:b"],
        ["storage.url=s3://bucket"],
        ["tracking.uri=sqlite:///runs/mlflow.db"],
        ["cluster=existing", "cluster.address=head:6379", "cluster.worker_python=/opt/engines/bin/python3.12"],
    ],
)
def test_the_other_side_of_each_line_is_accepted(overrides: list[str]) -> None:
    compose(overrides)
