"""What all sections share: strictness, and refusals that name key, value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict


class _Missing:
    """The value shown for a required key that has none."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING: Final = _Missing()


def show(value: object) -> str:
    """A value the way it is typed in YAML or on the command line, on one line."""
    if isinstance(value, str):
        return value if value and value.strip() == value and value.isprintable() else repr(value)
    if isinstance(value, _Missing):
        return repr(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def counted(number: float, what: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Problem:
    """One refused value. `key` is dotted; inside a section it is relative to that section."""

    key: str
    value: object
    wrong: str
    allowed: str
    nearest: str | None = None

    def under(self, prefix: str) -> Problem:
        """The same problem seen from the section that holds `prefix`."""
        key = f"{prefix}.{self.key}" if prefix else self.key
        return Problem(key, self.value, self.wrong, self.allowed, self.nearest)

    def __str__(self) -> str:
        line = f"{self.key} = {show(self.value)}: {self.wrong}; allowed: {self.allowed}"
        return f"{line}; did you mean {self.nearest}?" if self.nearest else line


class Refusal(ValueError):
    """Raised by validators for what types and bounds cannot say."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Section(BaseModel):
    """A part of the configuration: exact types, immutable, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


def _list_to_tuple(value: Any) -> Any:
    """YAML has lists only; strict mode would refuse them for a tuple."""
    return tuple(value) if isinstance(value, list) else value


ListAsTuple: Final = BeforeValidator(_list_to_tuple)
