"""Compares two answers with `math-verify`. Imported only in the processes of the judge's pool: see `judge`."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

library: Any = import_module("math_verify")


def same_value(expected: str, answer: str) -> bool:
    """Whether two pieces of LaTeX have the same value. Usually takes milliseconds; can take forever."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are disabled
    return bool(library.verify(_parsed(expected), _parsed(answer), timeout_seconds=None))


def _parsed(text: str) -> Any:
    """Parse as LaTeX only: the library reads other notations with Python's `eval`."""
    latex = [library.LatexExtractionConfig(boxed_match_priority=0)]
    return library.parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None)
