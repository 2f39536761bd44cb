"""Detects a stalled run and explains which stage waits on which. Pure: the caller passes the statuses and the time.

A run is stalled when, for `timeout_s`, no counter of any stage has changed, or a stage in state "working" has not reported.
The second rule finds a stage that hangs while the others go on (with a stream that drops its oldest groups, the actor
never waits for a hung trainer). A waiting stage reports too: without reports it is suspect once nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import msgspec

from pipelinerl.types import StageStatus

# Not counted as progress: seconds grow also while a stage waits, and measured values change only together with counters.
_NOT_PROGRESS = frozenset({"busy_s", "ready_s", "pauses_s", "latest", "evaluations"})


class Watchdog:
    """Observes the statuses of all stages repeatedly and reports when the run is stalled.

    At most a quarter of `timeout_s` counts between two observations, because the whole run may have been suspended (Ctrl-Z,
    a debugger, a sleeping machine). So a stall takes at least four observations. While a stage is starting, unchanged
    counters are not a stall: loading a model changes no counter and has a timeout of its own.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._observed_s: float | None = None
        self._counters: object = None
        self._quiet_s = 0.0
        self._written_s: dict[str, float] = {}
        self._silent_s: dict[str, float] = {}

    def observe(self, statuses: Mapping[str, StageStatus], now: float) -> str | None:
        """One observation at `now`, in seconds of the clock that the statuses were written with (`time.monotonic`).

        Returns a message with one line per stage if the run is stalled. Suspects should report and no longer do.
        """
        elapsed_s = 0.0 if self._observed_s is None else min(now - self._observed_s, self._timeout_s / 4)
        self._observed_s = now
        for stage, status in statuses.items():
            silent = self._written_s.get(stage) == status.written_s
            self._silent_s[stage] = self._silent_s[stage] + elapsed_s if silent else 0.0
            self._written_s[stage] = status.written_s
        counters = {stage: _counters(status) for stage, status in statuses.items()}
        moved = counters != self._counters or any(status.state == "starting" for status in statuses.values())
        self._counters, self._quiet_s = counters, 0.0 if moved else self._quiet_s + elapsed_s
        if not statuses or all(status.state == "done" for status in statuses.values()):
            return None
        quiet = self._quiet_s >= self._timeout_s
        reporting = ("working", "waiting") if quiet else ("working",)
        suspects = tuple(
            stage
            for stage, status in statuses.items()
            if status.state in reporting and self._silent_s[stage] >= self._timeout_s
        )
        if not quiet and not suspects:
            return None
        what = f"nothing has moved for {self._quiet_s:.0f} s" if quiet else f"{' and '.join(suspects)} hung"
        lines = [f"{what} (launch.watchdog_s is {self._timeout_s:g}):"]
        for stage, status in statuses.items():
            place = f"pid {status.pid} on {status.machine}" if status.machine else f"pid {status.pid}"
            detail = f": {status.detail}" if status.detail else ""
            others = waits_on(status, statuses)
            waits = f" [waits on: {', '.join(others)}]" if others else ""
            silent_s = f"{self._silent_s[stage]:.0f} s"
            suspect = f" [SUSPECT: it has not reported since, {silent_s} ago]" if stage in suspects else ""
            since_s = max(0.0, now - status.since_s)
            lines.append(f"  {stage} ({place}): {status.state} for {since_s:.0f} s{detail}{waits}{suspect}")
        if cycle := find_cycle(statuses):
            lines.append(f"  circular wait: {' waits on '.join([*cycle, cycle[0]])}")
        return "\n".join(lines)


def waits_on(status: StageStatus, stages: Mapping[str, object]) -> tuple[str, ...]:
    """The other stages that a waiting stage waits for. `actor` stands for all actors (`actor-0`, `actor-1`)."""
    if status.state != "waiting":
        return ()
    named = (stage for name in status.waits_for for stage in stages if stage == name or stage.startswith(f"{name}-"))
    return tuple(stage for stage in dict.fromkeys(named) if stage != status.stage)


def find_cycle(statuses: Mapping[str, StageStatus]) -> tuple[str, ...]:
    """Stages of which each waits on the next one, and the last on the first; empty if there is no such cycle."""
    try:
        TopologicalSorter({stage: waits_on(status, statuses) for stage, status in statuses.items()}).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1][1:]))
    return ()


def _counters(status: StageStatus) -> tuple[object, ...]:
    """Values that change when the stage makes progress. Switching between working and waiting is not progress."""
    phase = status.state if status.state in ("starting", "done", "failed") else "running"
    if status.progress is None:
        return (status.pid, phase)
    values = msgspec.structs.asdict(status.progress)
    return (status.pid, phase, {name: values[name] for name in values if name not in _NOT_PROGRESS})
