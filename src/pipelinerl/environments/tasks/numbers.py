r"""Numbers and arithmetic expressions in free text, with their exact values. Pure functions; no text is ever executed.

Number formats: `42`, `-3.50`, `.5`, `1,234,567`, `$1,200.`, `75%` (as 75), `3/4`, `2 1/2`, `1e3`, `\frac{3}{4}`, a Unicode
minus, and LaTeX's `\$`, `\%`, `{,}`. A minus counts as a sign only where it can't be a subtraction.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

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


# ---- arithmetic expressions, read by Python's parser, which executes nothing

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_OPERAND_DIGITS = 6

_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": ""}  # noqa: RUF001
_SYMBOLS = re.compile(r"[\d\s()+*/-]+")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Expression(NamedTuple):
    """The exact value (None after a division by zero), and the numbers in order of appearance."""

    value: Fraction | None
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """An expression of whole numbers, `+ - * /` and brackets. None for anything else, or if it is too long or too deep."""
    for sign, meant in _SIGNS.items():
        text = text.replace(sign, meant)
    text = text.strip()
    operands = re.findall(r"\d+", text)
    depth = max(accumulate({"(": 1, ")": -1}.get(symbol, 0) for symbol in text), default=0)
    too_long = len(text) > MAX_LENGTH or any(len(operand) > MAX_OPERAND_DIGITS for operand in operands)
    if too_long or depth > MAX_DEPTH or not _SYMBOLS.fullmatch(text):
        return None
    # Python's own syntax has no zeros in front of a number, no digits of other scripts, and no line breaks in a sum.
    written = re.sub(r"\d+", lambda operand: str(int(operand[0])), " ".join(text.split()))
    try:
        tree = ast.parse(written, mode="eval").body
        return Expression(_value_of(tree), tuple(map(int, operands)))
    except (SyntaxError, _NotAnExpressionError):
        return None


class _NotAnExpressionError(Exception):
    pass


def _value_of(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            one, other = _value_of(left), _value_of(right)
            if one is None or other is None or (isinstance(sign, ast.Div) and other == 0):
                return None
            return _OPERATIONS[type(sign)](one, other)
    raise _NotAnExpressionError
