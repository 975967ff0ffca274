"""Prompts without a meaning and a reward without a skill: the load of a real step for a model that can do nothing."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

from tasks.data.examples import Example, GraderSpec
from tasks.data.split import prompt_id

if TYPE_CHECKING:
    from conf.schema import SyntheticData

_TARGET = "tasks.data.synthetic:score"
_POOL_SEED = 0
_SPACE = 2.0**64


def draw_examples(config: SyntheticData) -> list[Example]:
    """Distinct prompts of `prompt_digits` random digits; the same for every run seed. None has a reference answer."""
    source = random.Random(_POOL_SEED)
    prompts = {"".join(source.choices("0123456789", k=config.prompt_digits)): None for _ in range(config.pool_size)}
    metadata = {"reward_share": config.reward_share}
    return [Example(prompt_id(prompt), prompt, "", metadata, has_answer=False) for prompt in prompts]


def verifier() -> GraderSpec:
    """See `score`."""
    return GraderSpec(kind="callable", target=_TARGET)


def score(completion: str, entry: dict[str, Any]) -> float:
    """1.0 for the share `reward_share` of all (question, completion) pairs, by hash, else 0.0."""
    text = f"{entry['question']}\n{completion}".encode("utf-8", "surrogatepass")
    drawn = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return float(drawn < entry["metadata"]["reward_share"] * _SPACE)
