"""Judges answers: directly where both are plain numbers or the same text, else with `math-verify`.

`math-verify` passes the model's text to sympy, where a few characters (`9^{9^{9}}`) can take unbounded time in C code that
no signal interrupts. So it runs in a separate process under limits (`user/pool.py`). Its own timeouts are disabled: they use
the signal that `actor.deadline` needs, and the pool kills the process anyway.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections import OrderedDict
from fractions import Fraction
from typing import Any, NamedTuple

from pipelinerl.environments.maths.numbers import number_of
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.errors import MissingDependencyError

CACHED_VERDICTS = 4096
MAX_ANSWER = 300
"""Longest final answer in characters, in a data set or from a model."""
_PLAIN_NUMBER = re.compile(r"\s*-?\s*\\?\$?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?\.?\s*")


class Verdict(NamedTuple):
    """`failed`: the judge exceeded its time or memory, or crashed; the answer counts as wrong."""

    right: bool
    failed: bool = False


class Judge:
    """Compares final answers. Verdicts are cached: the attempts of a group often give the same answer."""

    def __init__(self, name: str, *, timeout_s: float, processes: int) -> None:
        """Raises MissingDependencyError without `math-verify`, unless `name` is `numbers`."""
        if name == "math-verify" and importlib.util.find_spec("math_verify") is None:
            raise MissingDependencyError(
                "math-verify is not installed: pip install 'pipelinerl[math]', or, if all answers are numbers, set "
                "environment.args.judge to `numbers`"
            )
        self.numbers_only = name == "numbers"
        # `verify` is registered so that a process imports math-verify when it starts: a call has no time for it.
        functions = {"judge": f"{__name__}:same_value", "verify": "math_verify:verify"}
        limits = Limits(timeout_s=timeout_s)
        self._pool = None if self.numbers_only else FunctionPool(functions, workers=processes, limits=limits)
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    async def verdict(self, expected: str, answer: str) -> Verdict:
        """Whether `answer` has the value of `expected`. Errors of the judge itself propagate: they fail the rollout."""
        quick = quick_verdict(expected, answer)
        if quick is not None or self._pool is None:
            return Verdict(bool(quick))
        key = (expected, answer)
        known = self._cache.get(key)
        if known is None:
            try:
                known = Verdict(await self._pool.call("judge", expected, answer) is True)
            except CALL_ENDED:
                known = Verdict(right=False, failed=True)
            self._cache[key] = known
            if len(self._cache) > CACHED_VERDICTS:
                self._cache.popitem(last=False)
        return known

    def close(self) -> None:
        """End the judge's processes; they also end with this one."""
        if self._pool is not None:
            self._pool.close()


def same_value(expected: str, answer: str) -> bool:
    """Runs in a process of the pool: whether two pieces of LaTeX have the same value, which can take forever."""
    library: Any = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are disabled
    # Parsed as LaTeX only: the library reads other notations with Python's `eval`.
    latex = [library.LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [library.parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (expected, answer)]
    return bool(library.verify(*parsed, timeout_seconds=None))


def quick_verdict(expected: str, answer: str) -> bool | None:
    """The verdict where no algebra is needed: same text, two plain numbers, or an empty or too long answer. Else None."""
    if not answer.strip() or len(answer) > MAX_ANSWER:
        return False
    if _normalised(expected) == _normalised(answer):
        return True
    one, other = _plain_number(expected), _plain_number(answer)
    if one is None or other is None:
        return None
    if one == other:
        return True
    # Different whole numbers are wrong; math-verify decides about rounding, as in 0.3333 and 1/3.
    return False if one.denominator == other.denominator == 1 else None


def _plain_number(text: str) -> Fraction | None:
    return number_of(text) if _PLAIN_NUMBER.fullmatch(text) else None


def _normalised(text: str) -> str:
    """The text without LaTeX spacing and other marks that do not change the meaning."""
    for mark in ("\\left", "\\right", "\\!", "\\,"):
        text = text.replace(mark, "")
    return "".join(text.replace("\\dfrac", "\\frac").split()).strip("$").removesuffix(".")
