"""Which linears a recipe quantises, in dense and in mixture-of-experts models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from conf.compose import ConfigError, compose
from conf.schema import LinearPrecision
from tasks.engines.checkpoint_names import checkpoint_parameters, linear_shapes
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import block_spec, layer_number, plan_linears, scale_name
from tasks.engines.protocols import EngineError
from tasks.numerics.delayed_scaling import HistorySettings
from tasks.numerics.formats import Format
from tasks.numerics.fp8 import quantize_as
from tasks.numerics.fp8_linear import BlockSpec
from tests.engines.mixtures import mixture_config, save_mixture

LAYERS = 3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def _linears(*layers: int) -> tuple[str, ...]:
    return tuple(
        f"model.layers.{layer}.{name}"
        for layer in layers
        for name in (*(f"self_attn.{a}" for a in ATTENTION), *(f"mlp.{m}" for m in MLP))
    )


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=128,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


class _Experts(nn.Module):
    """A mixture-of-experts decoder whose experts are plain linears, with the router names in use."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 4)] * 1)})
        other = nn.ModuleDict({"router": nn.Linear(4, 2), "gate_proj": nn.Linear(4, 4)})
        layers = nn.ModuleList([nn.ModuleDict({"mlp": block}), nn.ModuleDict({"mlp": other})])
        layers.append(
            nn.ModuleDict({"block_sparse_moe": nn.ModuleDict({"gate": nn.Linear(4, 2), "w1": nn.Linear(4, 4)})})
        )
        self.model = nn.ModuleDict({"layers": layers, "projector": nn.Linear(4, 4)})
        self.lm_head = nn.Linear(4, 8)


def _fp8(**settings: Any) -> LinearPrecision:
    return LinearPrecision(format="e4m3", **settings)


def test_a_bf16_recipe_quantises_nothing(dense: nn.Module) -> None:
    plan = plan_linears(dense, LinearPrecision(format="bf16"))
    assert plan.quantized == ()
    assert plan.kept == (*_linears(0, 1, 2), "lm_head")


def test_every_decoder_linear_is_quantised_and_the_head_never(dense: nn.Module) -> None:
    plan = plan_linears(dense, _fp8())
    assert plan.quantized == _linears(0, 1, 2)
    assert plan.kept == ("lm_head",)


@pytest.mark.parametrize(
    "settings, layers",
    [
        ({"keep_first_layers": 1}, (1, 2)),
        ({"keep_first_layers": 2}, (2,)),
        ({"keep_last_layers": 1}, (0, 1)),
        ({"keep_first_layers": 1, "keep_last_layers": 1}, (1,)),
    ],
)
def test_kept_layers_are_counted_from_the_ends(
    dense: nn.Module, settings: dict[str, int], layers: tuple[int, ...]
) -> None:
    plan = plan_linears(dense, _fp8(**settings))
    assert plan.quantized == _linears(*layers)
    assert set(plan.kept) == {"lm_head", *_linears(*{0, 1, 2} - set(layers))}


def test_excluded_names_stay_high(dense: nn.Module) -> None:
    name = "model.layers.1.mlp.down_proj"
    plan = plan_linears(dense, _fp8(exclude=[name]))
    assert plan.quantized == tuple(n for n in _linears(0, 1, 2) if n != name)
    assert plan.kept == (name, "lm_head")


def test_an_excluded_name_that_does_not_exist_is_refused(dense: nn.Module) -> None:
    # A prefix, a parameter and a norm are no names of linear layers either.
    names = ["model.layers.9.mlp.up_proj", "model.layers.1.mlp", "model.layers.1.mlp.up_proj.weight", "model.norm"]
    with pytest.raises(EngineError) as caught:
        plan_linears(dense, _fp8(exclude=[*names, "lm_head"]))
    assert str(caught.value) == f"exclude names no linear layer of this model: {', '.join(sorted(names))}"


