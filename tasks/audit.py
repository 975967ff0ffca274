"""After each sync: does the rollout engine really hold what the recipe asks for and what was sent?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conf.schema import Recipe
from tasks.engines.precision_plan import block_spec
from tasks.engines.protocols import EngineReport
from tasks.numerics.kv_scales import named_scales

_FORMAT_DTYPE = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


class AuditError(RuntimeError):
    """The rollout engine differs from the recipe or from what was sent; each line names tensor and values."""


def audit(report: EngineReport, sent: Mapping[str, Any], recipe: Recipe, expected_linears: tuple[str, ...]) -> None:
    """Compare the engine's own report with the recipe and with the sender's record of the sync.

    `sent` holds `version`, `scales` and `fingerprints` as the trainer exported them; `expected_linears` the
    names that the recipe quantises. Raises `AuditError` with every difference (at most 20 are listed).
    """
    problems = [
        *report.problems,
        *_precision_problems(report, recipe, expected_linears),
        *_differences("weight version", {"": report.version}, {"": sent["version"]}),
        *_differences("scale", named_scales(report.scales), named_scales(sent["scales"])),
        *_differences("fingerprint", report.fingerprints, sent["fingerprints"]),
    ]
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise AuditError("the rollout engine is not what it should be:\n" + "\n".join(problems[:20] + more))


def _precision_problems(report: EngineReport, recipe: Recipe, expected: tuple[str, ...]) -> Iterator[str]:
    held = set(report.quantized_linears)
    for name in sorted(set(expected) - held):
        yield f"{name}: recipe {recipe.name} quantises it, the engine holds it in high precision"
    for name in sorted(held - set(expected)):
        yield f"{name}: quantised in the engine, but not by recipe {recipe.name}"
    spec = block_spec(recipe.rollout_linears)
    for live in report.block_specs:
        if live != spec:
            yield f"linear blocks: recipe {recipe.name} says {spec}, the engine runs {live}"
    query = recipe.kv.dtype if recipe.kv.quantize_query else "bf16"
    wanted = {"KV cache": recipe.kv.dtype, "attention query": query}
    real = {"KV cache": report.kv_dtype, "attention query": report.query_dtype}
    if expected:
        wanted["linear weights"], real["linear weights"] = recipe.rollout_linears.format, report.linear_dtype
    by_head = recipe.calibration.granularity == "head"
    if any(isinstance(scale, tuple) != by_head for scale in report.scales.values()):
        form = {True: "one a KV head", False: "one a layer"}
        yield f"Q/K/V scales: recipe {recipe.name} says {form[by_head]}, the engine holds {form[not by_head]}"
    for what, dtype in wanted.items():
        if real[what] != _FORMAT_DTYPE[dtype]:
            yield f"{what}: recipe {recipe.name} says {_FORMAT_DTYPE[dtype]}, the engine runs {real[what]}"


def _differences(what: str, held: Mapping[str, Any], sent: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(held.keys() | sent.keys()):
        have, want = held.get(name, "nothing"), sent.get(name, "nothing")
        if have != want:
            yield f"{name}: {what} in the engine {have}, sent {want}".removeprefix(": ")
