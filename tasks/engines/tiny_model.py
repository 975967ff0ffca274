"""Models built from their dimensions, such as the small Qwen3 of the CPU default: random weights, own tokenizer."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from conf.schema import TinyArchitecture
from tasks.engines.protocols import EngineError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_SPACE = "\u2581"
_FAMILIES: Final[Mapping[str, type[PreTrainedModel]]] = {
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A BPE tokenizer over `texts`: printable ASCII, single digits, and the task's frequent words as one token.

    Deterministic in `texts` and `vocab_size`. Characters outside ASCII become `<unk>`.
    """
    core = Tokenizer(models.BPE(unk_token=UNKNOWN))
    # Words keep the space behind them, so that a digit is the same token in a question and in an answer.
    pieces = Regex(f"[0-9]|{_SPACE}?[^0-9{_SPACE}]+{_SPACE}?")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False),
            pre_tokenizers.Split(pieces, behavior="isolated"),
        ]
    )
    core.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="never")
    alphabet = [c for c in string.printable if c not in "\t\r\x0b\x0c "] + [_SPACE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)


def model_class(architecture: TinyArchitecture) -> type[PreTrainedModel]:
    """The transformers class of these dimensions; `EngineError` for a family that no engine here runs."""
    if architecture.family not in _FAMILIES:
        raise EngineError(
            f"model.architecture: no engine here runs a {architecture.family}; allowed: {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[architecture.family]


def tiny_config(architecture: TinyArchitecture, eos_token_id: int) -> PreTrainedConfig:
    """The Hugging Face configuration of a model that is built from its dimensions."""
    named = {
        name: value
        for name, value in architecture.model_dump().items()
        if name not in ("rope_theta", "norm_eps", "qk_norm", "rope_scaling", "experts", "latent_attention")
    }
    scaling = architecture.rope_scaling
    rope = {"rope_type": "default"} if scaling is None else {"rope_type": "llama3", **scaling.model_dump()}
    experts = architecture.experts
    if experts is not None:
        named |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": True,
        }
    config: PreTrainedConfig = model_class(architecture).config_class(
        **named,
        rms_norm_eps=architecture.norm_eps,
        rope_parameters=rope | {"rope_theta": architecture.rope_theta},
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        # The default 0.02 suits widths of 2,500 and more; a narrow model starts much slower with it.
        initializer_range=architecture.hidden_size**-0.5,
    )
    return config


def create_model(architecture: TinyArchitecture, seed: int, eos_token_id: int) -> PreTrainedModel:
    """An untrained model, fp32, weights drawn under `seed` without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(architecture)(tiny_config(architecture, eos_token_id))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face folder: config.json, model.safetensors, tokenizer files."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
