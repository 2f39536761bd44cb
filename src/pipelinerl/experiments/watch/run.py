"""The state of one run, read from its directory, and what of it a page has not seen yet."""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError
from pipelinerl.experiments.watch.shown import Texts, newest_of, shown_group
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import Tail, superseded, without_repeated
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.statistics import REWARD, engine_total
from pipelinerl.metrics.timeline import TIMELINE_STEM, TimelineRecord
from pipelinerl.report.curves import Columns, Seen, StepColumns
from pipelinerl.report.series import name_of, read_config, read_summary
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import read_statuses
from pipelinerl.status.view import Trends, facts, printable, shown_stages
from pipelinerl.types import Group, StageStatus

LOOK_EVERY_S = 0.9
GROUPS_EVERY_S = 3.0
"""How often the newest groups change: slowly enough to read."""
FRESH_S = 60.0
"""A run over several machines has no lock here: it runs if its records changed within this time."""
SPEED_STEPS = 50
"""Optimizer steps over which the time left is estimated."""


class _Settings(msgspec.Struct):
    """What is read of a line of `sessions.jsonl`: the configuration, without secrets."""

    config: dict[str, Any] = {}


@dataclass
class PageState:
    """What a page has of a run: points of the curves, and the other parts as they were sent last."""

    steps: Seen = field(default_factory=Seen)
    load: Seen = field(default_factory=Seen)
    parts: dict[str, Any] = field(default_factory=dict)


