"""Comparison of a completion with a reference by mathematical value (math-verify).

Its own time limits use signals and are switched off; the process that runs this is bounded from outside.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_LATEX_SIGN = re.compile(r"[\\^{]")
_DELIMITED = re.compile(r"\$.+\$|\\boxed|\\\(|\\\[", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2}")


class UnreadableReferenceError(Exception):
    """A reference answer without a value that math-verify can read."""


def warm_up() -> None:
    """Build the LaTeX parser's tables, so that the first answer is not charged for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parsed(r"\boxed{\frac{1}{2}}")


def math_score(completion: str, entry: dict[str, Any]) -> float:
    """1.0 when the completion's answer equals the reference `entry["answer"]`, else 0.0.

    The completion's answer is what math-verify extracts: the content of \\boxed{}, a formula between dollar
    signs, else the last number. Raises UnreadableReferenceError when the reference has no value.
    """
    reference = entry["answer"]
    if completion == reference:
        return 1.0
    gold = reference_values(reference)
    return float(verify(gold, _parsed(completion), timeout_seconds=None))


def reference_values(reference: str) -> list[Any]:
    """The values of a reference answer: a number, a LaTeX formula or a sentence with one of them.

    A formula without delimiters is read whole: extraction would take the last number out of it. Plain words
    are not read as products of symbols, where every anagram would be equal.
    """
    if _DELIMITED.search(reference):
        values = _parsed(reference)
    elif _LATEX_SIGN.search(reference):
        values = _formula(reference)
    else:
        values = _parsed(reference) or ([] if _WORD.search(reference) else _formula(reference))
    if not values:
        raise UnreadableReferenceError(f"math-verify reads no value from the reference answer {reference[:80]!r}")
    return values


def _formula(text: str) -> list[Any]:
    if _WORD.search(_COMMAND.sub(" ", text)):
        return _parsed(text)
    return list(parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None))


def _parsed(text: str) -> list[Any]:
    return list(parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None))
