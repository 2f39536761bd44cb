"""What is shown of a run while it goes: stages, rates and counts, as functions of stage statuses; and the simplest view.

The views of the terminal (`view.py`, `live.py`) and the page of `pipelinerl watch` show the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TextIO

import msgspec

from pipelinerl.metrics.statistics import LOW_ESS, actor_total, engine_total, trainer_progress
from pipelinerl.status.watchdog import waits_on
from pipelinerl.types import EngineProgress, StageState, StageStatus, TrainerProgress

REDRAW_S = 0.5
SILENT_S = 15.0
"""A stage that has not reported for longer than this is shown as silent."""
NO_STAGE = "no stage has reported yet"
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}
_INVISIBLE = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF]
_SHOWN = _PICTURES | {code: f"<U+{code:04X}>" for code in (*_INVISIBLE, *range(0xD800, 0xE000))}


# ---- text


def printable(text: str) -> str:
    """Make text that may come from data or models safe to print: it never reaches the terminal as control codes.

    Control characters become pictures (`␛`), except newlines, and bidirectional or invisible ones `<U+XXXX>`.
    """
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def duration(seconds: float | None) -> str:
    """`42s`, `3:07`, `2:05:00`; `-` for None."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def short(value: float) -> str:
    """Three significant digits with a unit: 7.81k, 52, 1.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def pause(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ---- what changes from look to look


class Rate:
    """The rate of one growing counter, in units per second, over a sliding window.

    Time counts from the first change, so that time without work (start-up, the evaluation before training) does not lower
    the rate. If the counter decreases (the stage was restarted), the measurement starts over.
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
        # Keep one point at or before the start of the window, so that a counter slower than the window has a rate.
        while len(points) > 2 and points[1][0] <= now - self._window_s:
            points.popleft()

    @property
    def per_s(self) -> float | None:
        """None until the counter has two points."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None

    def text(self, unit: str) -> str:
        return f"{'-' if self.per_s is None else short(self.per_s)} {unit}/s"


class Trends:
    """Throughputs, computed from many statuses.

    They are over the last 30 s; the time left is estimated from the optimizer steps of the last 30 minutes.
    """

    def __init__(self) -> None:
        self.generated = Rate(30.0)
        self.generated_by: dict[str, Rate] = {}
        self.trained_tokens = Rate(30.0)
        self.samples = Rate(30.0)
        self.steps = Rate(1800.0)

    def observe(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        engine, trainer = engine_total(statuses), trainer_progress(statuses)
        if engine is not None:
            self.generated.observe(now, engine.tokens_generated)
        for stage, status in statuses.items():
            if isinstance(status.progress, EngineProgress):
                self.generated_by.setdefault(stage, Rate(30.0)).observe(now, status.progress.tokens_generated)
        if trainer is not None:
            self.trained_tokens.observe(now, trainer.tokens_trained)
            self.samples.observe(now, trainer.trained)
            self.steps.observe(now, trainer.version)

    def remaining_s(self, steps_left: int) -> float | None:
        rate = self.steps.per_s
        return steps_left / rate if rate else None


# ---- what is shown


class ShownStage(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a stage; its texts are safe to print.

    for_s        time in its state. `silent_s`: time since its last report, if that is too long
    busy, rate   share of its time in which it works, and what it does in a second; empty where that has no meaning
    """

    stage: str
    state: StageState
    detail: str
    for_s: float
    silent_s: float | None
    waits_on: tuple[str, ...]
    machine: str
    busy: str = ""
    rate: str = ""


