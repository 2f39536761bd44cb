"""The colour of each token, by what made it: styles for rich, and a legend that says what they mean."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

ColourBy = Literal["version", "logprob", "gap"]
MODES: tuple[ColourBy, ...] = ("version", "logprob", "gap")

_VERSIONS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "white")
_PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
_PROBABILITY_STYLES = ("bold red", "dark_orange", "yellow", "green", "")
_GAPS = (-0.7, -0.1, -0.01, 0.01, 0.1, 0.7)
_GAP_STYLES = ("bold red", "red", "dark_orange", "", "cyan", "bright_blue", "bold bright_blue")


class Colouring(NamedTuple):
    """A style for each token, and what the styles mean: (label, style)."""

    styles: list[str]
    legend: list[tuple[str, str]]


def by_version(versions: Sequence[int]) -> Colouring:
    """Neighbouring versions never share a colour; far ones may."""
    styles = {version: _VERSIONS[i % len(_VERSIONS)] for i, version in enumerate(sorted(set(versions)))}
    return Colouring(
        [styles[version] for version in versions], [(f"v{version}", style) for version, style in styles.items()]
    )


def by_logprob(logprobs: Sequence[float]) -> Colouring:
    """By the probability with which the engine sampled a token."""
    styles = [_PROBABILITY_STYLES[bisect_right(_PROBABILITIES, math.exp(min(0.0, logprob)))] for logprob in logprobs]
    labels = [f"p < {_PROBABILITIES[0]:g}", *(f"from {limit:g}" for limit in _PROBABILITIES)]
    return Colouring(styles, list(zip(labels, _PROBABILITY_STYLES, strict=True)))


def by_gap(gaps: Sequence[float]) -> Colouring:
    """By the log-prob under other weights minus the engine's, nats: red is less likely now, blue is likelier."""
    styles = [_GAP_STYLES[bisect_right(_GAPS, gap)] for gap in gaps]
    labels = [f"below {_GAPS[0]:g}", *(f"from {limit:g}" for limit in _GAPS)]
    return Colouring(styles, list(zip(labels, _GAP_STYLES, strict=True)))
