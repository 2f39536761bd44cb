"""When nothing moves, say who waits on whom. Pure decisions: whoever looks at the board says what time it is.

A run is stalled when, for `timeout_s`, no counter of any stage has moved, or when a stage that says that it works has not
reported at all. The second is what catches a stage that hangs while the others go on (a ring stream that drops its
oldest groups never makes the actor wait).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipelinerl.types import StageStatus

# Seconds grow while a stage waits, too, and measured values say nothing that the counters beside them do not say.
_NOT_PROGRESS = frozenset({"busy_s", "ready_s", "pauses_s", "latest", "recent_reward", "evaluations"})


class Stall(NamedTuple):
    """`suspects` are the stages that work, by their own last word, but have not reported; `message` has a line a stage."""

    quiet_s: float
    suspects: tuple[str, ...]
    message: str


class Watchdog:
    """Looks at every stage's status again and again; says when the run is stalled.

    Of the time between two looks at most a quarter of `timeout_s` counts: when the whole run was suspended (Ctrl-Z, a
    debugger, a machine that slept), the time it was away is nobody's fault. So a stall takes at least four looks.
    While a stage is starting, nothing is a stall: loading a model moves no counter and has a bound of its own.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_s: float | None = None
        self._moves: object = None
        self._quiet_s = 0.0
        self._written_s: dict[str, float] = {}
        self._silent_s: dict[str, float] = {}

    def observe(self, statuses: Mapping[str, StageStatus], now: float) -> Stall | None:
        """One look, at `now` seconds of the clock that the statuses were written with (`time.monotonic`)."""
        elapsed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, self._timeout_s / 4)
        self._looked_s = now
        self._count_silence(statuses, elapsed_s)
        moves = {stage: _moves(status) for stage, status in statuses.items()}
        if moves != self._moves or any(status.state == "starting" for status in statuses.values()):
            self._moves = moves
            self._quiet_s = 0.0
        else:
            self._quiet_s += elapsed_s
        if not statuses or all(status.state == "done" for status in statuses.values()):
            return None
        suspects = tuple(
            stage
            for stage, status in statuses.items()
            if status.state == "working" and self._silent_s[stage] >= self._timeout_s
        )
        if self._quiet_s < self._timeout_s and not suspects:
            return None
        return Stall(self._quiet_s, suspects, self._explain(statuses, suspects, now))

    def _count_silence(self, statuses: Mapping[str, StageStatus], elapsed_s: float) -> None:
        for stage, status in statuses.items():
            if self._written_s.get(stage) == status.written_s:
                self._silent_s[stage] += elapsed_s
            else:
                self._written_s[stage] = status.written_s
                self._silent_s[stage] = 0.0

    def _explain(self, statuses: Mapping[str, StageStatus], suspects: Sequence[str], now: float) -> str:
        if self._quiet_s >= self._timeout_s:
            lines = [f"nothing has moved for {self._quiet_s:.0f} s (launch.watchdog_s is {self._timeout_s:g}):"]
        else:
            lines = [f"{' and '.join(suspects)} hung (launch.watchdog_s is {self._timeout_s:g}):"]
        for stage, status in statuses.items():
            line = f"  {describe(status, now)}"
            others = waits_on(status, statuses)
            if others:
                line += f" [waits on: {', '.join(others)}]"
            if stage in suspects:
                line += f" [SUSPECT: it has not reported since, {self._silent_s[stage]:.0f} s ago]"
            elif status.state in ("waiting", "working") and self._silent_s[stage] >= self._timeout_s / 2:
                line += f" [it has not reported for {self._silent_s[stage]:.0f} s]"
            lines.append(line)
        circle = find_circle(statuses)
        if circle:
            lines.append(f"  a circle: {' waits on '.join([*circle, circle[0]])}")
        return "\n".join(lines)


def describe(status: StageStatus, now: float) -> str:
    """One stage in words: `trainer (pid 7): waiting for 12 s: samples from the actor: 3 of 64 are here`."""
    since_s = max(0.0, now - status.since_s)
    detail = f": {status.detail}" if status.detail else ""
    return f"{status.stage} (pid {status.pid}): {status.state} for {since_s:.0f} s{detail}"


def waits_on(status: StageStatus, stages: Mapping[str, object]) -> tuple[str, ...]:
    """The other stages that a waiting stage waits for. Of several stages of a kind, `actor` stands for all."""
    if status.state != "waiting":
        return ()
    named = (stage for name in status.waits_for for stage in stages if stage == name or stage.startswith(f"{name}-"))
    return tuple(stage for stage in dict.fromkeys(named) if stage != status.stage)


def find_circle(statuses: Mapping[str, StageStatus]) -> tuple[str, ...]:
    """Stages that wait on one another in a circle, beginning with the first of them; empty when there is none."""
    edges = {stage: waits_on(status, statuses) for stage, status in statuses.items()}

    def follow(path: tuple[str, ...]) -> tuple[str, ...]:
        for stage in edges[path[-1]]:
            if stage == path[0]:
                return path
            if stage not in path and (found := follow((*path, stage))):
                return found
        return ()

    return next((circle for stage in edges if (circle := follow((stage,)))), ())


def _moves(status: StageStatus) -> tuple[object, ...]:
    """What changes when the stage gets something done. Going from working to waiting and back gets nothing done."""
    phase = status.state if status.state in ("starting", "done", "failed") else "running"
    if status.progress is None:
        return (status.pid, phase)
    counters = msgspec.structs.asdict(status.progress)
    return (status.pid, phase, {name: counters[name] for name in counters if name not in _NOT_PROGRESS})
