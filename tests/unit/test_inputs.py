"""What is refused about models, prompts and folders before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GraniteConfig, GraniteForCausalLM, PreTrainedConfig

from conf.compose import compose
from conf.problems import ConfigError
from flows.inputs import check_inputs, check_prompts, input_digests
from tasks.data.examples import DataError, Dataset, Example, GraderSpec
from tasks.data.tokens import TextCodec
from tasks.engines.plan import plan_run
from tasks.engines.protocols import EngineError
from tasks.engines.registry import build_rollout, build_trainer
from tasks.engines.tiny_model import create_model, save_model, train_tokenizer
from tests.engines.mixtures import save_mixture

OVERRIDES = ["model.architecture.max_position_embeddings=24"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    architecture = compose(OVERRIDES).model.architecture
    assert architecture is not None
    tokenizer = train_tokenizer(["1 + 2 ="], architecture.vocab_size)
    save_model(create_model(architecture, 0, 1), tokenizer, folder)
    return folder


def _dataset(*prompts: str) -> Dataset:
    examples = tuple(Example(f"id{i}", prompt, "1") for i, prompt in enumerate(prompts))
    return Dataset(examples, examples[:1], GraderSpec("math_verify"))


def test_more_prompts_a_step_than_there_are(model_dir: Path) -> None:
    config = compose([*OVERRIDES, "algorithm.prompts_per_step=3"])
    with pytest.raises(DataError, match=r"algorithm\.prompts_per_step = 3: there are 2 train prompts; allowed: 1 to 2"):
        check_prompts(_dataset("1", "2"), TextCodec(model_dir), config)
    check_prompts(_dataset("1", "2", "3"), TextCodec(model_dir), config)


def test_a_prompt_that_leaves_no_room_to_answer(model_dir: Path) -> None:
    config = compose([*OVERRIDES, "algorithm.prompts_per_step=2"])
    codec = TextCodec(model_dir)
    fits = "1" * (24 - config.rollout.max_new_tokens)
    check_prompts(_dataset("2", fits), codec, config)
    with pytest.raises(DataError, match=r"prompt id1 .* has 17 tokens; at most 16 are allowed"):
        check_prompts(_dataset("2", fits + "1"), codec, config)


def test_an_engine_with_a_limit_of_its_own_leaves_less_room(model_dir: Path) -> None:
    config = compose([*OVERRIDES, "algorithm.prompts_per_step=2", "rollout=vllm", "rollout.max_model_len=20"])
    codec = TextCodec(model_dir)
    check_prompts(_dataset("2", "1" * 12), codec, config)
    with pytest.raises(DataError, match=r"has 13 tokens; at most 12 are allowed: 20 positions less .* 8"):
        check_prompts(_dataset("2", "1" * 13), codec, config)


def test_a_file_in_the_place_of_runs_dir(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"runs: is a file; allowed: a folder"):
        check_inputs(compose([f"runs_dir={tmp_path}/runs"]))


@pytest.mark.parametrize("config", [GPT2Config(n_layer=2, n_embd=32, n_head=2)], ids=["gpt2"])
def test_model_types_with_other_attention_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"model type gpt2 is not supported: .* q_proj, k_proj and v_proj"):
        plan_run(compose([f"model.path={tmp_path}"]))


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(EngineError, match="transformers cannot build this model"):
        plan_run(compose([f"model.path={tmp_path}"]))


def test_mixtures_of_experts_are_refused_before_and_in_the_torch_engines(tmp_path: Path) -> None:
    save_mixture(tmp_path)
    refused = rf"model\.path = {tmp_path}: model type qwen3_moe is a mixture of experts .* allowed: a dense model"
    for recipe in ("bf16", "fp8_e2e_kv"):
        config = compose([f"recipe={recipe}", f"model.path={tmp_path}"])
        with pytest.raises(EngineError, match=refused):
            plan_run(config)
        with pytest.raises(EngineError, match=refused):
            build_trainer(config, tmp_path)
        with pytest.raises(EngineError, match=refused):
            build_rollout(config, config.recipe, tmp_path)


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    shape = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(**shape, **heads, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="model type granite changes its logits after lm_head"):
        build_trainer(compose(["recipe=bf16", f"model.path={tmp_path}"]), tmp_path)


def test_digests_follow_the_content(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("a")
    config = compose(["data=jsonl", f"data.path={rows}"])
    before = input_digests(config)
    assert before == {"file rows.jsonl": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"}
    rows.write_text("b")
    assert input_digests(config) != before
    assert input_digests(compose()) == {}
