"""What the faults of runs did: records, a line for each run, and a table over all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

from tests.chaos.plan import KINDS, Fault

Effect = Literal["went on", "restarted", "ended", "not injected"]


class Injected(msgspec.Struct, kw_only=True):
    """What a fault did.

    `effect`: the run went on, with the process replaced (`restarted`), or the session ended with `said`. `noticed_s`: until
    the session ended. `recovered_s`: until a step was taken, by the run or by the session that resumed it. Both count from
    the injection; None: not observed, as another fault came first.
    """

    fault: Fault
    effect: Effect = "went on"
    at_step: int = 0
    noticed_s: float | None = None
    recovered_s: float | None = None
    said: str = ""


class Result(msgspec.Struct, kw_only=True):
    """One run. `violations` are empty if it reached its goal in time and all invariants hold."""

    layout: str
    seed: int
    faults: list[Injected]
    troubled: dict[str, int]
    sessions: int
    steps: int
    wall_s: float
    violations: list[str]
    command: str
    run_dir: str


def line_of(result: Result) -> str:
    """What happened to one run, in one line, with a line for each violation."""
    injected = [one for one in result.faults if one.effect != "not injected"]
    kinds = Counter(one.fault.kind for one in injected)
    ended = [one for one in injected if one.effect == "ended"]
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    parts = [
        f"{result.layout} seed {result.seed}: {len(injected)} faults ({listed})",
        f"{result.sessions} sessions",
        f"{result.steps} steps in {result.wall_s:.0f} s",
    ]
    if noticed := [one.noticed_s for one in ended if one.noticed_s is not None]:
        parts.append(f"ended within {median(noticed):.1f} s (longest {max(noticed):.1f})")
    if recovered := [one.recovered_s for one in injected if one.recovered_s is not None]:
        parts.append(f"next step within {median(recovered):.1f} s (longest {max(recovered):.1f})")
    outcome = "whole" if not result.violations else "BROKEN"
    return "\n".join([f"{', '.join(parts)}: {outcome}", *(f"  {line}" for line in result.violations)])


def total_of(results: Sequence[Result]) -> str:
    injected = [one for result in results for one in result.faults if one.effect != "not injected"]
    whole = sum(not result.violations for result in results)
    return f"{len(injected)} faults in {len(results)} runs; {whole} runs whole, {len(results) - whole} broken"


def table_of(results: Sequence[Result]) -> str:
    """A Markdown table: a row for each kind of fault and each kind of place, over all runs."""
    rows: dict[tuple[int, str], list[Injected]] = {}
    for one in (one for result in results for one in result.faults if one.effect != "not injected"):
        place = re.sub(r"-(rank-)?\d+$", lambda match: " rank" if match[1] else "", one.fault.place)
        rows.setdefault((KINDS.index(one.fault.kind), place), []).append(one)
    lines = [
        "| fault | place | times | went on | restarted | ended, resumed | end, s | next step, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, place), found in sorted(rows.items()):
        effects = Counter(one.effect for one in found)
        counts = " | ".join(str(effects[effect]) for effect in ("went on", "restarted", "ended"))
        ended = _times(one.noticed_s for one in found)
        lines.append(
            f"| {KINDS[kind]} | {place} | {len(found)} | {counts} | {ended} | {_times(one.recovered_s for one in found)} |"
        )
    return "\n".join(lines)


def _times(times_s: Iterable[float | None]) -> str:
    """Median and longest."""
    known = [time_s for time_s in times_s if time_s is not None]
    return f"{median(known):.1f}, {max(known):.1f}" if known else ""
