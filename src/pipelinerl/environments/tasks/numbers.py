r"""Numbers in free text, with their exact values. Pure functions.

Number formats: `42`, `-3.50`, `.5`, `1,234,567`, `$1,200.`, `75%` (as 75), `3/4`, `2 1/2`, `1e3`, `\frac{3}{4}`, a Unicode
minus, and LaTeX's `\$`, `\%`, `{,}`. A minus counts as a sign only where it can't be a subtraction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

MAX_DIGITS = 40
"""Numbers with more digits are ignored."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = rf"""
    (?:
        (?P<whole>{_DIGITS})[ ](?P<top>\d+)/(?P<bottom>\d+)   # 2 1/2
      | (?P<numerator>{_DIGITS})/(?P<denominator>{_DIGITS})   # 3/4
      | (?P<decimal>(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\w))?)
    )
"""
"""A number without its sign, as a verbose pattern."""
_NUMBER = re.compile(rf"(?<![\w.]){NUMBER}", re.VERBOSE)  # not within a word or a number
_MINUS = re.compile(r"-(?P<gap>[ $]*)\Z")
_MARKED = re.compile(r"####\s*(?P<answer>[^\n]*)")
_CLOSING = ")]}%"
_FRACTION_COMMAND = re.compile(r"\\[dt]?frac\s*\{\s*(-?)\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_BOXED = "\\boxed{"
PLAIN_MARKS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
"""Minus signs, a dash and kinds of spaces in generated text."""


def answer_in(text: str) -> tuple[Fraction | None, bool]:
    r"""The number that a text gives as its answer, and whether its place is marked.

    That is the first number after the last `####`, else the last one in the last `\boxed{}`, else the last one in the text,
    which is not marked. None if the place chosen has no number.
    """
    text = _simplified(text)
    marked = list(_MARKED.finditer(text))
    if marked:
        first = _NUMBER.search(marked[-1]["answer"])
        return (_value(first) if first else None), True
    boxed = last_boxed(text)
    numbers = list(_NUMBER.finditer(text if boxed is None else boxed))
    return (_value(numbers[-1]) if numbers else None), boxed is not None


def number_of(text: str) -> Fraction | None:
    """The value of a text that has exactly one number and nothing before it but a currency sign or minus; else None.

    Text without a number may follow, such as a percent sign or a unit.
    """
    text = _simplified(text)
    match = _NUMBER.search(text)
    if match is None or text[: match.start()].strip(" \t-$") or _NUMBER.search(text, match.end()):
        return None
    return _value(match)


def _simplified(text: str) -> str:
    text = text.translate(PLAIN_MARKS).replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\!", "")
    return _FRACTION_COMMAND.sub(r"\1\2/\3", text)


def last_boxed(text: str) -> str | None:
    """The content of the last box, including nested braces; the rest of the text if the box isn't closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def _value(match: re.Match[str]) -> Fraction | None:
    parts = {name: part.replace(",", "") for name, part in match.groupdict().items() if part}
    if any(len(part) > MAX_DIGITS for part in parts.values()):
        return None
    return exact(parts, -1 if _is_negative(match.string[: match.start()]) else 1)


def exact(parts: Mapping[str, str], sign: int) -> Fraction | None:
    """The value of the parts that a number's pattern names; None if its denominator is 0."""
    try:
        if "whole" in parts:
            return sign * (int(parts["whole"]) + Fraction(int(parts["top"]), int(parts["bottom"])))
        if "numerator" in parts:
            return sign * Fraction(int(parts["numerator"]), int(parts["denominator"]))
        return sign * Fraction(parts["decimal"])
    except ZeroDivisionError:
        return None


def _is_negative(before: str) -> bool:
    """Whether the text before a number ends with a minus sign, as opposed to a subtraction or the dash of a list item."""
    minus = _MINUS.search(before)
    if minus is None:
        return False
    left, spaced = before[: minus.start()], " " in minus["gap"]
    operand = left.rstrip(" ")[-1:]
    if operand in ("", "\n"):
        return not spaced  # `- 5` at the beginning of a line is an item of a list
    if left == left.rstrip(" "):  # nothing between: `10-5`, `x-5`, but `=-5`, `(-5`
        return not (operand.isalnum() or operand in _CLOSING)
    if operand.isdigit() or operand in _CLOSING:  # `10 - 5`, `10 -5`
        return False
    return not (spaced and operand.isalpha())  # `x - 5`, but `is -5`