class WatchedRun:
    """One run. `look` reads what is new, and `news` returns what a page has not seen. Nothing is read without a page."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.steps = StepColumns()
        self._run = run = RunDirectory(root)
        self._clock = clock
        self._looked_s = -LOOK_EVERY_S
        self._config: RunConfig | None = None
        self._config_state: tuple[int, int] | None = None
        self._problem = ""
        self._state, self._message = "gone", ""
        self._latest: StepRecord | None = None
        self._evaluations: list[EvaluationRecord] = []
        self._load, self._load_of = Columns(), dict[int, TimelineRecord]()
        self._texts: Texts | None = None
        self._groups: list[Group] = []
        self._groups_s = -GROUPS_EVERY_S
        self._groups_changed = False
        self._parts: dict[str, Any] = {"evaluations": [], "groups": None, "settings": {}}
        self._statuses: Mapping[str, StageStatus] = {}
        self._trends = Trends()
        self._tail = Tail(run.metrics, StepRecord)
        self._evaluation_tail = Tail(run.evaluations, EvaluationRecord)
        self._group_tail = Tail(run.recorded, Group, newest=True)
        self._session_tail = Tail(run.sessions, _Settings, newest=True)
        self._timelines: dict[Path, Tail[TimelineRecord]] = {}

    def look(self, *, at_once: bool = False) -> None:
        """Read what is new, if the last look is `LOOK_EVERY_S` old, did not reach the end of the files, or `at_once`."""
        now = self._clock()
        if now - self._looked_s < LOOK_EVERY_S and not (at_once or self.behind):
            return
        self._looked_s = now
        if not self._look_at_config():
            self._state, self._message = "gone", f"there is no run in {self.root} any more"
            return
        for session in self._session_tail.look():
            self._parts["settings"] = session.config
        self._look_at_evaluations_and_steps()
        self._look_at_load()
        if now - self._groups_s >= GROUPS_EVERY_S and self._config is not None:
            self._look_at_groups(now)
        self._statuses = read_statuses(self._run.statuses)
        self._state, self._message = self._judge()
        if self._state == "running":
            self._trends.observe(self._statuses, now)

    @property
    def behind(self) -> bool:
        """Whether there is more to read already."""
        tails: tuple[Tail[Any], ...] = (self._tail, self._evaluation_tail, *self._timelines.values())
        return self._state != "gone" and any(tail.more for tail in tails)

    def everything(self) -> dict[str, Any]:
        """What a page shows that is not updated. Waits for the tokenizer."""
        self.look(at_once=True)
        while self.behind:
            self.look(at_once=True)
        if self._texts is not None:
            self._texts.wait()
        self.look(at_once=True)
        return self.news(PageState())

    def _look_at_config(self) -> bool:
        try:
            found = self._run.config.stat()
        except OSError:
            return False
        if (state := (found.st_ino, found.st_mtime_ns)) != self._config_state:
            self._config_state, self._problem = state, ""
            try:
                self._config = read_config(self.root)
            except PipelineRLError as error:
                self._problem = printable(str(error))
        return True

    def _look_at_evaluations_and_steps(self) -> None:
        evaluations, steps = self._evaluation_tail.look(), self._tail.look()
        if self._evaluation_tail.restarted:
            self._evaluations = []
        self._evaluations = without_repeated([*self._evaluations, *evaluations], superseded)
        if self._tail.restarted:
            self.steps.cut(0)
            self._latest = None
        for record in steps:
            self.steps.add(record, self._evaluations)
            self._latest = record
        if (shown := [self._evaluation(one) for one in self._evaluations]) != self._parts["evaluations"]:
            self._parts["evaluations"] = shown

    def _evaluation(self, one: EvaluationRecord) -> dict[str, Any]:
        """One evaluation, with its place on the three axes of the curves."""
        done = bisect_right(self.steps["version"], one.version)
        return {
            "when": one.when,
            "version": one.version,
            "version_min": one.version_min,
            "version_max": one.version_max,
            "minutes": max(0.0, one.time_s - self.steps.begin_s) / 60,
            "rollouts": self.steps["rollouts"][done - 1] if done else 0,
            "problems": one.problems,
            "reward": one.reward_mean,
            "sets": {printable(name): value for name, value in one.metrics.items() if name.endswith(REWARD)},
            "error": one.reward_standard_error,
            "length": one.completion_length_mean,
            "failed": {printable(reason): count for reason, count in one.failed.items()},
        }

    def _look_at_load(self) -> None:
        """The load of all engines together, from the timeline of each."""
        for path in self.root.glob(f"{TIMELINE_STEM}*.jsonl"):
            self._timelines.setdefault(path, Tail(path, TimelineRecord))
        found: list[TimelineRecord] = []
        for tail in self._timelines.values():
            found += tail.look()
            if tail.restarted:
                self._load.cut(0)
        for record in sorted(found, key=lambda one: one.time_s):
            last = self._load_of.get(record.worker)
            minutes, keep, times = record.time_s / 60, self._load.rows, self._load["minutes"]
            if last is not None and record.time_s < last.time_s:  # a resumed run
                while keep and times[keep - 1] >= minutes:
                    keep -= 1
                self._load.cut(keep)
            self._load_of[record.worker] = record
            engines = self._load_of.values()
            self._load.append(
                {
                    "minutes": max(minutes, times[keep - 1]) if keep else minutes,
                    "in_progress": sum(one.in_progress for one in engines),
                    "queued": sum(one.queued for one in engines),
                }
            )

    def _look_at_groups(self, now: float) -> None:
        found = self._group_tail.look()
        self._groups = newest_of([*([] if self._group_tail.restarted else self._groups), *found])
        self._groups_changed = self._groups_changed or bool(found)
        if not self._groups_changed:
            return
        self._texts = self._texts or Texts(self.root)
        if (texts := self._texts.get()) is not None:
            self._groups_s, self._groups_changed = now, False
            shown = [shown_group(group, texts) for group in reversed(self._groups)]
            self._parts["groups"] = {"missing": printable(texts.missing), "groups": shown}

    # ---- what the run does

    def _judge(self) -> tuple[str, str]:
        """Whether the run runs or how it ended: a word, and a message."""
        try:
            summary = read_summary(self.root)
        except PipelineRLError as error:
            return "ended", printable(str(error))
        began_s, ended_s = _changed_s(self._run.plan), _changed_s(self._run.summary)
        if summary is not None and ended_s >= began_s:
            word, _, message = str(summary.get("status", "ended")).partition(": ")
            return word, printable(message)
        if self._is_running():
            return "running", ""
        return "ended", "its last session ended without a summary: it was killed"

    def _is_running(self) -> bool:
        if self._config is not None and self._config.launch.kind == "ray":
            return time.time() - max(map(_changed_s, (self._run.metrics, *self._timelines))) < FRESH_S
        with suppress(OSError):
            fd = os.open(self.root / ".lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
        return False

    def _minutes_left(self, target: int) -> float | None:
        times, versions = self.steps["time_s"], self.steps["version"]
        back = min(SPEED_STEPS, len(times) - 1)
        if back < 1:
            return None
        left = max(0.0, target - versions[-1])
        return left * (times[-1] - times[-1 - back]) / (versions[-1] - versions[-1 - back]) / 60

    def _now(self) -> dict[str, Any]:
        """What changes all the time, as JSON-like data. Stages are shown while the run runs."""
        now, config, latest = self._clock(), self._config, self._latest
        minutes = [record.time_s / 60 for record in (*self._load_of.values(), latest) if record is not None]
        found: dict[str, Any] = {
            "state": self._state,
            "message": self._message or self._problem,
            "version": latest.version if latest is not None else 0,
            "elapsed": max(minutes, default=0.0),
            "left": None,
            "stages": [],
            "numbers": {} if latest is None else {name: getattr(latest, name) for name in _HEADLINE},
            "damaged": sum(tail.damaged for tail in (self._tail, self._evaluation_tail)),
        }
        if config is not None:
            found |= {
                "target": config.trainer.steps,
                "task": printable(config.environment.kind),
                "schedule": name_of(config),
                "seed": config.seed,
            }
        if self._state == "running":
            engine = engine_total(self._statuses)
            found |= {
                "left": config and self._minutes_left(config.trainer.steps),
                "stages": shown_stages(self._statuses, self._trends, now),
                "facts": facts(self._statuses),
                "engine": engine and {name: getattr(engine, name) for name in ("slots", "in_progress", "version")},
                "begun": sorted(engine.begun.items()) if engine else [],
            }
        return found

    # ---- what a page has not seen

    def news(self, page: PageState) -> dict[str, Any]:
        """What `page`, which is brought up to date, has not seen of the run as of the last look."""
        found: dict[str, Any] = {"now": self._now()}
        points, page.steps = self.steps.since(page.steps)
        load, page.load = self._load.since(page.load)
        found |= {name: part for name, part in (("steps", points), ("load", load)) if part is not None}
        found |= {name: part for name, part in self._parts.items() if page.parts.get(name, self) is not part}
        page.parts = dict(self._parts)
        return found


_HEADLINE = ("reward_mean", "lag_mean", "completion_length_mean")


def _changed_s(path: Path) -> float:
    """When the file was last changed; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
