"""Small models of every architecture that Megatron trains here, as Hugging Face folders, and what they should give.

Every weight is random, norms and biases among them, so that no two can be exchanged unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY, LAYERS, WIDTH = 200, 2, 24
_SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _mixture(**options: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_SMALL,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **options,
    )


CONFIGS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "qwen3_tied": lambda: Qwen3Config(**_SMALL, head_dim=32, intermediate_size=96, tie_word_embeddings=True),
    "qwen3_untied": lambda: Qwen3Config(**_SMALL, head_dim=32, intermediate_size=96, tie_word_embeddings=False),
    "qwen2_bias": lambda: Qwen2Config(**_SMALL, intermediate_size=96, tie_word_embeddings=False),
    "llama_tied": lambda: LlamaConfig(**_SMALL, intermediate_size=96, tie_word_embeddings=True),
    "llama_scaled": lambda: LlamaConfig(
        **_SMALL, intermediate_size=96, tie_word_embeddings=False, rope_parameters=dict(LLAMA3)
    ),
    "mistral_narrow": lambda: MistralConfig(
        **(_SMALL | {"num_attention_heads": 12, "num_key_value_heads": 4}),
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=True,
        sliding_window=None,
    ),
    "moe": lambda: _mixture(norm_topk_prob=True),
    "moe_raw_shares": lambda: _mixture(norm_topk_prob=False),
}
DENSE = tuple(name for name in CONFIGS if not name.startswith("moe"))


def save_model(name: str, folder: Path) -> Path:
    """The folder, weights in BF16 in several files."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in parameter_name else 0.0
            parameter.normal_(centre, 0.3 if parameter.ndim == 1 else 0.15)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


def token_rows() -> Tensor:
    """Token ids `[3, WIDTH]`, the last of the vocabulary among them."""
    rows = torch.randint(0, VOCABULARY, (3, WIDTH), generator=torch.Generator().manual_seed(0))
    rows[0, 5] = rows[1, 0] = VOCABULARY - 1
    return rows


def reference_model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def reference_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """transformers' log-probabilities of each row's tokens from the second on, fp32 `[rows, width - 1]`."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
