"""A parser for arithmetic expressions. Text from a model is never executed."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_DIGITS = 6

_TOKEN = re.compile(r"\s*(?:(\d+)|([-+*/()]))")
_PLAIN = {"×": "*", "·": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": ""}  # noqa: RUF001


class Expression(NamedTuple):
    """The exact value (None after a division by zero), and the numbers in order of appearance."""

    value: Fraction | None
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """An expression of whole numbers, `+ - * /` and brackets. None for anything else, or if it is too long or too deep."""
    for written, meant in _PLAIN.items():
        text = text.replace(written, meant)
    tokens = _tokens(text.strip())
    if not tokens:
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
    except _NotAnExpressionError:
        return None
    return Expression(value, tuple(reader.numbers)) if reader.position == len(tokens) else None


class _NotAnExpressionError(Exception):
    pass


def _tokens(text: str) -> list[str]:
    """The tokens of a text. Empty if it is longer than MAX_LENGTH or has anything else in it."""
    tokens: list[str] = []
    position = 0
    while position < len(text) <= MAX_LENGTH:
        match = _TOKEN.match(text, position)
        if match is None or len(match[1] or "") > MAX_DIGITS:
            return []
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Reader:
    """Recursive descent: a sum of products of numbers and bracketed sums."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def sum(self, depth: int) -> Fraction | None:
        value = self._product(depth)
        while self._next() in ("+", "-"):
            sign = self._take()
            value = _apply(sign, value, self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction | None:
        value = self._factor(depth)
        while self._next() in ("*", "/"):
            sign = self._take()
            value = _apply(sign, value, self._factor(depth))
        return value

    def _factor(self, depth: int) -> Fraction | None:
        symbol = self._take()
        if symbol.isdigit():
            self.numbers.append(int(symbol))
            return Fraction(int(symbol))
        if symbol != "(" or depth == MAX_DEPTH:
            raise _NotAnExpressionError
        value = self.sum(depth + 1)
        if self._take() != ")":
            raise _NotAnExpressionError
        return value

    def _next(self) -> str:
        return self._tokens[self.position] if self.position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        if not token:
            raise _NotAnExpressionError
        self.position += 1
        return token


def _apply(sign: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None or (sign == "/" and right == 0):
        return None
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right if sign == "*" else left / right
