"""The Megatron trainer's section: what stays as it was beside it, and every contradiction."""

from __future__ import annotations

import pytest

from conf.compose import compose, flatten, resolved
from conf.problems import ConfigError
from conf.schema import LrSchedule, MegatronTrainer, Optimizer, TorchTrainer
from conf.schema.megatron import micro_batch_multiple, row_multiple

BASE = ["trainer=megatron", "recipe=bf16"]
FP8 = ["trainer=megatron", "recipe=fp8_e2e"]
EIGHT = ["model=qwen3_8b_base"]
BOTH = ["trainer.ranks=4", "trainer.tensor_parallel_size=2", "trainer.context_parallel_size=2"]
EXPERTS = ["model=qwen3_30b_a3b"]


def test_a_torch_run_has_the_keys_that_it_always_had() -> None:
    """Digests and the comparison of a resumed run cover these: a key more would orphan every run that there is."""
    trainer = {
        "engine": "torch",
        "micro_batch_size": 256,
        "threads": 2,
        "optimizer": {
            "learning_rate": 2e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "weights": "fp32_master",
            "state": "fp32",
            "max_grad_norm": 1.0,
            "max_grad_value": None,
            "max_weight": None,
            "warmup_steps": 5,
        },
    }
    architecture = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    config = compose()
    assert isinstance(config.trainer, TorchTrainer)
    assert resolved(config)["trainer"] == trainer
    assert resolved(config)["model"]["architecture"] == architecture
    assert config.model.architecture is not None
    assert config.model.architecture.model_dump() == architecture, "the key of a warm start"
    shown = {key.removeprefix("model.architecture.") for key in flatten(config) if "architecture" in key}
    assert shown == set(architecture)


def test_yaml_and_schema_agree_on_defaults() -> None:
    trainer = compose(BASE).trainer
    assert trainer == MegatronTrainer(optimizer=Optimizer(learning_rate=1e-6))
    assert trainer.lr_schedule == LrSchedule()  # type: ignore[union-attr]


def test_sizes_of_a_layout() -> None:
    overrides = ["trainer.ranks=16", "trainer.tensor_parallel_size=2", "trainer.context_parallel_size=2"]
    trainer = compose([*BASE, *EIGHT, *overrides]).trainer
    assert isinstance(trainer, MegatronTrainer)
    assert (trainer.model_parallel_size, trainer.data_parallel_size, trainer.sequence_parallel) == (4, 4, True)
    on_cpu = compose([*BASE, *EIGHT, "trainer.device=cpu", "trainer.ranks=2", "trainer.tensor_parallel_size=2"]).trainer
    assert isinstance(on_cpu, MegatronTrainer)
    assert not on_cpu.sequence_parallel


