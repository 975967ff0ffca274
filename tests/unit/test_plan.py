"""The plan of a dry run: names, bytes and counts, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.schema import RunConfig
from tasks.engines.plan import plan_run, rollout_linears, shape_model
from tasks.engines.protocols import EngineError
from tasks.engines.tiny_model import create_model, save_model, train_tokenizer

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 256,
    "tie_word_embeddings": "true",
}
EMBEDDING = 256 * 256
ATTENTION = 256 * 256 + 2 * 128 * 256 + 256 * 256
MLP = 3 * 512 * 256
NORMS = 2 * 256 + 2 * 128
PARAMETERS = EMBEDDING + 2 * (ATTENTION + MLP + NORMS) + 256
BLOCKS = (4 + 2 + 2 + 4) + 3 * 8
"""128x128 blocks of one layer: q, k, v, o, then gate, up, down."""


def _config(*overrides: str, **shape: object) -> RunConfig:
    dimensions = [f"model.architecture.{key}={value}" for key, value in (SHAPE | shape).items()]
    return compose([*dimensions, "steps=5", "algorithm.updates_per_step=2", *overrides])


def test_parameters_and_optimizer() -> None:
    plan = plan_run(_config("recipe=bf16"))
    assert plan.parameters == PARAMETERS == 1_246_976
    assert plan.layers == 2
    assert plan.optimizer_bytes == 12 * PARAMETERS
    assert plan.optimizer_updates == 5 * 2
    assert plan.rollout.weight_bytes == plan.training.weight_bytes == 2 * PARAMETERS


def test_an_untied_head_counts_and_stays_bf16() -> None:
    plan = plan_run(_config("recipe=fp8_e2e", tie_word_embeddings="false"))
    assert plan.parameters == PARAMETERS + EMBEDDING
    assert plan.rollout.linears.kept == plan.training.linears.kept == ("lm_head",)


@pytest.mark.parametrize(
    "recipe, rollout, training, kv_bytes",
    [
        ("bf16", False, False, 2),
        ("fp8_rollout", True, False, 2),
        ("fp8_rollout_kv", True, False, 1),
        ("fp8_e2e", True, True, 2),
        ("fp8_e2e_kv", True, True, 1),
    ],
)
def test_formats_and_bytes_of_each_recipe(recipe: str, rollout: bool, training: bool, kv_bytes: int) -> None:
    plan = plan_run(_config(f"recipe={recipe}"))
    assert len(plan.rollout.linears.quantized) == (14 if rollout else 0)
    assert len(plan.training.linears.quantized) == (14 if training else 0)
    codes_and_scales = 2 * (ATTENTION + MLP + 4 * BLOCKS)
    rest = 2 * (EMBEDDING + 2 * NORMS + 256)
    assert plan.rollout.weight_bytes == (codes_and_scales + rest if rollout else 2 * PARAMETERS)
    assert plan.training.weight_bytes == 2 * PARAMETERS, "the trainer holds a BF16 copy whatever it computes in"
    assert plan.kv_bytes_per_token == 2 * 2 * 1 * 128 * kv_bytes


def test_more_heads_and_layers_take_more_cache() -> None:
    plan = plan_run(_config("recipe=bf16", num_hidden_layers=3, num_key_value_heads=2))
    assert plan.kv_bytes_per_token == 2 * 3 * 2 * 128 * 2


def test_kept_layers_are_counted_in_bf16() -> None:
    plan = plan_run(_config("recipe=fp8_rollout", "recipe.rollout_linears.keep_first_layers=1"))
    layer, quantized = ATTENTION + MLP, ATTENTION + MLP + 4 * BLOCKS
    assert plan.rollout.weight_bytes == quantized + 2 * (PARAMETERS - layer)
    assert {name.split(".")[2] for name in plan.rollout.linears.quantized} == {"1"}


def test_edge_blocks_have_scales_too() -> None:
    """Blocks of 96x160 do not divide the matrices: the number of scales is rounded up."""
    plan = plan_run(_config("recipe=fp8_rollout", "recipe.rollout_linears.weight_block=[96,160]"))
    blocks = 3 * 2 + 2 * (2 * 2) + 3 * 2 + 2 * (6 * 2) + 3 * 4
    expected = 2 * (ATTENTION + MLP + 4 * blocks) + 2 * (EMBEDDING + 2 * NORMS + 256)
    assert plan.rollout.weight_bytes == expected


def test_a_recipe_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(
        EngineError, match=r"exclude names no linear layer of this model: model\.layers\.7\.mlp\.up_proj"
    ):
        plan_run(_config("recipe=fp8_rollout", "recipe.rollout_linears.exclude=[model.layers.7.mlp.up_proj]"))


def test_no_weights_are_made() -> None:
    model = shape_model(_config())
    assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_local_folder_stands_before_the_configured_architecture(tmp_path: Path) -> None:
    config = _config("recipe=fp8_rollout")
    assert config.model.architecture is not None
    other = config.model.architecture.model_copy(update={"num_hidden_layers": 1, "hidden_size": 128})
    tokenizer = train_tokenizer(["1 + 1"], 128)
    save_model(create_model(other, 0, 1), tokenizer, tmp_path)
    assert len(rollout_linears(config, tmp_path)) == 7
    assert shape_model(config, tmp_path).config.hidden_size == 128
    local = compose(["recipe=fp8_rollout", f"model.path={tmp_path}"])
    plan = plan_run(local)
    assert (plan.layers, len(plan.rollout.linears.quantized)) == (1, 7)
    assert rollout_linears(local, tmp_path) == plan.rollout.linears.quantized
    assert rollout_linears(compose(["recipe=bf16", f"model.path={tmp_path}"]), tmp_path) == ()
