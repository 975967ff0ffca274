"""Models, checkpoints and precisions for the tests of the Megatron trainer's state over ranks; no Megatron needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from conf.compose import compose
from conf.schema import Recipe, RunConfig
from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.plan import folder_shape
from tasks.engines.protocols import TokenRows
from tasks.numerics.moments import MomentFormat, pack_moments

LAYERS, VOCABULARY, UPDATES = 2, 200, 3
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
CONFIGS: Mapping[str, Callable[[], PretrainedConfig]] = {
    # Of two tensor ranks each has 128 rows of q and gate, and of k 64: whole blocks and halves.
    "tied": lambda: Qwen3Config(
        **_SMALL, num_key_value_heads=2, head_dim=64, intermediate_size=256, tie_word_embeddings=True
    ),
    # 160 channels on each of two ranks: whole MXFP8 blocks, cut blocks of 128.
    "bias": lambda: Qwen2Config(**_SMALL, num_key_value_heads=2, intermediate_size=320, tie_word_embeddings=False),
    # More tensor ranks than key and value heads.
    "one_kv_head": lambda: Qwen3Config(
        **_SMALL, num_key_value_heads=1, head_dim=64, intermediate_size=256, tie_word_embeddings=False
    ),
    "moe": lambda: Qwen3MoeConfig(
        **_SMALL,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("recipe=bf16",),
    "block": ("recipe=fp8_rollout",),
    "power_of_two": ("recipe=fp8_rollout", "recipe.rollout_linears.scale=power_of_two"),
    "tensor": ("recipe=fp8_rollout", "recipe.rollout_linears.scaling=tensor"),
    "channel": ("recipe=fp8_rollout", "recipe.rollout_linears.scaling=channel"),
    "mxfp8": ("recipe=fp8_rollout", "recipe.rollout_linears.scaling=mxfp8"),
    "kept": (
        "recipe=fp8_rollout_kv",
        "recipe.rollout_linears.keep_first_layers=1",
        "recipe.rollout_linears.exclude=[model.layers.1.self_attn.k_proj]",
    ),
}
CALIBRATIONS: Mapping[str, tuple[str, ...]] = {
    "layer": (),
    "head": ("recipe.calibration.granularity=head",),
    "sampled": ("recipe.calibration.max_tokens_per_sequence=5",),
    "percentile": ("recipe.calibration.percentile=99.0", "recipe.calibration.granularity=head"),
}


@cache
def recipe_of(*overrides: str) -> Recipe:
    return compose(list(overrides)).recipe


def trainer_config(trainer: str, folder: Path, *overrides: str) -> RunConfig:
    """A run's configuration; micro-batches of a few rows."""
    own = ("trainer.device=cpu", "trainer.tokens_per_micro_batch=48") if trainer == "megatron" else ()
    return compose([f"trainer={trainer}", f"model.path={folder}", "recipe=fp8_rollout_kv", *own, *overrides])


def make_model(name: str, folder: Path) -> Path:
    """A Hugging Face folder in BF16, in several files."""
    torch.manual_seed(len(name))
    AutoModelForCausalLM.from_config(CONFIGS[name]()).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300KB")
    return folder


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, by Hugging Face name and by `<name>.<kind>`."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def synthetic(folder: Path, storage: MomentFormat = "fp32") -> Saved:
    """Weights and moments that differ in every element; expert 1 of the first layer was never updated."""
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in checkpoint_parameters(folder_shape(folder)).items():
        shape = tuple(parameter.shape)
        weights[name] = (1.0 if "norm" in name else 0.0) + 0.1 * _draw(name, shape)
        if "layers.0.mlp.experts.1." in name:
            continue
        first, second = _draw(f"{name} 1", shape), _draw(f"{name} 2", shape).square()
        kinds = pack_moments(first, second, storage, generator) | {"step": torch.tensor(float(UPDATES))}
        state |= {f"{name}.{kind}": tensor for kind, tensor in kinds.items()}
    return Saved(weights, state)


def write_saved(saved: Saved, folder: Path, files: int = 1) -> Path:
    """As one rank of a trainer without a KL term writes it, or as several."""
    folder.mkdir(parents=True)
    for stem, tensors in (("weights", saved.weights), ("optimizer", saved.state)):
        names = sorted(tensors)
        for number in range(files):
            name = stem if files == 1 else f"{stem}-{number:05d}-of-{files:05d}"
            chosen = {key: tensors[key] for key in names[number::files]}
            save_file(chosen, folder / f"{name}.safetensors")
    state = {"version": 7, "reference": None, "updates": UPDATES, "scales": {}}
    (folder / "trainer.json").write_text(json.dumps(state))
    return folder


def token_rows() -> TokenRows:
    """Nine rows of 3 to 40 tokens; with 48 in a micro-batch there are seven of those."""
    lengths = torch.tensor([3, 40, 17, 9, 28, 5, 33, 12, 21])
    tokens = torch.randint(0, VOCABULARY, (9, 40), generator=torch.Generator().manual_seed(2))
    # What stands behind a row must not be seen.
    return TokenRows(torch.where(torch.arange(40) < lengths.unsqueeze(1), tokens, VOCABULARY - 1), lengths)
