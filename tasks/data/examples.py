"""The records that the data side hands out: examples, a split dataset and the description of its verifier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.data.split import epoch_slice

VERIFIER_KINDS = ("reasoning_gym", "math_verify", "callable")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class DataError(Exception):
    """Data that cannot be used; the message names the key or the file and line, and what is allowed."""


@dataclass(frozen=True)
class Example:
    """One prompt with its reference answer.

    `id`: the first 16 hex digits of the sha256 of the normalised prompt (see `tasks.data.split.prompt_id`).
    `answer`: the reference, empty where the data has none (`has_answer` is False; such a prompt can be
    graded by its own verifier but not used for supervised training).
    `metadata`: what the verifier needs beside the answer; plain data, never objects.
    """

    id: str
    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    has_answer: bool = True


@dataclass(frozen=True)
class GraderSpec:
    """Which verifier scores the completions of a dataset.

    `kind` "reasoning_gym": `target` is the task, `parameters` its generator settings; the task's own
    `score_answer` decides. `kind` "math_verify": the completion is compared with the reference by value;
    `target` is empty. `kind` "callable": `target` is an import path "package.module:function"; the function
    is called as `function(completion: str, entry: dict) -> float` with `entry` = {"question", "answer",
    "metadata"} and returns a score in [0, 1].
    `partial_credit`: False turns every score below 1 into 0.
    `memory_limit_mb`: address space of the verifier's process in MiB, None for no limit (a custom verifier
    that loads a large library may need that).
    """

    kind: Literal["reasoning_gym", "math_verify", "callable"]
    target: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    partial_credit: bool = False
    memory_limit_mb: int | None = 2048

    def __post_init__(self) -> None:
        if self.kind not in VERIFIER_KINDS:
            raise DataError(f"grader kind={self.kind!r}; allowed: {', '.join(VERIFIER_KINDS)}")
        if self.kind == "callable" and not _IMPORT_PATH.fullmatch(self.target):
            raise DataError(f"grader target={self.target!r}; allowed: 'package.module:function'")
        if self.memory_limit_mb is not None and self.memory_limit_mb < 1:
            raise DataError(f"grader memory_limit_mb={self.memory_limit_mb}; allowed: >= 1, or None")


@dataclass(frozen=True)
class Dataset:
    """Train and eval examples without a common prompt, and the verifier that both use."""

    train: tuple[Example, ...]
    eval: tuple[Example, ...]
    grader: GraderSpec

    def batch(self, seed: int, cursor: int, size: int) -> tuple[Example, ...]:
        """The `size` train examples that follow after `cursor` prompts were drawn under `seed`.

        A pure function of its arguments, so a resumed run draws what an uninterrupted one would. Epoch e is
        a permutation of the train set by (seed, e); a batch may cross into the next epoch. While the size
        stays the same over a run, each prompt comes exactly once per epoch, and no prompt comes twice in
        one batch as long as `size` <= len(train).

        Raises DataError when `size` < 1, `cursor` < 0 or the train set is empty.
        """
        if size < 1:
            raise DataError(f"batch size={size}; allowed: an integer >= 1")
        if not self.train:
            raise DataError("batch from an empty train set; allowed: at least 1 example")
        if cursor < 0:
            raise DataError(f"batch cursor={cursor}; allowed: an integer >= 0")
        return tuple(self.train[i] for i in epoch_slice(seed, cursor, size, len(self.train)))
