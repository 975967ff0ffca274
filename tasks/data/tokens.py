"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer


class TextCodec:
    """Tokenizer of a local Hugging Face folder."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.eos_token_ids = self._end_tokens(directory)
        self._directory = directory

    @property
    def max_positions(self) -> int:
        """Longest sequence of the model, prompt and response together (tokens)."""
        return int(json.loads((self._directory / "config.json").read_text())["max_position_embeddings"])

    def _end_tokens(self, directory: Path) -> tuple[int, ...]:
        """The tokenizer's end token, and those of generation_config.json and config.json."""
        found = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            path = directory / name
            if path.is_file():
                value = json.loads(path.read_text()).get("eos_token_id")
                found |= set(value) if isinstance(value, list) else {value}
        ids = tuple(sorted(token for token in found if token is not None))
        if not ids:
            raise ValueError(f"{directory}: neither tokenizer nor config names an end token (eos_token_id)")
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer itself adds at the front."""
        return tuple(self._tokenizer.encode(text))

    def token_text(self, token_id: int) -> str:
        """Text of one token, special tokens by their names."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
