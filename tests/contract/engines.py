"""The engines under contract, and how the tests build them.

A new engine is one more entry in `ROLLOUT_ENGINES` or `TRAINER_ENGINES`: the name that the configuration
selects it by, the marks that its machine needs, and how closely it must follow the fp32 reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conf.compose import compose
from conf.schema import Recipe, RunConfig, TinyArchitecture
from tasks.engines.protocols import (
    GenerateRequest,
    Prompt,
    RolloutBatch,
    RolloutEngine,
    SyncPayload,
    TokenRows,
    TrainerEngine,
)
from tasks.engines.registry import build_rollout, build_trainer
from tasks.engines.tiny_model import create_model, save_model, train_tokenizer
from tasks.numerics.logprobs import sample_seed
from tests.contract.samplers import Sampler, exponential_race, inverse_cdf

RECIPES = ("bf16", "fp8_rollout", "fp8_rollout_kv", "fp8_e2e", "fp8_e2e_kv")
KV_RECIPES = ("fp8_rollout_kv", "fp8_e2e_kv")
FP8_TRAINING = ("fp8_e2e", "fp8_e2e_kv")

LAYERS, POSITIONS, VOCABULARY, NEW_TOKENS = 2, 64, 128, 8
QUESTIONS = ("1 + 1 = ", "What is 27 + 15?", "7 - -3", "State the final answer to: 9 - 41 = ")
SAMPLES = 3

_KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

PINNED = {
    "algorithm.prompts_per_step": str(len(QUESTIONS)),
    "algorithm.group_size": str(SAMPLES),
    "algorithm.updates_per_step": "1",
    "algorithm.kl_coef": "0.0",
    "correction.cap": "2.0",
    "rollout.temperature": "1.0",
    "rollout.batch_size": "512",
    "rollout.threads": "1",
    "trainer.micro_batch_size": "256",
    "trainer.threads": "1",
    "trainer.optimizer.learning_rate": "3e-4",
    "trainer.optimizer.weight_decay": "0.0",
    "trainer.optimizer.max_grad_norm": "1.0",
    "trainer.optimizer.warmup_steps": "0",
}
"""What the tests rely on, so that no tuned default can change them."""


def linears_of(*layers: int) -> tuple[str, ...]:
    """Names of all linear layers of these decoder layers, in the model's order."""
    return tuple(f"model.layers.{layer}.{kind}" for layer in layers for kind in _KINDS)


@dataclass(frozen=True)
class Engine:
    """What an engine owes.

    `bf16_error` and `fp8_error`: largest mean |log-probability - reference| of its two precisions. FP8 needs more
    room where BF16 values are rounded at other places than in the reference's model code, since a last bit before
    rounding to E4M3 moves a value by a whole step. `sampler`: how a seed decides. `head_scales`: whether Q/K/V scales
    may be one a head; an engine without refuses such a recipe. `spare_positions` it needs behind a sequence whose
    log-probabilities are asked for. `settings` besides `PINNED`. `row_tokens`: for a trainer whose micro-batches are
    counted in tokens, how many stand for a row; None where they are counted in rows. `fp8_training`: whether it trains
    in FP8 here; tests that need it are skipped without.
    """

    name: str
    bf16_error: float
    fp8_error: float
    sampler: Sampler = inverse_cdf
    head_scales: bool = True
    spare_positions: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    row_tokens: int | None = None
    fp8_training: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()


_WITHOUT_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra engines-cpu)")

ROLLOUT_ENGINES = (
    Engine("torch", bf16_error=0.02, fp8_error=0.05),
    Engine(
        "vllm",
        bf16_error=0.02,
        fp8_error=0.08,
        sampler=exponential_race,
        head_scales=False,
        spare_positions=1,
        settings={"rollout.kv_cache_memory_bytes": "33554432"},
        marks=(_WITHOUT_VLLM,),
    ),
)
_WITHOUT_MEGATRON = pytest.mark.skipif(
    find_spec("megatron") is None, reason="Megatron Core is not installed (extra engines-cpu)"
)

TRAINER_ENGINES = (
    Engine("torch", bf16_error=0.02, fp8_error=0.05),
    Engine(
        "megatron",
        bf16_error=0.02,
        fp8_error=0.05,
        settings={"trainer.device": "cpu"},
        row_tokens=20,
        fp8_training=False,
        marks=(_WITHOUT_MEGATRON,),
    ),
)


def engine_params(engines: tuple[Engine, ...]) -> list[Any]:
    """As pytest wants them."""
    return [pytest.param(engine, id=engine.name, marks=engine.marks) for engine in engines]


