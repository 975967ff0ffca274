"""Arguments of vLLM's engine from recipe and settings, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.compose import ConfigError, compose
from conf.preflight import preflight
from conf.schema import VllmRollout
from tasks.engines.plan import folder_shape, shape_model
from tasks.engines.precision_plan import LinearPlan, plan_linears
from tasks.engines.protocols import EngineError
from tasks.engines.registry import rollout_settings
from tasks.engines.vllm_arguments import Model, engine_arguments, model_of
from tasks.preflight import bf16_cache
from tests.contract.engines import linears_of
from tests.engines.mixtures import PROJECTIONS, mixture_config


def _arguments(*overrides: str, on_cpu: bool = True, rows: int = 256) -> dict[str, Any]:
    config = compose(["rollout=vllm", *overrides])
    assert isinstance(config.rollout, VllmRollout)
    plan = plan_linears(shape_model(config), config.recipe.rollout_linears)
    model = Model(Path("model"), plan, {name: rows for name in (*plan.quantized, *plan.kept)})
    return engine_arguments(model, config.recipe, config.rollout, "backend", on_cpu)


def _problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(["rollout=vllm", *overrides])
    return list(caught.value.problems)


def test_the_full_recipe() -> None:
    arguments = _arguments("recipe=fp8_e2e_kv")
    assert arguments["hf_overrides"] == {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        }
    }
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["additional_config"] == {"fp8_grpo": {"power_of_two": False, "quantize_query": True}}
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert (arguments["dtype"], arguments["load_format"]) == ("bfloat16", "dummy")
    assert arguments["max_num_seqs"] == 512 and arguments["kv_cache_memory_bytes"] == 268435456
    assert "gpu_memory_utilization" not in arguments


def test_an_engine_with_a_cache_of_given_size_starts_beside_others() -> None:
    """What vLLM wants free at its start is no measure of such a cache."""
    assert _arguments("recipe=bf16", on_cpu=False)["gpu_memory_utilization"] == 0.01


def test_bf16_asks_for_no_quantisation() -> None:
    arguments = _arguments("recipe=bf16")
    assert arguments["hf_overrides"] == {}
    assert arguments["kv_cache_dtype"] == "auto"


def test_a_cache_type_of_the_run_does_not_hold_for_an_engine_of_another_recipe() -> None:
    config = compose(["rollout=vllm", "rollout.engine_args={kv_cache_dtype: fp8_e4m3, block_size: 32}"])
    assert rollout_settings(config, config.recipe) is config.rollout
    other = rollout_settings(config, bf16_cache(config.recipe))
    assert isinstance(other, VllmRollout) and other.engine_args == {"block_size": 32}
    # As many tokens fit, at twice the bytes.
    assert other.kv_cache_memory_bytes == 2 * config.rollout.kv_cache_memory_bytes  # type: ignore[union-attr]
    same = {"engine_args": config.rollout.engine_args, "kv_cache_memory_bytes": 268435456}  # type: ignore[union-attr]
    assert other.model_copy(update=same) == config.rollout


def test_an_fp8_cache_beside_bf16_linears_still_gets_a_place_for_its_scales() -> None:
    arguments = _arguments("recipe=fp8_rollout_kv", "recipe.rollout_linears.format=bf16")
    kept = arguments["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
    assert set(kept) == {*linears_of(0, 1), "lm_head"}


def test_kept_layers_are_named_exactly() -> None:
    arguments = _arguments("recipe=fp8_rollout", "recipe.rollout_linears.keep_first_layers=1")
    kept = arguments["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
    assert set(kept) == {*linears_of(0), "lm_head"}


@pytest.mark.parametrize(
    "eager, on_cpu, expected", [("null", True, True), ("null", False, False), ("false", True, False)]
)
def test_graphs_are_off_on_cpu_unless_asked_for(eager: str, on_cpu: bool, expected: bool) -> None:
    assert _arguments(f"rollout.enforce_eager={eager}", on_cpu=on_cpu)["enforce_eager"] is expected


def test_a_key_of_the_user_wins() -> None:
    arguments = _arguments(
        "rollout.engine_args.seed=7",
        "rollout.engine_args.max_num_batched_tokens=1024",
        "rollout.engine_args.kv_cache_dtype=fp8_e4m3",
        "rollout.engine_args.hf_overrides.rope_theta=5000.0",
        "rollout.gpu_memory_utilization=0.4",
        "rollout.kv_cache_memory_bytes=null",
    )
    assert (arguments["seed"], arguments["max_num_batched_tokens"]) == (7, 1024)
    assert arguments["kv_cache_dtype"] == "fp8_e4m3"
    assert arguments["hf_overrides"]["rope_theta"] == 5000.0
    assert arguments["hf_overrides"]["quantization_config"]["quant_method"] == "fp8"
    assert arguments["gpu_memory_utilization"] == 0.4 and "kv_cache_memory_bytes" not in arguments


@pytest.mark.parametrize(
    "overrides, line",
    [
        (
            ["rollout.engine_args.dtype=float16"],
            "rollout.engine_args.dtype = float16: is not free: compute is BF16 in every recipe; "
            "allowed: leaving it out",
        ),
        (
            ["rollout.engine_args.max_num_seqs=4"],
            "rollout.engine_args.max_num_seqs = 4: has a key of its own; allowed: rollout.batch_size=4",
        ),
        (
            ["recipe=bf16", "rollout.engine_args.kv_cache_dtype=fp8"],
            "rollout.engine_args.kv_cache_dtype = fp8: contradicts recipe.kv.dtype bf16; allowed: auto or bfloat16",
        ),
        (
            ["rollout.engine_args.hf_overrides.quantization_config=null"],
            "rollout.engine_args.hf_overrides.quantization_config = null: is not free: the recipe; "
            "allowed: leaving it out",
        ),
        (
            ["rollout.gpu_memory_utilization=0.5"],
            "rollout.kv_cache_memory_bytes = 268435456: gpu_memory_utilization is 0.5, and exactly one of the two sets "
            "the memory; allowed: bytes with gpu_memory_utilization=null, or null with a share of the memory",
        ),
        (
            ["rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size = 2: the engine runs in the one process that receives the weights; "
            "allowed: 1",
        ),
        (
            ["recipe.calibration.granularity=head"],
            "recipe.calibration.granularity = head: rollout=vllm takes one scale a layer; "
            "allowed: layer, or rollout=torch",
        ),
        (
            ["recipe.rollout_linears.scaling=channel"],
            "recipe.rollout_linears.scaling = channel: rollout=vllm runs FP8 linears in blocks only; allowed: block",
        ),
        (
            ["recipe.rollout_linears.activation_group=64"],
            "recipe.rollout_linears.weight_block = [128, 128]: vLLM takes one size for both sides of a block and the "
            "activation group (64); allowed: [128, 128] with activation_group 128",
        ),
    ],
)
def test_what_contradicts_the_recipe_is_refused(overrides: list[str], line: str) -> None:
    assert _problems(*overrides) == [line]


def test_parts_of_one_matrix_have_one_precision() -> None:
    kept = "model.layers.0.self_attn.k_proj"
    with pytest.raises(EngineError, match=r"k_proj stays BF16 while .*q_proj, .*v_proj is FP8"):
        _arguments(f"recipe.rollout_linears.exclude=[{kept}]")


def test_parts_of_one_matrix_fill_whole_blocks() -> None:
    with pytest.raises(EngineError, match=r"q_proj: 192 rows, and vLLM needs a multiple of 128"):
        _arguments(rows=192)
    assert _arguments("recipe=bf16", rows=192)["hf_overrides"] == {}


def _mixture(tmp_path: Path, *overrides: str, on_cpu: bool = True, rows: int = 128) -> dict[str, Any]:
    mixture_config(moe_intermediate_size=rows).save_pretrained(tmp_path)
    config = compose(["rollout=vllm", "recipe=fp8_rollout", *overrides])
    assert isinstance(config.rollout, VllmRollout)
    model = model_of(tmp_path, folder_shape(tmp_path), config.recipe.rollout_linears)
    return engine_arguments(model, config.recipe, config.rollout, "backend", on_cpu)


def test_routers_and_kept_experts_are_named_exactly(tmp_path: Path) -> None:
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    kept = _mixture(tmp_path)["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
    assert kept == [*routers, "lm_head"]
    arguments = _mixture(tmp_path, "recipe.rollout_linears.keep_first_layers=1")
    experts = [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(4) for part in PROJECTIONS]
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    kept = arguments["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
    assert set(kept) == {*experts, *attention, *routers, "lm_head"}


def test_experts_on_a_gpu_run_in_kernels_whose_weights_can_be_read_back(tmp_path: Path) -> None:
    assert _mixture(tmp_path, on_cpu=False)["moe_backend"] == "triton"
    assert _mixture(tmp_path, "rollout.engine_args.moe_backend=deep_gemm", on_cpu=False)["moe_backend"] == "deep_gemm"
    assert "moe_backend" not in _mixture(tmp_path)
    assert "moe_backend" not in _arguments(on_cpu=False)


def test_experts_that_do_not_fit_are_told_once_a_layer(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        _mixture(tmp_path, rows=192)
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [f"model.layers.{n}.mlp.experts.0.gate_proj" for n in range(2)]
    with pytest.raises(EngineError) as refused:
        _mixture(tmp_path, "recipe.rollout_linears.exclude=[model.layers.1.mlp.experts.2.up_proj]")
    assert str(refused.value).splitlines()[1:] == [
        "model.layers.1.mlp.experts.2.up_proj stays BF16 while others of model.layers.1.mlp.experts are FP8; "
        "vLLM keeps experts of a layer in one precision; allowed: recipe.rollout_linears.exclude with all of them or "
        "none"
    ]


def test_a_missing_vllm_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.engine = vllm: vLLM is not installed in this environment"):
        preflight(compose(["rollout=vllm"]))
    preflight(compose(["rollout=torch"]))


def test_an_empty_plan_is_none_of_its_business() -> None:
    config = compose(["rollout=vllm", "recipe=bf16"])
    assert isinstance(config.rollout, VllmRollout)
    model = Model(Path("model"), LinearPlan((), ("lm_head",)), {"lm_head": 128})
    assert engine_arguments(model, config.recipe, config.rollout, "backend", True)["weight_transfer_config"] == {
        "backend": "backend"
    }


@pytest.mark.parametrize("name", ["attention_config", "spec_method", "hf_token", "kv_transfer_config", "enable_lora"])
def test_arguments_that_would_undo_what_the_engine_promises_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine_args\.{name} = .*: is not free: .*; allowed: leaving it out"
    ):
        compose(["rollout=vllm", f"rollout.engine_args={{{name}: x}}"])


def test_a_backend_that_keeps_old_scales_is_refused_with_an_fp8_cache_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.attention_backend = FLASHINFER: keeps the K/V scales of its start"
    ):
        compose(["rollout=vllm", "rollout.attention_backend=FLASHINFER", "recipe=fp8_e2e_kv"])
    assert compose(["rollout=vllm", "rollout.attention_backend=FLASHINFER", "recipe=fp8_e2e"]).rollout.engine == "vllm"


def test_an_answer_has_to_fit_the_engines_own_limit() -> None:
    message = r"rollout\.max_new_tokens = 16: leaves a prompt no room in rollout\.max_model_len 16; allowed: .* 1 to 15"
    with pytest.raises(ConfigError, match=message):
        compose(["rollout=vllm", "rollout.max_model_len=16", "rollout.max_new_tokens=16"])


@pytest.mark.parametrize("gpus", ["1.5", "0.00001"])
def test_only_amounts_of_gpus_that_ray_knows_are_taken(gpus: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.rollout_gpus = .*: not an amount of GPUs that Ray reserves"):
        compose([f"cluster.rollout_gpus={gpus}"])


def test_kernels_cannot_be_kept_without_a_folder_for_them() -> None:
    with pytest.raises(ConfigError, match=r"storage\.keep_kernels = true: there is no folder of kernels to keep"):
        compose(["storage.keep_kernels=true"])


def test_a_folder_of_kernels_is_the_same_on_every_node() -> None:
    message = r"cluster\.kernel_cache = kernels: a node has no such place; allowed: a folder from / or ~, or null"
    with pytest.raises(ConfigError, match=message):
        compose(["cluster.kernel_cache=kernels"])
    assert compose(["cluster.kernel_cache=/tmp/kernels"]).cluster.kernel_cache == "/tmp/kernels"
