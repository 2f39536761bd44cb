"""How fast counters move. No clock here: whoever looks says what time it is."""

from __future__ import annotations

from collections import deque


class Rate:
    """Units per second of one growing counter, over a sliding window.

    The clock starts with the first movement seen, so that time before there was anything to do (start-up, the evaluation
    before training) doesn't count as slowness. A counter that goes back (a restarted stage) starts afresh.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()
        self._moving = False

    def observe(self, now: float, count: float) -> None:
        points = self._points
        if points and count < points[-1][1]:
            points.clear()
            self._moving = False
        if not self._moving:
            self._moving = bool(points) and count > points[-1][1]
            points.clear()
        points.append((now, count))
        # One point at or before the window's edge stays, so that a counter slower than the window still has a rate.
        while len(points) > 2 and points[1][0] <= now - self._window_s:
            points.popleft()

    @property
    def per_s(self) -> float | None:
        """None until there is something to measure."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None
