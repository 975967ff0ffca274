"""Presets of models, their layouts and their plans; what is refused of them and of a folder, and where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conf.compose import CONFIG_DIR, compose, resolved
from conf.preflight import preflight
from conf.problems import ConfigError
from conf.schema import MegatronTrainer
from flows.cli import main
from tasks.engines.plan import plan_run
from tasks.engines.protocols import EngineError
from tasks.engines.registry import build_trainer

BASE = ["trainer=megatron", "recipe=bf16"]
EIGHT = ["model=qwen3_8b_base"]
EXPERTS = ["model=qwen3_30b_a3b"]
LAYOUTS = [
    (path.stem, gpus, overrides)
    for path in sorted((CONFIG_DIR / "model").glob("*.yaml"))
    for gpus, overrides in re.findall(r"^#   (\d+) GPUs?: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def test_keys_that_came_later_are_shown_where_they_differ() -> None:
    config = compose(["model=llama3_1_8b_instruct"])
    shown = resolved(config)["model"]["architecture"]
    assert shown["qk_norm"] is False
    assert shown["rope_scaling"]["factor"] == 8.0
    assert "experts" not in shown
    assert type(config).model_validate(resolved(config)) == config
    assert compose(["model.architecture.norm_eps=1e-5"]) != compose()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 4, "per_token": 5}, "model.architecture.experts.per_token = 5: exceeds count 4"),
        ({"count": 4, "per_token": 2, "shared": 1}, "model.architecture.experts.shared = 1: a Qwen3 mixture"),
    ],
)
def test_experts_that_do_not_fit(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(
            [f"model.architecture.experts.{k}={v}" for k, v in ({"intermediate_size": 128} | change).items()],
        )
    assert message in str(refused.value)


def test_rope_scaling_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"high_freq_factor = 1\.0: is not above low_freq_factor 1"):
        compose(["model=llama3_1_8b_instruct", "model.architecture.rope_scaling.high_freq_factor=1"])


def test_every_preset_has_its_layouts() -> None:
    assert {(model, int(gpus)) for model, gpus, _ in LAYOUTS} == {
        ("llama3_1_8b_instruct", 1),
        ("llama3_1_8b_instruct", 8),
        ("llama3_1_8b_instruct", 16),
        ("qwen3_30b_a3b", 8),
        ("qwen3_30b_a3b", 16),
        ("qwen3_8b_base", 1),
        ("qwen3_8b_base", 8),
        ("qwen3_8b_base", 16),
    }


@pytest.mark.parametrize(("model", "gpus", "overrides"), LAYOUTS, ids=lambda value: value[:20])
def test_documented_layouts_fit_their_gpus(model: str, gpus: str, overrides: str) -> None:
    for recipe in ("bf16", "fp8_e2e_kv"):
        config = compose([f"model={model}", "trainer=megatron", "rollout=vllm", f"recipe={recipe}", *overrides.split()])
        assert isinstance(config.trainer, MegatronTrainer)
        assert config.trainer.ranks == int(gpus)
        memory = plan_run(config).rank_memory
        assert memory is not None
        assert memory.total < 0.9 * 141e9


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_latent_attention_is_refused_with_key_and_reason(trainer: str) -> None:
    config = compose(["model=moonlight_16b_a3b", f"trainer={trainer}"])
    with pytest.raises(ConfigError) as refused:
        preflight(config, data=False, trains=False)
    (problem,) = refused.value.problems
    assert problem.startswith("model.architecture.latent_attention = {")
    assert "it has no k_proj and v_proj" in problem
    with pytest.raises(EngineError, match="no engine here runs a deepseek_v3; allowed: qwen3, llama, qwen3_moe"):
        plan_run(config)


def _folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    return tmp_path


def test_the_sizes_of_a_folder_are_divided(tmp_path: Path) -> None:
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    folder = _folder(tmp_path, **sizes, intermediate_size=256)
    config = compose([*BASE, f"model.path={folder}", "trainer.ranks=2", "trainer.tensor_parallel_size=2"])
    with pytest.raises(ConfigError) as refused:
        preflight(config, data=False, trains=False)
    assert refused.value.problems == (
        f"trainer.tensor_parallel_size = 2: neither divides the 3 key/value heads of {folder}/config.json nor is a "
        "multiple of them; allowed: a divisor or a multiple of 3",
    )
    preflight(compose([*BASE, f"model.path={folder}"]), data=False, trains=False)


def test_a_folder_with_latent_attention_is_refused(tmp_path: Path) -> None:
    config = compose([f"model.path={_folder(tmp_path, kv_lora_rank=512)}"])
    with pytest.raises(ConfigError, match="has kv_lora_rank: no engine here runs multi-head latent"):
        preflight(config, data=False)


def test_an_environment_without_megatron_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("conf.preflight.find_spec", lambda name: None)
    config = compose(BASE)
    with pytest.raises(ConfigError, match=r"trainer\.engine = megatron: Megatron Core is not installed"):
        preflight(config, data=False)
    preflight(config, data=False, trains=False)
    preflight(compose([*BASE, "cluster=existing", "cluster.address=auto"]), data=False)

    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("tasks.engines.registry.import_module", absent)
    with pytest.raises(EngineError, match="trainer=megatron needs Megatron Core in the worker's environment"):
        build_trainer(config, tmp_path)


def test_a_dry_run_shows_the_memory_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["trainer.ranks=8", "trainer.tensor_parallel_size=2"]
    assert main(["train", "--dry-run", *EIGHT, *BASE, *layout]) == 0
    shown = capsys.readouterr().out
    assert "trainer ranks    8 on gpu: tensor 2, pipeline 1, context 1, expert 1, data 4" in shown
    assert "weights 8.19 GB, FP8 copies 0.00 GB, fp32 gradients 16.38 GB, optimiser 12.29 GB" in shown
    assert "selective recomputation (counted as Korthikanti et al. 2022) 40.50 GB" in shown


def test_a_mixture_names_what_would_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", *EXPERTS]) == 2
    shown = capsys.readouterr().err
    assert "model.architecture.experts: model type qwen3_moe is a mixture of experts" in shown
    assert "rollout=vllm with trainer=megatron" in shown


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama3_1_8b_instruct", 8_030_261_248), ("qwen3_30b_a3b", 30_532_122_624), ("qwen3_8b_base", 8_190_735_360)],
)
def test_presets_have_as_many_parameters_as_the_published_models(model: str, parameters: int) -> None:
    config = compose([f"model={model}", "trainer=megatron", "rollout=vllm", "recipe=bf16"])
    assert plan_run(config).parameters == parameters


def test_the_models_of_the_accuracy_runs_fill_fp8_blocks() -> None:
    plan = plan_run(compose(["model=qwen3_small", "recipe=fp8_e2e_kv"]))
    assert plan.parameters == 58_604_288
    assert plan.training.linears.kept == ("lm_head",)
    assert len(plan.training.linears.quantized) == 7 * plan.layers == 56
