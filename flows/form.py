"""The form that Prefect shows for a flow: choices as drop-downs, overrides as a list of texts with a pattern.

The choices are written out, since a form is a type; a test holds them equal to the files in `conf/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from conf.overrides import override_key

RecipeName = Literal["bf16", "fp8_e2e", "fp8_e2e_kv", "fp8_rollout", "fp8_rollout_kv"]
EvaluationRecipe = Literal["own", "bf16", "fp8_e2e", "fp8_e2e_kv", "fp8_rollout", "fp8_rollout_kv"]
AlgorithmName = Literal["cispo", "dapo", "dr_grpo", "grpo", "grpo_leave_one_out", "gspo", "reinforce_pp", "rloo"]
CorrectionName = Literal[
    "geometric_mask",
    "geometric_mask_token_importance",
    "geometric_mask_token_truncation",
    "k1_token",
    "k2_sequence_max",
    "k3_sequence_mean",
    "k3_sequence_mean_token_truncation",
    "k3_token",
    "negative_sequence_mask",
    "none",
    "outlier_veto",
    "probability_trust_region",
    "product_mask_sequence_truncation",
    "self_normalized",
    "sequence_mask",
    "sequence_truncation",
    "token_importance",
    "token_mask",
    "token_truncation",
]
ModelName = Literal[
    "llama3_1_8b_instruct",
    "local",
    "moonlight_16b_a3b",
    "qwen3_30b_a3b",
    "qwen3_8b_base",
    "qwen3_small",
    "smollm2_135m",
    "tiny_qwen3",
]
LadderName = Literal["ladder", "ladder_h200"]

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "recipe": get_args(RecipeName),
    "algorithm": get_args(AlgorithmName),
    "correction": get_args(CorrectionName),
    "model": get_args(ModelName),
    "benchmark": get_args(LadderName),
}
"""Options of the groups that have a drop-down."""

OVERRIDE_PATTERN: Final = r"^(~[A-Za-z_][A-Za-z0-9_.-]*(=[\s\S]*)?|[+]{0,2}[A-Za-z_][A-Za-z0-9_.-]*=[\s\S]*)$"
"""`key=value` or `group=option`, `~key` removes; JavaScript, Python and Rust read it alike."""

Override = Annotated[str, Field(pattern=OVERRIDE_PATTERN)]
Steps = Annotated[int | None, Field(ge=1)]
Seed = Annotated[int | None, Field(ge=0, le=2**32 - 1)]
ResumeField = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
RunField = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]


def form_overrides(fields: Mapping[str, object], overrides: Sequence[str]) -> list[str]:
    """The overrides that a filled-in form stands for.

    `fields` by key of the configuration; None leaves the configuration's own value. A key that `overrides` sets, too,
    is theirs.
    """
    named = {override_key(text) for text in overrides}
    chosen = [f"{key}={value}" for key, value in fields.items() if value is not None and key not in named]
    return [*chosen, *overrides]


def form_fields(overrides: Sequence[str]) -> dict[str, object]:
    """Parameters of `fp8_grpo` for these overrides: what has a field goes into it, so that a run's page shows it."""
    fields: dict[str, object] = {}
    rest: list[str] = []
    for text in overrides:
        key, value = override_key(text), text.partition("=")[2]
        if key in fields and key in CHOICES:
            # An option said twice; the flow refuses it as the command line does.
            return {"overrides": list(overrides)}
        if key in ("steps", "seed") and re.fullmatch(r"[0-9]+", value):
            fields[key] = int(value)
        elif key != "benchmark" and value in CHOICES.get(key, ()):
            fields[key] = value
        else:
            rest.append(text)
    return fields | {"overrides": rest}
