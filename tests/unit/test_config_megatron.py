"""The Megatron trainer's section: what stays as it was beside it, presets and layouts, and every contradiction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conf.compose import CONFIG_DIR, compose, flatten, resolved
from conf.preflight import preflight
from conf.problems import ConfigError
from conf.schema import LrSchedule, MegatronTrainer, Optimizer, TorchTrainer
from conf.schema.megatron import micro_batch_multiple, row_multiple
from flows.cli import main
from tasks.engines.plan import plan_run
from tasks.engines.protocols import EngineError
from tasks.engines.registry import build_trainer

BASE = ["trainer=megatron", "recipe=bf16"]
FP8 = ["trainer=megatron", "recipe=fp8_e2e"]
EIGHT = ["model=qwen3_8b_base"]
BOTH = ["trainer.ranks=4", "trainer.tensor_parallel_size=2", "trainer.context_parallel_size=2"]
EXPERTS = ["model=qwen3_30b_a3b"]
LAYOUTS = [
    (path.stem, gpus, overrides)
    for path in sorted((CONFIG_DIR / "model").glob("*.yaml"))
    for gpus, overrides in re.findall(r"^#   (\d+) GPUs?: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


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


def test_keys_that_came_later_are_shown_where_they_differ() -> None:
    config = compose(["model=llama3_1_8b_instruct"])
    shown = resolved(config)["model"]["architecture"]
    assert shown["qk_norm"] is False
    assert shown["rope_scaling"]["factor"] == 8.0
    assert "experts" not in shown
    assert type(config).model_validate(resolved(config)) == config
    assert compose(["model.architecture.norm_eps=1e-5"]) != compose()


def test_yaml_and_schema_agree_on_defaults() -> None:
    trainer = compose(BASE).trainer
    assert trainer == MegatronTrainer(optimizer=Optimizer())
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
            "trainer.tensor_parallel_size = 4: leaves 96 channels of an MLP of model.architecture on a rank, and "
            "scaling block needs whole multiples of 128",
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
            [*BASE, "trainer.optimizer.weights=bf16_kahan"],
            "trainer.optimizer.weights = bf16_kahan: trainer=megatron does not have it; allowed: fp32_master",
        ),
        (
            [*BASE, "trainer.device=cpu", "trainer.optimizer.state=bf16"],
            "trainer.optimizer.state = bf16: moments other than fp32 are Transformer Engine's",
        ),
        (
            [*BASE, "trainer.distributed_optimizer=false", "trainer.optimizer.state=fp8"],
            "trainer.optimizer.state = fp8: Megatron has such moments in its distributed optimiser only; allowed: "
            "fp32, or trainer.distributed_optimizer=true",
        ),
        ([*BASE, "trainer.optimizer.max_grad_value=1"], "trainer.optimizer.max_grad_value = 1.0: trainer=megatron"),
        ([*BASE, "trainer.optimizer.max_weight=1"], "trainer.optimizer.max_weight = 1.0: trainer=megatron"),
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
            "trainer.lr_schedule.min_lr = 0.001: exceeds trainer.optimizer.learning_rate 0.0002",
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
        compose([*FP8, "trainer.device=cpu", "trainer.optimizer.weights=bf16", "trainer.offload=true"])
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.ranks=2", "trainer.tensor_parallel_size=2"],
        ["trainer.optimizer.state=bf16"],
        ["trainer.optimizer.state=fp8", "recipe=fp8_e2e_kv"],
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
    folder = _folder(tmp_path, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2, intermediate_size=256)
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
