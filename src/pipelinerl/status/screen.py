"""What terminal views show: rates, and lines of text, as functions of stage statuses and the time; and the simplest view."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TextIO

from pipelinerl.metrics.statistics import LOW_ESS
from pipelinerl.metrics.totals import actor_total, engine_total, trainer_progress
from pipelinerl.types import ActorProgress, EngineProgress, StageStatus, TrainerProgress

REDRAW_S = 0.5
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}
_INVISIBLE = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF]
_SHOWN = _PICTURES | {code: f"<U+{code:04X}>" for code in (*_INVISIBLE, *range(0xD800, 0xE000))}


def printable(text: str) -> str:
    """Make text that may come from data or models safe to print: it never reaches the terminal as control codes.

    Control characters become pictures (`␛`), except newlines, and bidirectional or invisible ones `<U+XXXX>`.
    """
    return text.translate(_SHOWN)


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


SILENT_S = 15.0
"""A stage that has not reported for longer than this is shown as silent."""
NO_STAGE = "no stage has reported yet"


class Trends:
    """Values computed from many statuses: throughputs and the history of the reward.

    Throughputs are over the last 30 s; the time left is estimated from the optimizer steps of the last 30 minutes.
    """

    def __init__(self) -> None:
        self.generated = Rate(30.0)
        self.generated_by: dict[str, Rate] = {}
        self.trained_tokens = Rate(30.0)
        self.samples = Rate(30.0)
        self.steps = Rate(1800.0)
        self.rewards: deque[float] = deque(maxlen=400)
        self._rewards_version = 0

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
            if trainer.version > self._rewards_version and "reward_read_mean" in trainer.latest:
                self._rewards_version = trainer.version
                self.rewards.append(trainer.latest["reward_read_mean"])

    def remaining_s(self, steps_left: int) -> float | None:
        rate = self.steps.per_s
        return steps_left / rate if rate else None


def model_lines(statuses: Mapping[str, StageStatus]) -> list[str]:
    """What does not agree between model and tokenizer; how engine and trainer run the model, once both are ready; collapses.

    An engine behind HTTP says the latter in its own log.
    """
    engine, trainer = engine_total(statuses), trainer_progress(statuses)
    lines = list(engine.notes) if engine else []
    if engine and trainer and trainer.runner:
        generates = f"generates {engine.runner}; " if engine.runner else ""
        lines.append(f"model: {generates}is trained {trainer.runner}")
    return lines + list(trainer.notes if trainer else ())


def plain_line(statuses: Mapping[str, StageStatus], target: int, trends: Trends, elapsed_s: float) -> str:
    """A summary in one line, for logs."""
    trainer = trainer_progress(statuses) or TrainerProgress()
    parts = [f"[{duration(elapsed_s):>7}]", f"step {trainer.version}/{target}"]
    parts += [f"{name} {shown}" for name, shown in headline(trainer.latest)]
    rates = {"tok": trends.generated, "samples": trends.samples}
    parts += [per_second(rate, unit) for unit, rate in rates.items() if rate.per_s is not None]
    parts.append(f"queued {trainer.queued}")
    if dropped := dropped_by_reason(statuses):
        parts.append(f"dropped {dropped.total()} ({reasons(dropped)})")
    left_s = trends.remaining_s(max(0, target - trainer.version))
    return "  ".join(parts if left_s is None else [*parts, f"left {duration(left_s)}"])


def stage_lines(statuses: Mapping[str, StageStatus], now: float, longer_than_s: float) -> list[str]:
    """A line for each evaluation, and for each stage that has been waiting, starting, failed or silent for longer than
    `longer_than_s`.
    """
    lines = [] if statuses else [NO_STAGE]
    for status in statuses.values():
        running = status.state in ("working", "waiting")
        if running and isinstance(status.progress, ActorProgress) and status.progress.evaluating:
            lines.append(f"{status.stage} {status.progress.evaluating}")
        since_s = now - status.since_s
        if status.state in ("waiting", "starting", "failed") and since_s > longer_than_s:
            lines.append(f"{status.stage} {status.state} for {duration(since_s)}: {status.detail}")
        elif status.state == "working" and now - status.written_s > max(SILENT_S, longer_than_s):
            lines.append(f"{status.stage} has not reported for {duration(now - status.written_s)}: {status.detail}")
    return lines


def dropped_by_reason(statuses: Mapping[str, StageStatus]) -> Counter[str]:
    actor, trainer = actor_total(statuses), trainer_progress(statuses)
    dropped = Counter(actor.rollouts_dropped if actor else {})
    dropped.update(trainer.dropped if trainer else {})
    return +dropped


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


def per_second(rate: Rate, unit: str) -> str:
    value = rate.per_s
    return f"{'-' if value is None else short(value)} {unit}/s"


def headline(latest: Mapping[str, float]) -> list[tuple[str, str]]:
    """What is known of the latest step's most important numbers, as (name, text)."""
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
    return list(found.items())


def throughput(status: StageStatus, trends: Trends) -> tuple[str, str]:
    """How much of its time a stage is busy, and what it does in a second; empty where that has no meaning."""
    progress = status.progress
    if isinstance(progress, EngineProgress):
        generated = trends.generated_by.get(status.stage, Rate(30.0))
        return _share(progress.busy_s, progress.ready_s), per_second(generated, "tok")
    if isinstance(progress, TrainerProgress):
        rates = f"{per_second(trends.samples, 'samples')}, {per_second(trends.trained_tokens, 'tok')}"
        return _share(progress.busy_s, progress.ready_s), rates
    return "", ""


def _share(busy_s: float, ready_s: float) -> str:
    return f"{busy_s / ready_s:.0%}" if ready_s > 0 else "-"


def reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in dropped.most_common())


class RunView:
    """Shows a run to its user. This one, of kind `none`, only prints messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: set[str] = set()

    def update(self, statuses: Mapping[str, StageStatus], now: float) -> None:  # noqa: ARG002 - for the other views
        """Show the statuses of all stages at `now` (`time.monotonic`)."""
        for line in model_lines(statuses):
            if line not in self._said:
                self._said.add(line)
                self.say(line)

    def say(self, text: str) -> None:
        """Print a message that stays on the screen, like a warning or a process's crash message."""
        print(printable(text.expandtabs()), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. May be called twice."""
