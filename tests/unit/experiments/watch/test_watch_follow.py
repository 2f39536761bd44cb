"""Curves have a bounded number of points."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipelinerl.experiments.watch import shown
from pipelinerl.experiments.watch.shown import FollowedCurves, Seen


def follow_page(curves: FollowedCurves, page: dict[str, list[Any]], at: Seen) -> Seen:
    """What a page does with a part of the curves."""
    part, at = curves.since(at)
    if part is not None:
        for name, values in part["columns"].items():
            page[name] = [*page.get(name, [])[: part["start"]], *values]
    return at


def test_a_page_that_follows_has_what_a_new_page_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "MOST_POINTS", 8)
    curves, page, at = FollowedCurves(), dict[str, list[Any]](), Seen()
    for n in range(100):
        curves.append({"n": n, **({"late": 2.0} if n >= 50 else {}), "bad": math.nan})
        if n in (17, 60):
            curves.cut(n - 4)  # resumed
        if n % 3 == 0:
            at = follow_page(curves, page, at)
    at = follow_page(curves, page, at)
    fresh: dict[str, list[Any]] = {}
    follow_page(curves, fresh, Seen())
    assert page == fresh
    assert 4 < len(page["n"]) <= 8
    assert set(page["bad"]) == {None}
    assert page["n"] == sorted(page["n"])
    assert page["late"][0] is None
    assert page["late"][-1] == 2.0
    assert curves.since(at) == (None, at)