def test_a_recipe_that_leaves_nothing_is_refused(dense: nn.Module) -> None:
    for settings in ({"keep_first_layers": 3}, {"keep_first_layers": 2, "keep_last_layers": 1}):
        with pytest.raises(EngineError, match="none of the model's layers is left to quantise"):
            plan_linears(dense, _fp8(**settings))
    with pytest.raises(EngineError, match="none of the model's layers is left"):
        plan_linears(nn.Sequential(nn.Linear(4, 4)), _fp8())


def test_routers_stay_high_and_experts_do_not() -> None:
    plan = plan_linears(_Experts(), _fp8())
    assert plan.quantized == (
        "model.layers.0.mlp.experts.0",
        "model.layers.1.mlp.gate_proj",
        "model.layers.2.block_sparse_moe.w1",
    )
    assert plan.kept == (
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.router",
        "model.layers.2.block_sparse_moe.gate",
        "model.projector",
        "lm_head",
    )


def _mixture(**settings: Any) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(mixture_config(**settings), dtype=torch.bfloat16)


def test_each_matrix_of_each_expert_is_a_linear_layer() -> None:
    """The second layer is dense; its gate_proj is no router."""
    model = _mixture(mlp_only_layers=[1])
    plan = plan_linears(model, _fp8())
    attention = tuple(f"model.layers.0.self_attn.{a}" for a in ATTENTION)
    experts = tuple(f"model.layers.0.mlp.experts.{e}.{m}" for e in range(4) for m in MLP)
    assert plan.quantized == (*attention, *experts, *_linears(1))
    assert plan.kept == ("model.layers.0.mlp.gate", "lm_head")
    shapes = linear_shapes(_mixture(moe_intermediate_size=192, hidden_size=160))
    assert shapes["model.layers.1.mlp.experts.3.up_proj"] == (192, 160)
    assert shapes["model.layers.1.mlp.experts.3.down_proj"] == (160, 192)
    assert shapes["model.layers.1.mlp.gate"] == (4, 160)


def test_experts_and_routers_of_kept_layers_stay_high() -> None:
    plan = plan_linears(_mixture(), _fp8(keep_last_layers=1, exclude=["model.layers.0.mlp.experts.2.up_proj"]))
    assert {name.split(".")[2] for name in plan.quantized} == {"0"}
    assert "model.layers.0.mlp.experts.2.up_proj" in plan.kept
    assert "model.layers.0.mlp.experts.2.gate_proj" in plan.quantized
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts.0.up_proj"} < {*plan.kept}


def test_parameters_have_the_names_and_values_of_the_checkpoint(tmp_path: Path) -> None:
    save_mixture(tmp_path, moe_intermediate_size=96)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found, saved = checkpoint_parameters(model), load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys() == checkpoint_parameters(folder_shape(tmp_path)).keys()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in saved
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    shapes = {name: p.shape for name, p in checkpoint_parameters(folder_shape(tmp_path)).items()}
    assert shapes == {name: tensor.shape for name, tensor in saved.items()}


def test_fused_experts_of_an_unknown_layout_are_refused_rather_than_left_out() -> None:
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=128,
        num_local_experts=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for precision in (_fp8(), LinearPrecision(format="bf16")):
        with pytest.raises(
            EngineError, match=r"model\.path: model type mixtral keeps fused experts .*; allowed: a dense"
        ):
            plan_linears(model, precision)


@pytest.mark.parametrize(
    "name, layer",
    [
        ("model.layers.0.mlp.up_proj", 0),
        ("model.layers.37.self_attn.q_proj.weight", 37),
        ("layers.4.mlp", 4),
        ("transformer.h.layers.12.x", 12),
        ("lm_head", None),
        ("model.embed_tokens.weight", None),
        ("model.sublayers.3.x", None),
        ("model.layers.norm", None),
    ],
)
def test_layer_numbers_are_read_from_names(name: str, layer: int | None) -> None:
    assert layer_number(name) == layer


