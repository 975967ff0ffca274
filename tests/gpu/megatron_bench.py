"""What the GPU programs of the Megatron trainer share: model folders with random weights, batches, engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from conf.compose import compose
from conf.schema import RunConfig
from tasks.engines.protocols import RolloutBatch, TrainerEngine
from tasks.engines.registry import build_trainer

_SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "intermediate_size": 1024,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def small(kind: str) -> PretrainedConfig:
    """`qwen3`, `llama` (tied, scaled positions), `moe`, and `narrow`: Qwen3 with heads of 64 channels."""
    if kind == "llama":
        return LlamaConfig(**_SMALL, head_dim=128, tie_word_embeddings=True, rope_parameters=dict(_LLAMA3))
    if kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
        return Qwen3MoeConfig(**_SMALL, head_dim=128, tie_word_embeddings=False, **experts)
    if kind == "narrow":
        heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
        return Qwen3Config(**(_SMALL | heads), head_dim=64, tie_word_embeddings=False)
    return Qwen3Config(**_SMALL, head_dim=128, tie_word_embeddings=False)


def layers_of_8b(layers: int, vocabulary: int = 151936) -> PretrainedConfig:
    """Qwen3-8B with fewer layers."""
    return Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


def save_random(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder in BF16: norms about 1, everything else normal with the deviation 1 / sqrt(columns)."""
    from tasks.engines.megatron_config import Layout, plan_model
    from tasks.engines.megatron_names import hf_shapes

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in hf_shapes(plan_model(folder, Layout()).shape).items():
        values = torch.randn(shape, generator=generator, device=device)
        values = 1 + 0.1 * values if len(shape) == 1 else values * shape[-1] ** -0.5
        tensors[name] = values.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def configure(folder: Path, recipe: str, *overrides: str) -> RunConfig:
    """A run with `trainer=megatron` on the folder's model, on the GPU where there is one."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    fixed = ("trainer=megatron", f"trainer.device={device}", "trainer.optimizer.warmup_steps=0")
    return compose((f"recipe={recipe}", f"model.path={folder}", *fixed, *overrides))


def build(folder: Path, recipe: str, *overrides: str) -> tuple[RunConfig, TrainerEngine]:
    config = configure(folder, recipe, *overrides)
    return config, build_trainer(config, folder)


def random_batch(lengths: Sequence[int], vocabulary: int, seed: int = 0, prompt: float = 0.25) -> RolloutBatch:
    """Rows of random tokens of these lengths, a share of each being its prompt; made-up rollout log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    size, width = len(lengths), max(lengths)
    known = torch.tensor(lengths)
    before = (known * prompt).long().clamp(min=1)
    columns = torch.arange(width)
    tokens = torch.randint(0, vocabulary, (size, width), generator=generator)
    tokens = torch.where(columns < known.unsqueeze(1), tokens, 0)
    inside = (columns >= before.unsqueeze(1)) & (columns < known.unsqueeze(1))
    guess = torch.randn(size, width, generator=generator) - 8
    logprobs = torch.where(inside, guess.clamp(max=-0.01), torch.nan)
    return RolloutBatch(
        tokens, before, known - before, logprobs, torch.zeros(size, dtype=torch.bool), torch.zeros_like(known)
    )


def spread(samples: int) -> Tensor:
    """Advantages of both signs, different for every sample."""
    return torch.linspace(-1.5, 1.5, samples)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
