"""Refusals in words, a line each: `key = value: what is wrong; allowed: ...; did you mean ...?`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from conf.schema.base import MISSING, Problem, Refusal, Section, show
from conf.schema.run import RunConfig

_WRONG: Final[Mapping[str, str]] = {
    "missing": "required",
    "int_type": "not an integer",
    "int_from_float": "not an integer",
    "float_type": "not a number",
    "finite_number": "not a finite number",
    "bool_type": "neither true nor false",
    "string_type": "not text",
    "string_pattern_mismatch": "not of the required form",
    "string_too_short": "too short",
    "literal_error": "not one of the choices",
    "greater_than": "too small",
    "greater_than_equal": "too small",
    "less_than": "too large",
    "less_than_equal": "too large",
    "tuple_type": "not a list",
    "too_long": "too many items",
    "too_short": "too few items",
    "model_type": "not a section",
    "dict_type": "not a map",
    "union_tag_invalid": "not one of the choices",
    "union_tag_not_found": "required",
}
_DISCRIMINATORS: Final = ("kind", "engine")
_BOUNDS: Final = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
    ("multipleOf", "multiple of"),
)


_MOVED: Final[Mapping[str, str]] = {"cluster.sync_timeout_s": "deadlines.sync_s"}
"""Keys of before, and what they are called now."""


class ConfigError(Exception):
    """The configuration was refused. The message is complete; `problems` holds its lines."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))
        self.problems: tuple[str, ...] = tuple(problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "the configuration is refused" if count == 1 else f"the configuration is refused for {count} reasons"
        return "\n".join((f"{head}:", *(f"  {line}" for line in self.problems)))


@dataclass(frozen=True)
class _Place:
    """Where an error sits: its dotted key, the section that owns it, and the owner's field if it is one.

    `in_map`: the key is one of a map whose keys are free, which `field` is.
    """

    key: str
    owner: type[Section]
    field: str | None
    in_map: bool = False


def describe_errors(error: ValidationError) -> list[Problem]:
    """All problems of a validation of RunConfig, in the order of the schema."""
    found = error.errors()
    return [problem for details in found if not _follows(details, found) for problem in _problems_of(details)]


def _follows(details: ErrorDetails, found: Sequence[ErrorDetails]) -> bool:
    """Whether pydantic calls a list too short only because items of it were refused."""
    loc = details["loc"]
    return details["type"] == "too_short" and any(
        len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in found
    )


def nearest_key(unknown: str, known: Sequence[str]) -> str | None:
    """The existing dotted key that `unknown` most likely means, or None.

    A similar sibling beats the same name elsewhere (several are joined by " or "), that a similar path.
    """
    others = [key for key in known if key != unknown]
    section, _, name = unknown.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in others if key.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return f"{section}.{close[0]}" if section else close[0]
    if same := [key for key in others if key.rpartition(".")[2] == name]:
        return " or ".join(same)
    if close := difflib.get_close_matches(unknown, others, n=1, cutoff=0.7):
        return close[0]
    names = {key.rpartition(".")[2]: key for key in others}
    return names[close[0]] if (close := difflib.get_close_matches(name, names, n=1, cutoff=0.7)) else None


def nearest_word(word: object, choices: Sequence[str]) -> str | None:
    """The choice most like `word`, if one is like it."""
    close = difflib.get_close_matches(str(word), choices, n=1, cutoff=0.5)
    return close[0] if close else None


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included, in the order of declaration."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for section in _sections(field.annotation).values():
            keys += known_keys(section, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def unknown_key(key: str, value: object, owner: type[BaseModel] = RunConfig) -> Problem:
    """The refusal of a dotted key that does not exist in the section `owner`."""
    if key in _MOVED:
        return Problem(key, value, f"is called {_MOVED[key]} now", f"{_MOVED[key]}={show(value)}")
    return Problem(key, value, "unknown key", ", ".join(owner.model_fields), nearest_key(key, known_keys()))


def _problems_of(details: ErrorDetails) -> Iterator[Problem]:
    place, kind, value = _locate(details["loc"]), details["type"], details["input"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        section = place.key.rpartition(".")[0]
        yield from (problem.under(section) for problem in cause.problems)
    elif kind == "extra_forbidden":
        yield from (unknown_key(key, leaf, place.owner) for key, leaf in _leaves(place.key, value))
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _unknown_kind(place, kind, value)
    else:
        yield _wrong_value(place, details)


def _unknown_kind(place: _Place, kind: str, value: Any) -> Problem:
    """A section of several kinds that says none of them."""
    sections = _sections(place.owner.model_fields[place.field].annotation) if place.field else {}
    name, kinds = next((_tag(section) for section in sections.values()), "kind"), list(sections)
    tag = value.get(name, MISSING) if isinstance(value, Mapping) else value
    return Problem(f"{place.key}.{name}", tag, _WRONG[kind], f"one of {', '.join(kinds)}", nearest_word(tag, kinds))


def _wrong_value(place: _Place, details: ErrorDetails) -> Problem:
    """A value of a known key that its type or bounds refuse."""
    key, kind, value = place.key, details["type"], details["input"]
    schema = place.owner.model_json_schema()
    field = schema["properties"][place.field] if place.field else {}
    if place.in_map:
        field = _of_values(field)
    wrong = _WRONG.get(kind, details["msg"])
    if kind == "missing":
        # The last item of a list that is too short; a key of an item is missing like any other.
        short = key.endswith("]")
        key, wrong, value = (key.rpartition("[")[0], "too few items", value) if short else (key, wrong, MISSING)
    elif kind == "multiple_of":
        wrong = f"not a multiple of {details['ctx']['multiple_of']}"
    allowed = _describe(field, schema.get("$defs", {}))
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        allowed += f" (quoted to be text: '{key}=\"{value}\"')"
    nearest = nearest_word(value, _choices(field)) if kind == "literal_error" else None
    return Problem(key, value, wrong, allowed, nearest)


def _of_values(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a map's values; anything where it says nothing of them."""
    values = schema.get("additionalProperties")
    return values if isinstance(values, Mapping) else {}


def _locate(loc: Sequence[int | str]) -> _Place:
    """Follow an error's location through the schema, past the tags that pydantic puts in for unions."""
    key = ""
    owner: type[Section] = RunConfig
    field: str | None = None
    inner: Mapping[str, type[Section]] = {"": RunConfig}
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part in inner:
            owner, inner, field = inner[part], {"": inner[part]}, None
        elif section := inner.get(""):
            owner, field = section, part if part in section.model_fields else None
            inner = _sections(section.model_fields[part].annotation) if field else {}
            inner = {"": next(iter(inner.values()))} if len(inner) == 1 else inner
            key = f"{key}.{part}" if key else part
        else:
            # A key of a free map; what follows are names of pydantic's own.
            return _Place(f"{key}.{part}", owner, field, in_map=True)
    return _Place(key, owner, field)


def _sections(annotation: Any) -> dict[str, type[Section]]:
    """The sections that a field may hold; several are keyed by their discriminator's value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        tag = _tag(annotation)
        return {str(annotation.model_fields[tag].default) if tag else "": annotation}
    return {tag: section for part in get_args(annotation) for tag, section in _sections(part).items()}


def _tag(section: type[Section]) -> str:
    """The field that tells a section from its alternatives; empty where it has none."""
    return next((name for name in _DISCRIMINATORS if name in section.model_fields), "")


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value


def _choices(schema: Mapping[str, Any]) -> list[str]:
    return [str(choice) for choice in schema.get("enum", [schema["const"]] if "const" in schema else [])]


def _describe(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in a few words."""
    if "allowed" in schema:
        return str(schema["allowed"])
    if "$ref" in schema:
        return _describe(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return " or ".join(_describe(option, defs) for option in schema["anyOf"])
    if choices := _choices(schema):
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        name = "an integer" if kind == "integer" else "a number"
        bounds = [f"{sign} {show(schema[word]).removesuffix('.0')}" for word, sign in _BOUNDS if word in schema]
        return " ".join((name, " and ".join(bounds))).strip()
    if kind == "string":
        if "pattern" in schema:
            return f"text of the form {schema['pattern'].strip('^$')}"
        return "text that is not empty" if schema.get("minLength") else "text"
    if kind == "array":
        items = schema.get("prefixItems")
        if items:
            return f"a list of {len(items)}, each {_describe(items[0], defs)}"
        return f"a list, each item {_describe(schema.get('items', {}), defs)}"
    if "properties" in schema:
        return f"a section with the keys {', '.join(schema['properties'])}"
    return {"boolean": "true or false", "null": "null", "object": "a map"}.get(str(kind), "any plain value")