def test_each_scaling_reaches_the_numerics() -> None:
    made = {name: block_spec(_fp8(scaling=name)) for name in ("block", "tensor", "tensor_delayed", "channel", "mxfp8")}
    assert made["block"] == BlockSpec() == block_spec(_fp8())
    assert made["tensor"].weight_format == Format((None, None)) == made["tensor"].activation_format
    assert made["tensor_delayed"].history == HistorySettings(1024, "max", 0)
    assert made["channel"].weight_format == Format((1, None)) == made["channel"].activation_format
    assert made["channel"].dgrad_weight_format == Format((None, 1))
    assert made["mxfp8"].weight_format == Format((1, 32), "e4m3", "e8m0") == made["mxfp8"].activation_format
    assert made["mxfp8"].dgrad_weight_format == Format((32, 1), "e4m3", "e8m0")


def test_gradients_history_and_scale_reach_the_numerics() -> None:
    spec = block_spec(
        _fp8(
            scaling="tensor_delayed",
            gradient_format="e5m2",
            amax_history=7,
            amax_compute="most_recent",
            scale="power_of_two",
        )
    )
    assert spec.history == HistorySettings(7, "most_recent")
    assert spec.gradient_format == Format((None, None), "e5m2", "power_of_two")
    assert spec.activation_format == Format((None, None), "e4m3", "power_of_two")


@pytest.mark.parametrize(
    ("scaling", "unused"),
    [
        ("block", {"amax_history": 5, "amax_compute": "most_recent"}),
        ("tensor", {"weight_block": [64, 64], "activation_group": 32, "amax_history": 5}),
        ("tensor_delayed", {"weight_block": [64, 64], "activation_group": 32}),
        ("channel", {"weight_block": [64, 64], "activation_group": 32, "amax_history": 5}),
        ("mxfp8", {"weight_block": [64, 64], "activation_group": 64, "amax_history": 5, "scale": "power_of_two"}),
    ],
)
def test_keys_that_a_scaling_does_not_use_change_nothing(scaling: str, unused: dict[str, Any]) -> None:
    assert block_spec(_fp8(scaling=scaling, **unused)) == block_spec(_fp8(scaling=scaling))


def test_delayed_scaling_is_refused_for_the_rollout_and_taken_for_training() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["recipe.rollout_linears.scaling=tensor_delayed"])
    assert refused.value.problems == (
        "recipe.rollout_linears.scaling = tensor_delayed: its scales come from a history of amax values, which only "
        "the trainer has; allowed: block, tensor, channel or mxfp8; did you mean tensor?",
    )
    made = compose(["recipe=fp8_e2e", "recipe.training_linears.scaling=tensor_delayed"]).recipe.training_linears
    assert made.scaling == "tensor_delayed" and made.amax_history == 1024


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("scaling=row", "one of block, tensor, tensor_delayed, channel, mxfp8"),
        ("gradient_format=bf16", "one of e4m3, e5m2"),
        ("amax_history=0", "an integer >= 1"),
        ("amax_compute=mean", "one of max, most_recent"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(override: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe.training_linears.{override.replace('=', ' = ')}: .*{allowed}"):
        compose(["recipe=fp8_e2e", f"recipe.training_linears.{override}"])


@pytest.mark.parametrize(
    ("scaling", "scales"),
    [("block", 4 * 2 * 1), ("tensor", 4), ("channel", 4 * 200), ("mxfp8", 200 * 4)],
)
def test_planned_bytes_are_those_of_a_quantised_weight(scaling: str, scales: int) -> None:
    fmt = block_spec(_fp8(scaling=scaling)).weight_format
    assert fmt.nbytes((200, 128)) == 200 * 128 + scales
    q = quantize_as(torch.ones(200, 128), fmt)
    assert q.codes.nbytes + q.scales.nbytes == 200 * 128 + scales


def test_blocks_and_names_as_the_numerics_and_the_hub_spell_them() -> None:
    spec = block_spec(_fp8(weight_block=[64, 32], activation_group=16, scale="power_of_two"))
    assert (spec.weight, spec.group, spec.power_of_two) == ((64, 32), 16, True)
    assert block_spec(_fp8()) == block_spec(_fp8(scale="fp32"))
    assert not block_spec(_fp8()).power_of_two
    assert scale_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight_scale_inv"
