"""The tokens on which the engines disagree most, with their text: `top_tokens.jsonl` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flows.side_records import whole_lines
from tasks.data.tokens import TextCodec
from tasks.numerics.mismatch_detail import TokenOffence

TOP_TOKENS = "top_tokens.jsonl"


class TopTokens:
    """Appends one line a step. A step that is computed again after a resume is not written twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = max((int(json.loads(line)["step"]) for line in whole_lines(path)), default=0)

    def add(self, step: int, offenders: Sequence[TokenOffence], codec: TextCodec) -> None:
        """`offenders` with the largest |d| first; nothing is written for none."""
        if not offenders or step <= self._last:
            return
        tokens = [vars(o) | {"text": codec.token_text(o.token_id)} for o in offenders]
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps({"step": step, "tokens": tokens}, ensure_ascii=False) + "\n")
        self._last = step
