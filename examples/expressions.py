"""Arithmetic expressions with their exact values, read by Python's parser, which executes nothing: for the tasks here."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

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
