"""What configurations and recipes mean for Megatron: dimensions, rotary frequencies, FP8 arguments, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.compose import compose
from conf.schema import Recipe
from tasks.engines.megatron_config import (
    FP32_SCALES,
    Layout,
    RotaryPlan,
    check_kept_layers,
    check_machine,
    plan_model,
    precision_arguments,
)
from tasks.engines.protocols import EngineError
from tests.engines.megatron_models import CONFIGS, LLAMA3


def _folder(path: Path, name: str, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = CONFIGS[name]().to_dict() | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def _recipe(name: str, *overrides: str) -> Recipe:
    return compose([f"recipe={name}", *(f"recipe.training_linears.{o}" for o in overrides)]).recipe


def test_dimensions_come_from_the_configuration(tmp_path: Path) -> None:
    plan = plan_model(_folder(tmp_path, "moe_raw_shares"), Layout(expert=2, data=2))
    shape = plan.shape
    assert (shape.layers, shape.hidden, shape.heads, shape.groups, shape.head_dim) == (2, 64, 4, 2, 32)
    assert (shape.mlp, shape.experts, plan.chosen_experts, plan.normalized_choice) == (48, 4, 2, False)
    assert (shape.qk_norm, shape.qkv_bias, shape.tied) == (True, False, False)


@pytest.mark.parametrize("tensor, rows", [(1, 256), (2, 256), (4, 512)])
def test_the_vocabulary_fills_multiples_of_128_on_each_rank(tmp_path: Path, tensor: int, rows: int) -> None:
    shape = plan_model(_folder(tmp_path, "llama_tied"), Layout(tensor=tensor)).shape
    assert (shape.vocabulary, shape.padded_vocabulary) == (200, rows)


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "default", "rope_theta": 500000.0}])
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(rope), max_position_embeddings=64)
    plan = plan_model(_folder(tmp_path, "llama_scaled", rope_parameters=rope), Layout()).rotary
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(plan.frequencies(128), expected)
    changed = not torch.equal(expected, RotaryPlan(rope["rope_theta"]).frequencies(128))
    assert changed == (rope["rope_type"] == "llama3")


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "llama_tied",
            {"model_type": "gemma"},
            "model_type = gemma: .*allowed: qwen3, qwen2, llama, mistral, qwen3_moe",
        ),
        ("mistral_narrow", {"sliding_window": 16}, "sliding_window = 16: .*allowed: None"),
        ("llama_tied", {"attention_bias": True}, "attention_bias = True"),
        ("llama_tied", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen2_bias", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window = True"),
        ("moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_tied", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        (
            "llama_tied",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = linear: .*allowed: default, llama3",
        ),
        (
            "llama_tied",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 0\.5",
        ),
        ("llama_tied", {"model_type": "deepseek_v3"}, "deepseek_v3: .*multi-head latent attention"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=f"config.json: .*{message}"):
        plan_model(_folder(tmp_path, name, **changes), Layout())


def test_a_configuration_that_transformers_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)config\.json: .*not a multiple of the number of attention heads"):
        plan_model(_folder(tmp_path, "llama_tied", num_attention_heads=6), Layout())


@pytest.mark.parametrize(
    "name, sizes, message",
    [
        ("moe", {"pipeline": 4}, "pipeline = 4: does not divide 2 layers"),
        ("llama_tied", {"tensor": 3}, "tensor = 3: does not divide 4 query heads"),
        ("moe", {"expert": 3, "data": 3}, "expert = 3: does not divide 4 experts"),
        ("llama_tied", {"expert": 2, "data": 2}, "expert = 2: this model has no experts"),
        ("moe", {"expert": 2}, "expert = 2: does not divide the 1 ranks"),
        ("moe", {"data": 0}, "data = 0: not a size"),
        ("moe", {"data": 2, "rank": 2}, "rank = 2: no such rank; allowed: 0 to 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(tmp_path: Path, name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=f"layout: {message}"):
        plan_model(_folder(tmp_path, name), Layout(**sizes))


def test_more_ranks_than_key_heads_need_a_multiple(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "qwen3_tied", num_attention_heads=6)
    with pytest.raises(EngineError, match="tensor = 3: neither divides 2 key and value heads nor is a multiple"):
        plan_model(folder, Layout(tensor=3))


@pytest.mark.parametrize("name, sizes", [("moe", {"tensor": 2}), ("llama_tied", {"context": 2})])
def test_what_needs_a_gpu_is_refused_on_cpu(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    layout = Layout(**sizes)
    shape = plan_model(_folder(tmp_path, name), layout).shape
    check_machine(shape, layout, on_gpu=True)
    with pytest.raises(EngineError, match=f"{next(iter(sizes))} = 2: .*allowed on CPU: 1"):
        check_machine(shape, layout, on_gpu=False)


def test_a_pipeline_stage_bounds_the_layers_that_stay_bf16(tmp_path: Path) -> None:
    layout = Layout(pipeline=2)
    shape = plan_model(_folder(tmp_path, "llama_tied", num_hidden_layers=4), layout).shape
    size = "model.architecture.num_hidden_layers=4"
    recipe = compose(["recipe=fp8_e2e", "recipe.training_linears.keep_last_layers=3", size]).recipe
    check_kept_layers(shape, Layout(), recipe)
    with pytest.raises(EngineError, match=r"keep_last_layers = 3: a pipeline stage has 2 of the 4 layers; .*0 to 2"):
        check_kept_layers(shape, layout, recipe)


def test_bf16_training_needs_no_arguments() -> None:
    for on_gpu in (True, False):
        precision = precision_arguments(_recipe("fp8_rollout_kv"), on_gpu)
        assert (precision.arguments, precision.environment) == ({}, {})


def test_fp8_training_is_refused_on_cpu() -> None:
    message = r"recipe\.training_linears\.format = e4m3: .*allowed on CPU: bf16"
    with pytest.raises(EngineError, match=message):
        precision_arguments(_recipe("fp8_e2e"), on_gpu=False)


@pytest.mark.parametrize(
    "overrides, expected, environment",
    [
        ([], {"fp8": "e4m3", "fp8_recipe": "blockwise"}, {FP32_SCALES: "1"}),
        (["scale=power_of_two"], {"fp8": "e4m3", "fp8_recipe": "blockwise"}, {FP32_SCALES: "0"}),
        (["gradient_format=e5m2"], {"fp8": "hybrid", "fp8_recipe": "blockwise"}, {FP32_SCALES: "1"}),
        (["scaling=tensor"], {"fp8": "e4m3", "fp8_recipe": "tensorwise"}, {}),
        (["scaling=mxfp8"], {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {}),
        (
            ["scaling=tensor_delayed", "amax_history=16", "amax_compute=most_recent"],
            {
                "fp8": "e4m3",
                "fp8_recipe": "delayed",
                "fp8_amax_history_len": 16,
                "fp8_amax_compute_algo": "most_recent",
            },
            {},
        ),
        (
            ["keep_first_layers=0", "keep_last_layers=1"],
            {
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 1,
            },
            {FP32_SCALES: "1"},
        ),
    ],
)
def test_fp8_arguments_follow_the_recipe(
    overrides: list[str], expected: dict[str, Any], environment: dict[str, str]
) -> None:
    precision = precision_arguments(_recipe("fp8_e2e", *overrides), on_gpu=True)
    high = {"fp8_param": False, "fp8_dot_product_attention": False, "fp8_multi_head_attention": False}
    assert dict(precision.arguments) == high | expected
    assert dict(precision.environment) == environment


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["scaling=channel"], "scaling = channel: .*allowed: block, tensor, tensor_delayed, mxfp8"),
        (["weight_block=[64,64]"], r"weight_block = \[64, 64\]: .*allowed: \[128, 128\]"),
        (["activation_group=64"], "activation_group = 64: .*allowed: 128"),
        (["exclude=[model.layers.0.mlp.up_proj]"], r"exclude = \['model\.layers\.0\.mlp\.up_proj'\]"),
        (["scaling=tensor", "scale=power_of_two"], "scale = power_of_two: .*allowed: fp32"),
        (["scaling=tensor_delayed", "keep_last_layers=1"], "keep_last_layers = 0, 1: .*allowed: 0, 0"),
    ],
)
def test_fp8_that_transformer_engine_lacks_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(EngineError, match=rf"recipe\.training_linears\..*{message}"):
        precision_arguments(_recipe("fp8_e2e", *overrides), on_gpu=True)
