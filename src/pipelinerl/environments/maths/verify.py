"""What `math-verify` says of two answers. Imported in a process of the judge's pool only: see `math_judge`."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

library: Any = import_module("math_verify")


def same_value(expected: str, answer: str) -> bool:
    """Whether two pieces of LaTeX have the same value. Takes milliseconds as a rule, for ever now and then."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return bool(library.verify(_parsed(expected), _parsed(answer), timeout_seconds=None))


def _parsed(text: str) -> Any:
    """Only ever as LaTeX: the library reads other notations with Python's `eval`."""
    latex = [library.LatexExtractionConfig(boxed_match_priority=0)]
    return library.parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None)
