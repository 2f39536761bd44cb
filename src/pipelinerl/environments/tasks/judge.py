"""Judges answers: directly where both are plain numbers or the same text, else with `math-verify`.

`math-verify` passes the model's text to sympy, where a few characters (`9^{9^{9}}`) can take unbounded time in C code that
no signal interrupts. So it runs in a separate process under limits (`user/pool.py`). Its own timeouts are disabled:
the pool kills the process anyway.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

from pipelinerl.environments.tasks.numbers import NUMBER, PLAIN_MARKS, exact
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.extras import require

CACHED_VERDICTS = 4096
MAX_ANSWER = 300
"""Longest final answer in characters, in a data set or from a model."""
_PLAIN_NUMBER = re.compile(rf"(?P<sign>-?)\s*\\?\$?\s*{NUMBER}\s*\.?", re.VERBOSE)
_THOUSANDS = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s(\d)\s*(\d)|(\d)\s*(\d))")
_LEAD = re.compile(
    r"\s*\\(?:text|textbf|textrm|mathrm)\s*\{\s*"
    r"(?:(?:so|thus|hence|therefore|the|final|answer|result|value|is|equals)\b[\s,:=]*)+\}",
    re.IGNORECASE,
)
"""Words before an answer, such as `\\text{the answer is }`."""
_IMAGINARY = re.compile(r"\\sqrt\s*\{\s*-\s*1\s*\}")
_UNIT = re.compile(
    r"(?P<number>.*\d)[\s~]*(?:\\[,;: ])*\s*"
    r"(?:\\(?:text|mathrm|textrm)\s*\{\s*(?P<text>[A-Za-z]+)\s*\}|(?P<letters>[A-Za-z]+))\.?"
)
_UNITS = (
    " meter:m metre:m kilometer:km kilometre:km centimeter:cm centimetre:cm millimeter:mm millimetre:mm second:s sec:s "
    "minute:min hour:h hr:h day:d year:y yr:y gram:g kilogram:kg pound:lb liter:l litre:l L:l degree:deg mile:mi yard:yd "
    "foot:ft feet:ft inch:in inche:in"
)
"""Units by their names in the singular; all others are only the same as themselves."""
_SPACING = re.compile(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])")


class Judge:
    """Compares final answers. Verdicts are cached: the attempts of a group often give the same answer."""

    def __init__(self, *, timeout_s: float, processes: int) -> None:
        """Raises MissingDependencyError without `math-verify`."""
        hint = "; or, if all answers are numbers, set environment.args.judge to `numbers`"
        require("math", "the judge math-verify", hint)
        # `verify` is registered so that a process imports math-verify when it starts: a call has no time for it.
        functions = {"judge": f"{__name__}:same_value", "verify": "math_verify:verify"}
        self._pool = FunctionPool(functions, Limits(timeout_s=timeout_s, workers=processes))
        self._cache: dict[tuple[str, str], bool | None] = {}

    async def verdict(self, expected: str, answer: str) -> bool | None:
        """Whether `answer` has the value of `expected`; None if the judge exceeded its time or memory, or crashed.

        Errors of the judge itself propagate: they fail the rollout.
        """
        expected, answer = _read(expected), _read(answer)
        if (quick := quick_verdict(expected, answer)) is not None:
            return quick
        key = (expected, answer)
        if key not in self._cache:
            found = None
            with suppress(*CALL_ENDED):
                found = await self._pool.call("judge", expected, answer) is True
            if len(self._cache) >= CACHED_VERDICTS:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = found
        return self._cache[key]


def same_value(expected: str, answer: str) -> bool:
    """Runs in a process of the pool: whether two pieces of LaTeX have the same value, which can take forever."""
    library: Any = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are disabled
    # Parsed as LaTeX only: the library reads other notations with Python's `eval`.
    latex = [library.LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [library.parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (expected, answer)]
    return bool(library.verify(*parsed, timeout_seconds=None))


def quick_verdict(expected: str, answer: str) -> bool | None:
    """The verdict where no algebra is needed: same text, plain numbers, other units, no or too long an answer. Else None."""
    if not answer.strip() or len(answer) > MAX_ANSWER:
        return False
    expected, answer = _read(expected), _read(answer)
    if _normalised(expected) == _normalised(answer):
        return True
    one, other = _plain_number(expected), _plain_number(answer)
    if one is not None and other is not None:  # exactly: math-verify would round
        return one == other
    amount, answered = _UNIT.fullmatch(expected), _UNIT.fullmatch(answer)
    if amount is None or answered is None or _plain_number(amount["number"]) is None:
        return None
    # Numbers with units that are not known to be the same differ: math-verify would leave the units out. 2ab is 2ba.
    first, second = (_unit(found["text"] or found["letters"]) for found in (amount, answered))
    return None if sorted(first) == sorted(second) else False


def _read(text: str) -> str:
    r"""The text without words before the answer, with one sign for each symbol, and `i` for `\sqrt{-1}`."""
    text = _LEAD.sub("", text.translate(PLAIN_MARKS), count=1).replace("{,}", ",").replace("\\!", "")
    return _IMAGINARY.sub("i", text).strip()


def _plain_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; else None."""
    text = _FRACTION.sub(lambda found: " " + "/".join(part for part in found.groups() if part), text)
    text = re.sub(r"\s*/\s*", "/", " ".join(text.strip().strip("$").split()))
    match = _PLAIN_NUMBER.fullmatch(_THOUSANDS.sub(",", text))
    if match is None:
        return None
    parts = {name: part.replace(",", "") for name, part in match.groupdict().items() if part}
    return exact(parts, -1 if "sign" in parts else 1)


def _normalised(text: str) -> str:
    """The text without LaTeX spacing and other marks that do not change the meaning.

    A space between digits, or after a comma and before three digits, does: `1 2` is not 12, and `1, 234` is not 1,234.
    """
    text = _SPACING.sub(" ", re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)).replace("\\dfrac", "\\frac")
    text = " ".join(text.strip().strip("$").split())
    removable = r"(?<![\d.,]) | (?![\d.])|(?<=,) (?!\d{3}(?!\d))"
    return re.sub(removable, "", text).removesuffix(".")


def _unit(name: str) -> str:
    name = name if len(name) <= 2 else name.lower().removesuffix("s")
    known = re.search(rf" {name}:(\w+)", _UNITS)
    return known[1] if known else name
