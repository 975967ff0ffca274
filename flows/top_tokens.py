"""The tokens on which the engines disagree most, with their text: `top_tokens.jsonl` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tasks.data.tokens import TextCodec
from tasks.numerics.mismatch_detail import TokenOffence

TOP_TOKENS = "top_tokens.jsonl"


class TopTokens:
    """Appends one line a step. A step that is computed again after a resume is not written twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = _last_step(path)

    def add(self, step: int, offenders: Sequence[TokenOffence], codec: TextCodec) -> None:
        """`offenders` with the largest |d| first; nothing is written for none."""
        if not offenders or step <= self._last:
            return
        tokens = [vars(o) | {"text": codec.token_text(o.token_id)} for o in offenders]
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps({"step": step, "tokens": tokens}, ensure_ascii=False) + "\n")
        self._last = step


def _last_step(path: Path) -> int:
    """Number of the last whole line; a line that a crash cut short is removed."""
    if not path.exists():
        return 0
    # Tokens may hold any separator that splitlines() knows; JSON leaves only the line feed to the file.
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return max((int(json.loads(line)["step"]) for line in lines), default=0)
