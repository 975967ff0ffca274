"""The small model of the CPU default: Qwen3 architecture, random weights, and a tokenizer made for the task."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from conf.schema import TinyArchitecture

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_SPACE = "\u2581"


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


def tiny_config(architecture: TinyArchitecture, eos_token_id: int) -> Qwen3Config:
    """The Hugging Face configuration of the small model."""
    return Qwen3Config(
        **architecture.model_dump(exclude={"rope_theta"}),
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        # The default 0.02 suits widths of 2,500 and more; a narrow model starts much slower with it.
        initializer_range=architecture.hidden_size**-0.5,
    )


def create_model(architecture: TinyArchitecture, seed: int, eos_token_id: int) -> Qwen3ForCausalLM:
    """An untrained model, fp32, weights drawn under `seed` without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(tiny_config(architecture, eos_token_id))


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face folder: config.json, model.safetensors, tokenizer files."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
