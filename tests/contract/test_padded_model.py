"""A model that was zero-padded to FP8 blocks, in every engine: its function, and padding that training leaves at 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tasks.engines.packaged_models import write_prepared
from tasks.engines.protocols import RolloutBatch
from tasks.engines.tensor_files import rank_files
from tasks.engines.tiny_model import train_tokenizer
from tasks.engines.trainer_state import WEIGHTS
from tasks.engines.zero_padding import Padding, nonzero_padding
from tasks.numerics.kv_scales import CalibrationError
from tests.contract.engines import (
    LAYERS,
    POSITIONS,
    QUESTIONS,
    ROLLOUT_ENGINES,
    TRAINER_ENGINES,
    VOCABULARY,
    Workbench,
    advantages,
    engine_params,
)

FP8_NOISE = 0.2
"""Mean |difference| that E4M3 (relative rounding up to 1/16) may make to log-probabilities of fp32."""


@dataclass(frozen=True)
class Padded:
    """The folder, how it was padded, and the model before in fp32."""

    folder: Path
    padding: Padding
    before: PreTrainedModel

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Of every token but the first given those before, `[samples, width - 1]` fp32, of the model before."""
        with torch.no_grad():
            logits = self.before(batch.tokens).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]

    def mean_error(self, batch: RolloutBatch, logprobs: Tensor) -> float:
        """Mean |difference| over response tokens."""
        mask = batch.response_mask()
        return float((logprobs[mask] - self.logprobs(batch)[mask[:, 1:]]).abs().mean())


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Padded:
    """Hidden 192 to 256, 3 query heads over 1 to 6 over 2, MLP 160 to 256: proportions of SmolLM2, as a Mistral."""
    folder = tmp_path_factory.mktemp("padded")
    tokenizer = train_tokenizer(QUESTIONS, VOCABULARY)
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        initializer_range=192**-0.5,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(0.75 + 0.5 * torch.rand(parameter.shape))
    made = write_prepared(model, tokenizer, {"package": "none"}, folder)
    return Padded(folder, made.padding, model)


@pytest.fixture(scope="session", params=engine_params(ROLLOUT_ENGINES))
def padded_rollouts(request: pytest.FixtureRequest, padded: Padded) -> Workbench:
    return Workbench(request.param, TRAINER_ENGINES[0], padded.folder)


@pytest.fixture(scope="session", params=engine_params(TRAINER_ENGINES))
def padded_trainers(request: pytest.FixtureRequest, padded: Padded) -> Workbench:
    return Workbench(ROLLOUT_ENGINES[0], request.param, padded.folder)


def test_the_folder_is_the_model_in_transformers(padded: Padded) -> None:
    wide, info = AutoModelForCausalLM.from_pretrained(padded.folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert (wide.config.model_type, wide.config.hidden_size, wide.config.num_attention_heads) == ("mistral", 256, 6)
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    tokens = torch.arange(3, 63).reshape(2, 30)
    with torch.no_grad():
        expected, found = padded.before(tokens).logits, wide(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e_kv"])
def test_samples_have_the_log_probabilities_of_the_model_before(
    padded_rollouts: Workbench, padded: Padded, recipe: str
) -> None:
    batch = padded_rollouts.rollout(recipe).generate(padded_rollouts.request())
    limit = padded_rollouts.rollout_engine.bf16_error if recipe == "bf16" else FP8_NOISE
    assert padded.mean_error(batch, batch.logprobs) < limit


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e_kv"])
def test_scores_are_those_of_the_model_before(padded_trainers: Workbench, padded: Padded, recipe: str) -> None:
    batch = padded_trainers.batch(recipe)
    limit = padded_trainers.trainer_engine.bf16_error if recipe == "bf16" else FP8_NOISE
    assert padded.mean_error(batch, padded_trainers.trainer(recipe).score(batch).logprobs) < limit


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e2e_kv"])
@pytest.mark.parametrize(
    "optimizer",
    [{"weights": "fp32_master", "state": "fp32"}, {"weights": "bf16_kahan", "state": "fp8"}],
    ids=["fp32", "narrow"],
)
def test_padding_stays_zero_through_training(
    padded_trainers: Workbench, padded: Padded, recipe: str, optimizer: dict[str, str], tmp_path: Path
) -> None:
    """Not nearly: an entry that leaves 0 by rounding would be one that training moves."""
    chosen = optimizer | {"learning_rate": "1e-2", "weight_decay": "0.1"}
    trainer = padded_trainers.trainer(recipe, *(f"trainer.optimizer.{key}={value}" for key, value in chosen.items()))
    batch = padded_trainers.batch(recipe)
    for _ in range(3):
        assert trainer.train(batch, trainer.score(batch).logprobs, advantages())["optim/grad_norm"] > 0
    trainer.save(tmp_path)
    held = {name: t for file in rank_files(tmp_path, WEIGHTS) for name, t in load_file(file).items()}
    start = load_file(padded.folder / "model.safetensors")
    assert held.keys() == start.keys()
    assert nonzero_padding(held, padded.padding) == []
    assert all(float((held[name].float() - start[name]).abs().max()) > 5e-3 for name in start)


def test_scales_by_head_are_refused(padded_trainers: Workbench) -> None:
    """A head of zeros has no scale."""
    with pytest.raises(CalibrationError, match=r"layer 0 [qkv].* head 1"):
        padded_trainers.trainer(padded_trainers.full_recipe, "recipe.calibration.granularity=head")