@pytest.mark.parametrize(
    ("overrides", "multiple", "row"),
    [
        ([*BASE], 1, 1),
        ([*FP8], 128, 1),
        ([*FP8, "recipe.training_linears.scaling=mxfp8"], 32, 1),
        ([*FP8, "recipe.training_linears.scaling=tensor"], 16, 1),
        ([*FP8, *EIGHT, "trainer.ranks=4", "trainer.tensor_parallel_size=4"], 512, 1),
        (
            [*FP8, *EIGHT, "trainer.ranks=4", "trainer.tensor_parallel_size=2", "trainer.context_parallel_size=2"],
            512,
            4,
        ),
        ([*BASE, *EIGHT, "trainer.ranks=2", "trainer.context_parallel_size=2"], 4, 4),
        ([*BASE, *EIGHT, "trainer.ranks=4", "trainer.tensor_parallel_size=4"], 4, 1),
    ],
)
def test_multiples_of_a_micro_batch(overrides: list[str], multiple: int, row: int) -> None:
    config = compose(overrides)
    assert isinstance(config.trainer, MegatronTrainer)
    assert micro_batch_multiple(config.trainer, config.recipe.training_linears) == multiple
    assert row_multiple(config.trainer) == row


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*BASE, *EIGHT, "trainer.ranks=6", "trainer.tensor_parallel_size=2", "trainer.pipeline_parallel_size=2"],
            "trainer.ranks = 6: is no multiple of tensor_parallel_size 2 * pipeline_parallel_size 2 * "
            "context_parallel_size 1; allowed: a multiple of 4",
        ),
        (
            [*BASE, *EIGHT, "trainer.ranks=3", "trainer.tensor_parallel_size=3"],
            "trainer.tensor_parallel_size = 3: does not divide the 32 attention heads of model.architecture",
        ),
        (
            [
                *BASE,
                "model.architecture.num_attention_heads=12",
                "model.architecture.num_key_value_heads=3",
                "trainer.ranks=4",
                "trainer.tensor_parallel_size=4",
            ],
            "trainer.tensor_parallel_size = 4: neither divides the 3 key/value heads of model.architecture nor is a "
            "multiple of them; allowed: a divisor or a multiple of 3",
        ),
        (
            [
                *BASE,
                "model.architecture.num_attention_heads=6",
                "model.architecture.num_key_value_heads=3",
                "trainer.ranks=3",
                "trainer.tensor_parallel_size=3",
            ],
            "trainer.tensor_parallel_size = 3: does not divide the 512 channels of the MLP of model.architecture",
        ),
        (
            [*BASE, *EIGHT, "trainer.ranks=8", "trainer.pipeline_parallel_size=8"],
            "trainer.pipeline_parallel_size = 8: does not divide the 36 layers of model.architecture; allowed: a "
            "divisor of 36",
        ),
        (
            [*BASE, *EXPERTS, "trainer.ranks=3", "trainer.expert_parallel_size=3"],
            "trainer.expert_parallel_size = 3: does not divide the 128 experts of model.architecture",
        ),
        (
            [*BASE, *EXPERTS, "trainer.ranks=4", "trainer.expert_parallel_size=4", "trainer.pipeline_parallel_size=2"],
            "trainer.expert_parallel_size = 4: does not divide the 2 tensor, context and data ranks of a pipeline "
            "stage; allowed: a divisor of 2",
        ),
        (
            [*BASE, *EIGHT, "trainer.ranks=2", "trainer.expert_parallel_size=2"],
            "trainer.expert_parallel_size = 2: model.architecture has no experts; allowed: 1",
        ),
        (
            [*BASE, *EXPERTS, "trainer.device=cpu", "trainer.ranks=2", "trainer.tensor_parallel_size=2"],
            "trainer.tensor_parallel_size = 2: experts over tensor ranks need sequence parallelism",
        ),
        (
            [
                *FP8,
                "model.architecture.num_key_value_heads=4",
                "trainer.ranks=4",
                "trainer.tensor_parallel_size=4",
                "model.architecture.intermediate_size=384",
            ],
            "recipe.training_linears.scaling = block: needs multiples of 128, and each of 4 tensor ranks has 96 MLP "
            "channels of model.architecture; allowed: a scaling (or a trainer.tensor_parallel_size) whose multiple",
        ),
        (
            [*BASE, "algorithm.prompts_per_step=1", "algorithm.group_size=2", "trainer.ranks=3"],
            "trainer.ranks = 3: makes 3 data-parallel ranks for the 2 samples of an update; allowed: at most 2",
        ),
        (
            [*BASE, *EIGHT, "trainer.device=cpu", "trainer.ranks=2", "trainer.context_parallel_size=2"],
            "trainer.context_parallel_size = 2: needs Transformer Engine, hence a GPU; allowed: 1",
        ),
        (
            [*FP8, "trainer.device=cpu"],
            "recipe.training_linears.format = e4m3: trainer=megatron computes FP8 with Transformer Engine, and "
            "trainer.device is cpu; allowed: bf16, or trainer.device=gpu",
        ),
        ([*BASE, "trainer.device=cpu", "trainer.offload=true"], "trainer.offload = true: on CPU there is no other"),
        (
            [*BASE, "trainer.lr_schedule.shape=cosine"],
            "trainer.lr_schedule.decay_updates = null: a cosine schedule needs an end",
        ),
        (
            [*BASE, "trainer.lr_schedule.shape=linear", "trainer.lr_schedule.decay_updates=5"],
            "trainer.lr_schedule.decay_updates = 5: ends before the warm-up does (trainer.optimizer.warmup_steps 5); "
            "allowed: an integer from 6",
        ),
        (
            [
                *BASE,
                "trainer.lr_schedule.shape=linear",
                "trainer.lr_schedule.decay_updates=9",
                "trainer.lr_schedule.min_lr=1e-3",
            ],
            "trainer.lr_schedule.min_lr = 0.001: exceeds trainer.optimizer.learning_rate 1e-06",
        ),
        (
            [*FP8, "recipe.training_linears.scaling=channel"],
            "recipe.training_linears.scaling = channel: trainer=megatron does not have it; allowed: block, tensor, "
            "tensor_delayed, mxfp8",
        ),
        (
            [*FP8, "recipe.training_linears.weight_block=[64,64]"],
            "recipe.training_linears.weight_block = [64, 64]: Transformer Engine has 128 x 128 alone",
        ),
        (
            [*FP8, "recipe.training_linears.activation_group=64"],
            "recipe.training_linears.weight_block = [128, 128]: Transformer Engine has 128 x 128 alone, with "
            "activation_group 128 (here 64)",
        ),
        (
            [*FP8, "recipe.training_linears.scaling=tensor", "recipe.training_linears.scale=power_of_two"],
            "recipe.training_linears.scale = power_of_two: trainer=megatron has it with scaling block alone",
        ),
        (
            [*FP8, "recipe.training_linears.scaling=tensor_delayed", "recipe.training_linears.keep_last_layers=1"],
            "recipe.training_linears.keep_last_layers = 1: Megatron keeps no layer in BF16 under delayed scaling",
        ),
        (
            [*FP8, "recipe.training_linears.scaling=tensor_delayed", "trainer.recompute=full"],
            "trainer.recompute = full: under scaling tensor_delayed layers would be computed again with the scales of "
            "an earlier pass; allowed: selective",
        ),
        (
            [*FP8, "recipe.training_linears.scaling=tensor_delayed", "algorithm.kl_coef=0.01"],
            "algorithm.kl_coef = 0.01: under scaling tensor_delayed the reference policy's scales move with each "
            "update of the policy; allowed: 0, or another recipe.training_linears.scaling",
        ),
        (
            [*FP8, "recipe.training_linears.exclude=[model.layers.0.mlp.up_proj]"],
            'recipe.training_linears.exclude = ["model.layers.0.mlp.up_proj"]: trainer=megatron keeps whole layers',
        ),
        (
            [
                *FP8,
                *EIGHT,
                "trainer.ranks=4",
                "trainer.pipeline_parallel_size=4",
                "recipe.training_linears.keep_first_layers=10",
            ],
            "recipe.training_linears.keep_first_layers = 10: exceeds the 9 layers of a pipeline stage",
        ),
        (
            [*FP8, "trainer.tokens_per_micro_batch=127"],
            "trainer.tokens_per_micro_batch = 127: is less than the 128 tokens that a micro-batch is padded to",
        ),
        ([*BASE, "trainer.micro_batch_size=4"], "trainer.micro_batch_size = 4: unknown key"),
        (["trainer=torch", "trainer.ranks=2"], "trainer.ranks = 2: unknown key"),
        (
            ["trainer.engine=megatrom"],
            "trainer.engine = megatrom: not one of the choices; allowed: one of torch, megatron",
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    assert message in str(refused.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        compose([*FP8, "trainer.device=cpu", "trainer.context_parallel_size=2", "trainer.offload=true"])
    assert len(refused.value.problems) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.ranks=2", "trainer.tensor_parallel_size=2"],
        ["trainer.optimizer.state=bf16"],
        ["trainer.optimizer.state=fp8", "recipe=fp8_e2e_kv"],
        ["trainer.device=cpu", "trainer.distributed_optimizer=false", "trainer.optimizer.state=fp8"],
        ["trainer.optimizer.weights=bf16_kahan", "trainer.optimizer.max_weight=1"],
        ["trainer.optimizer.weights=bf16", "trainer.optimizer.max_grad_value=1"],
        ["trainer.device=cpu", "trainer.ranks=2", "trainer.pipeline_parallel_size=2"],
        ["trainer.lr_schedule.shape=cosine", "trainer.lr_schedule.decay_updates=100"],
        [
            "recipe=fp8_e2e",
            "recipe.training_linears.scale=power_of_two",
            "recipe.training_linears.gradient_format=e5m2",
        ],
        ["recipe=fp8_e2e", "recipe.training_linears.keep_first_layers=1"],
        # A recipe that trains in BF16 does not mind what its FP8 keys say.
        ["recipe.training_linears.exclude=[lm_head]", "recipe.training_linears.scaling=channel"],
    ],
)
def test_what_fits_is_taken(overrides: list[str]) -> None:
    assert compose([*BASE, *overrides]).trainer.engine == "megatron"
