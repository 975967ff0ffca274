"""Command-line overrides, checked and normalised before Hydra sees them.

Hydra stops at its first unknown key or option. Here each override is judged alone, so that all problems
are told at once; a plain key is passed on as a forced one, and the schema decides whether it exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from conf.problems import nearest_word, unknown_key
from conf.schema.base import Problem

FREE_MAPS: Final = (
    "data.parameters",
    "rollout.engine_args",
    "storage.options",
    "sweep.axes",
    "sweep.prices.gpu_hour_usd",
    "sweep.variants",
    "tracking.tags",
)
_SCHEMA_FOLDER: Final = "schema"


@dataclass(frozen=True)
class Checked:
    """Overrides that Hydra can take, the values they set by dotted key, and lines for the refused ones."""

    accepted: tuple[str, ...]
    values: Mapping[str, object]
    refused: tuple[str, ...]


def groups(folder: Path) -> dict[str, tuple[str, ...]]:
    """Hydra groups of a configuration folder with their options, sorted."""
    found = {
        path.name: tuple(sorted(option.stem for option in path.glob("*.yaml")))
        for path in sorted(folder.iterdir())
        if path.is_dir() and path.name != _SCHEMA_FOLDER
    }
    return {name: options for name, options in found.items() if options}


def override_key(text: str) -> str:
    """The key that an override sets or removes."""
    return text.lstrip("+~").partition("=")[0]


def check(overrides: Sequence[str], folder: Path) -> Checked:
    """Judge each override alone. Not thread-safe: Hydra's parser keeps state."""
    parser, options = OverridesParser.create(), groups(folder)
    accepted: list[str] = []
    values: dict[str, object] = {}
    refused: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            refused.append(_unreadable(text, str(error)))
            continue
        problem = _problem(override, options)
        if not override.key_or_group:
            refused.append(_unreadable(text, "no key"))
        elif problem is not None:
            refused.append(str(problem))
        elif override.is_delete():
            accepted.append(text)
        elif override.key_or_group in options:
            accepted.append(f"{override.key_or_group}={override.value()}")
        else:
            accepted.append("++" + text.lstrip("+"))
            values[override.key_or_group] = override.value()
    return Checked(tuple(accepted), values, tuple(refused))


def _unreadable(text: str, error: str) -> str:
    reason = " ".join(error.splitlines()[0].split())
    return (
        f"{text}: cannot be read ({reason}); allowed: key=value, group=option; "
        "a value with spaces or signs is quoted within the override: 'key=\"a value\"'"
    )


def _problem(override: Override, options: Mapping[str, Sequence[str]]) -> Problem | None:
    key = override.key_or_group
    if override.is_sweep_override():
        return Problem(
            key,
            (override.input_line or "").partition("=")[2],
            "several values, and one run takes one",
            "one value; a list is written [a,b], text with commas is quoted",
        )
    value = override.value()
    if override.is_delete():
        if key in FREE_MAPS or key.startswith(tuple(f"{name}." for name in FREE_MAPS)):
            return None
        return Problem(f"~{key}", value, "a key cannot be removed", f"~ before {' or '.join(FREE_MAPS)} only")
    if override.package is not None or "/" in key or key.split(".")[0] == "hydra":
        return unknown_key(override.get_key_element().lstrip("+"), value)
    group, _, name = key.partition(".")
    if name == "name" and value in options.get(group, ()):
        wrong, allowed = "a label, which selects nothing", f"{group}={value}, or another name"
        return Problem(key, value, wrong, allowed)
    if key in options and not (isinstance(value, str) and value in options[key]):
        return Problem(
            key,
            value,
            "no such option",
            f"one of {', '.join(options[key])}",
            nearest_word(value, options[key]),
        )
    return None