def shown_stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float) -> list[ShownStage]:
    """The stages at `now` (`time.monotonic`)."""
    shown = []
    for stage, status in statuses.items():
        progress, rate, silent_s = status.progress, "", now - status.written_s
        if isinstance(progress, EngineProgress):
            rate = trends.generated_by.get(stage, Rate(30.0)).text("tok")
        elif isinstance(progress, TrainerProgress):
            rate = f"{trends.samples.text('samples')}, {trends.trained_tokens.text('tok')}"
        busy = ""
        if isinstance(progress, EngineProgress | TrainerProgress):
            busy = f"{progress.busy_s / progress.ready_s:.0%}" if progress.ready_s > 0 else "-"
        one = ShownStage(
            stage=stage,
            state=status.state,
            detail=printable(status.detail),
            for_s=max(0.0, now - status.since_s),
            silent_s=silent_s if status.state in ("working", "waiting") and silent_s > SILENT_S else None,
            waits_on=waits_on(status, statuses),
            machine=printable(status.machine),
            busy=busy,
            rate=rate,
        )
        shown.append(one)
    return shown


def facts(statuses: Mapping[str, StageStatus]) -> dict[str, str]:
    """Weights, slots and rollouts, as the stages have counted them."""
    engine, actor = engine_total(statuses), actor_total(statuses)
    trainer = trainer_progress(statuses) or TrainerProgress()
    found = {}
    if engine is not None:
        last = f", last pause {pause(engine.pauses_s[-1])}" if engine.pauses_s else ""
        published = f"trainer at version {trainer.version}, engine at {engine.version}"
        found["weights"] = f"{published}; {engine.weight_updates} updates applied{last}"
        found["engine"] = f"{engine.in_progress} of {engine.slots} slots in progress, {engine.queued} queued"
    if actor is not None:
        skipped = f"; {actor.groups_skipped} problems skipped" if actor.groups_skipped else ""
        found["rollouts"] = (
            f"{actor.rollouts_started} started, {trainer.trained} trained, {trainer.queued} queued, "
            f"{actor.rollouts_in_progress} in progress, {dropped_rollouts(statuses) or '0 dropped'}{skipped}"
        )
    return found


def dropped_rollouts(statuses: Mapping[str, StageStatus]) -> str:
    """How many rollouts were dropped, by reason; empty if none was."""
    actor, trainer = actor_total(statuses), trainer_progress(statuses)
    dropped = Counter(actor.rollouts_dropped if actor else {})
    dropped.update(trainer.dropped if trainer else {})
    reasons = ", ".join(f"{printable(reason)} {count}" for reason, count in (+dropped).most_common())
    return f"{dropped.total()} dropped ({reasons})" if reasons else ""


def headline(latest: Mapping[str, float]) -> dict[str, str]:
    """What is known of the latest step's most important numbers, as text by name."""
    patterns = {
        "reward": ("reward_read_mean", ".3f"),
        "ess": ("ess", ".3f"),
        "lag": ("lag_mean", ".1f"),
        "entropy": ("entropy_mean", ".2f"),
        "length": ("completion_length_mean", ".0f"),
    }
    found = {name: format(latest[key], pattern) for name, (key, pattern) in patterns.items() if key in latest}
    if "lag" in found and "lag_max" in latest:
        found["lag"] += f" (max {latest['lag_max']:.0f})"
    if latest.get("ess", 1.0) < LOW_ESS:
        found["ess"] += " (low)"
    return found


# ---- the view


class RunView:
    """Shows a run to its user. This one, of kind `none`, only prints messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: set[str] = set()

    def update(self, statuses: Mapping[str, StageStatus], now: float) -> None:  # noqa: ARG002 - for the other views
        """Show the statuses of all stages at `now` (`time.monotonic`). May be called as often as the caller likes.

        Notes of the model's loading and of training are messages: what does not agree between model and tokenizer, how
        engine and trainer run the model, a collapse.
        """
        engine, trainer = engine_total(statuses), trainer_progress(statuses)
        lines = list(engine.notes) if engine else []
        if engine and trainer and trainer.runner:
            generates = f"generates {engine.runner}; " if engine.runner else ""
            lines.append(f"model: {generates}is trained {trainer.runner}")
        for line in (*lines, *(trainer.notes if trainer else ())):
            if line not in self._said:
                self._said.add(line)
                self.say(line)

    def say(self, text: str) -> None:
        """Print a message that stays on the screen, like a warning or a process's crash message."""
        print(printable(text.expandtabs()), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. May be called twice."""
