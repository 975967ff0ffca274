"""The file of top tokens: one line a step, once, whatever the tokens hold and however a run ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.top_tokens import TopTokens
from tasks.numerics.mismatch_detail import TokenOffence

OFFENCE = TokenOffence(sample=3, position=1, token_id=7, p=-1.0, q=-2.5, d=1.5)


class _Codec:
    def __init__(self, text: str) -> None:
        self._text = text

    def token_text(self, token_id: int) -> str:
        assert token_id == 7
        return self._text


def _steps(path: Path) -> list[Any]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("text", ["x", "\u2028", "\x85", "\n", "\r", "\u2029", "\x0b", '"'])
def test_any_text_is_written_once_and_read_again(tmp_path: Path, text: str) -> None:
    path, codec = tmp_path / "top_tokens.jsonl", _Codec(text)
    TopTokens(path).add(1, [OFFENCE], codec)  # type: ignore[arg-type]
    again = TopTokens(path)
    again.add(1, [OFFENCE], codec)  # type: ignore[arg-type]
    again.add(2, [OFFENCE], codec)  # type: ignore[arg-type]
    assert _steps(path) == [1, 2]
    (token,) = json.loads(path.read_text(encoding="utf-8").split("\n")[0])["tokens"]
    assert token == {"sample": 3, "position": 1, "token_id": 7, "p": -1.0, "q": -2.5, "d": 1.5, "text": text}


def test_a_line_that_a_crash_cut_is_written_anew(tmp_path: Path) -> None:
    path, codec = tmp_path / "top_tokens.jsonl", _Codec("x")
    TopTokens(path).add(1, [OFFENCE], codec)  # type: ignore[arg-type]
    whole = path.read_text()
    path.write_text(whole + whole.replace('"step": 1', '"step": 2')[:-9])
    again = TopTokens(path)
    assert path.read_text() == whole
    again.add(2, [OFFENCE], codec)  # type: ignore[arg-type]
    assert _steps(path) == [1, 2]


def test_nothing_is_written_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "top_tokens.jsonl"
    TopTokens(path).add(1, [], _Codec("x"))  # type: ignore[arg-type]
    assert not path.exists()