def make_model(directory: Path, seed: int = 0, **dimensions: int) -> Path:
    """A Hugging Face folder of a Qwen3 model with random weights, norms included, so that none can be mixed up."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    architecture = TinyArchitecture(**(shape | {"max_position_embeddings": POSITIONS} | dimensions))
    tokenizer = train_tokenizer(QUESTIONS, architecture.vocab_size)
    model = create_model(architecture, seed, int(tokenizer.eos_token_id))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(0.75 + 0.5 * torch.rand(parameter.shape, generator=generator))
    save_model(model, tokenizer, directory)
    return directory


def make_outlier_model(directory: Path, factor: float, seed: int = 0, tied: bool = False) -> Path:
    """A Hugging Face folder of a Llama model, which has no Q/K-norm, with one channel of every K `factor` times larger.

    The same channel of Q is as much smaller, in both halves that the rotary embedding mixes: with a power of two the
    BF16 model computes the same to the last bit.
    """
    heads, kv_heads, width, channels = 4, 2, 32, [3, 19]
    tokenizer = train_tokenizer(QUESTIONS, VOCABULARY)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        initializer_range=128**-0.5,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.view(kv_heads, width, -1)[:, channels] *= factor
            layer.self_attn.q_proj.weight.view(heads, width, -1)[:, channels] /= factor
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Workbench:
    """Builds engines of one kind each on one model, and makes requests for them."""

    rollout_engine: Engine
    trainer_engine: Engine
    model_dir: Path
    _configs: dict[tuple[str, ...], RunConfig] = field(default_factory=dict)
    _payloads: dict[tuple[str, ...], SyncPayload] = field(default_factory=dict)
    _batches: dict[tuple[str, ...], RolloutBatch] = field(default_factory=dict)
    _prompts: list[Prompt] = field(default_factory=list)

    def config(self, recipe: str, *overrides: str) -> RunConfig:
        settings = PINNED | {
            "recipe": recipe,
            "model.path": str(self.model_dir),
            "rollout": self.rollout_engine.name,
            "trainer": self.trainer_engine.name,
        }
        settings |= self.rollout_engine.settings | self.trainer_engine.settings
        settings |= dict(override.split("=", 1) for override in overrides)
        if recipe in FP8_TRAINING and not self.trainer_engine.fp8_training:
            pytest.skip(f"trainer={self.trainer_engine.name} trains in FP8 on a GPU only")
        if self.trainer_engine.row_tokens is not None:
            rows = int(settings.pop("trainer.micro_batch_size"))
            settings["trainer.tokens_per_micro_batch"] = str(rows * self.trainer_engine.row_tokens)
        key = tuple(f"{name}={value}" for name, value in settings.items())
        if key not in self._configs:
            self._configs[key] = compose(key)
        return self._configs[key]

    @property
    def full_recipe(self) -> str:
        """The recipe that has on what the trainer can."""
        return "fp8_e2e_kv" if self.trainer_engine.fp8_training else "fp8_rollout_kv"

    def recipe(self, recipe: str, *overrides: str) -> Recipe:
        return self.config(recipe, *overrides).recipe

    def trainer(self, recipe: str, *overrides: str) -> TrainerEngine:
        """A new trainer, calibrated on the prompts where the recipe calibrates."""
        config = self.config(recipe, *overrides)
        trainer = build_trainer(config, self.model_dir)
        if config.recipe.calibration.enabled:
            trainer.calibrate(self.prompt_rows())
        return trainer

    def empty_rollout(self, recipe: str, *overrides: str) -> RolloutEngine:
        config = self.config(recipe, *overrides)
        return build_rollout(config, config.recipe, self.model_dir)

    def rollout(self, recipe: str, *overrides: str) -> RolloutEngine:
        """A new rollout engine that holds version 0."""
        engine = self.empty_rollout(recipe, *overrides)
        engine.load_weights(self.payload(recipe, *overrides))
        return engine

    def payload(self, recipe: str, *overrides: str) -> SyncPayload:
        """What a new trainer exports. Made once: never change it."""
        key = (recipe, *overrides)
        if key not in self._payloads:
            made = self.trainer(recipe, *overrides).export_weights(self.recipe(recipe, *overrides))
            self._payloads[key] = made
        return self._payloads[key]

    def batch(self, recipe: str, *overrides: str) -> RolloutBatch:
        """One step's samples at version 0. Made once: never change it."""
        key = (recipe, *overrides)
        if key not in self._batches:
            self._batches[key] = self.rollout(recipe, *overrides).generate(self.request())
        return self._batches[key]

    def prompts(self) -> tuple[Prompt, ...]:
        """One for each of `QUESTIONS`, all of different lengths, with `SAMPLES` seeds."""
        if not self._prompts:
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True)
            for i, question in enumerate(QUESTIONS):
                seeds = tuple(sample_seed(0, 1, f"p{i}", n) for n in range(SAMPLES))
                self._prompts.append(Prompt(f"p{i}", tuple(tokenizer.encode(question)), seeds))
        return tuple(self._prompts)

    def prompt_rows(self) -> TokenRows:
        rows = [prompt.token_ids for prompt in self.prompts()]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        return TokenRows(tokens, torch.tensor([len(row) for row in rows]))

    def request(self, prompts: tuple[Prompt, ...] | None = None, **changes: Any) -> GenerateRequest:
        """Sample from `prompts` (default: all) at version 0; an end token that the vocabulary does not have."""
        settings: dict[str, Any] = {
            "weight_version": 0,
            "max_new_tokens": NEW_TOKENS,
            "temperature": 1.0,
            "eos_token_ids": (VOCABULARY,),
        }
        return GenerateRequest(prompts=self.prompts() if prompts is None else prompts, **(settings | changes))


def advantages(samples: int = len(QUESTIONS) * SAMPLES) -> Tensor:
    """Advantages of both signs, different for every sample."""
    return torch.linspace(-1.5, 1.5, samples)


def assert_same(a: RolloutBatch, b: RolloutBatch) -> None:
    """Equal to the last bit."""
    for name, value in vars(a).items():
        torch.testing.assert_close(getattr(b, name), value, rtol=0, atol=0, equal_nan=True)
