"""Question/answer rows in a JSON lines file, in the style of GSM8K."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.data.examples import DataError, Example, GraderSpec
from tasks.data.split import prompt_id

if TYPE_CHECKING:
    from conf.schema import JsonlData

logger = logging.getLogger(__name__)

REFERENCE_MARK = "####"
QUESTION_FIELD = "{question}"


def read_examples(config: JsonlData) -> list[Example]:
    """The distinct prompts of the file, in its order; of rows with the same prompt the first one counts.

    The reference is what follows the last "####" of the answer field, or the whole field; the metadata holds
    the line number. Raises DataError for a missing file, a prompt template without the question,
    or a malformed row (named by file and line).
    """
    path = Path(config.path)
    _check_template(config.prompt_template)
    examples: dict[str, Example] = {}
    contradicted = 0
    for number, line in _lines(path):
        question, answer = _fields(line, f"{path}:{number}", (config.question_key, config.answer_key))
        prompt = config.prompt_template.replace(QUESTION_FIELD, question)
        reference = answer.rpartition(REFERENCE_MARK)[2].strip()
        if not reference:
            raise DataError(
                f"{path}:{number}: key {config.answer_key!r} is empty after {REFERENCE_MARK!r}; "
                "allowed: a reference there"
            )
        example = Example(prompt_id(prompt), prompt, reference, {"line": number})
        kept = examples.setdefault(example.id, example)
        contradicted += kept.answer != reference
    if contradicted:
        logger.warning(
            "%s: %d rows repeat an earlier prompt with another answer; the first is used", path, contradicted
        )
    return list(examples.values())


def verifier() -> GraderSpec:
    """Equality by mathematical value."""
    return GraderSpec(kind="math_verify")


def _check_template(template: str) -> None:
    if QUESTION_FIELD not in template:
        raise DataError(f"data.prompt_template={template!r}; allowed: text with {QUESTION_FIELD} in it")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of every line; blank lines are refused except at the end of the file."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"data.path={str(path)!r}; allowed: a readable JSON lines file ({error.strerror})") from error
    blank: int | None = None
    with file:
        # Binary: text mode would also end lines at separators that JSON strings may hold.
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                blank = blank or number
                continue
            if blank is not None:
                raise DataError(f"{path}:{blank}: empty line; allowed: one JSON object on each line")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from error


def _fields(line: str, where: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a JSON {_json_name(row)}; allowed: a JSON object with {' and '.join(map(repr, keys))}"
        )
    return tuple(_field(row, key, where) for key in keys)


def _field(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        present = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: key {key!r} is missing; the row has {present}")
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: key {key!r} is a JSON {_json_name(value)}; allowed: a string")
    if not value.strip():
        raise DataError(f"{where}: key {key!r} is empty; allowed: a string with text")
    return value


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "string", list: "array", dict: "object"}[type(value)]
