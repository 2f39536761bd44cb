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
from pipelinerl.metrics.reading import superseded, without_repeated
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.tail import Tail
from pipelinerl.metrics.timeline import TIMELINE_STEM, TimelineRecord
from pipelinerl.metrics.totals import actor_total, engine_total, trainer_progress
from pipelinerl.report.columns import Columns, Seen, StepColumns
from pipelinerl.report.series import name_of, read_config, read_summary
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import read_statuses
from pipelinerl.status.screen import SILENT_S, Trends, dropped_by_reason, printable, throughput
from pipelinerl.status.watchdog import waits_on
from pipelinerl.types import Group, StageStatus, TrainerProgress

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
    """What a page has of a run."""

    steps: Seen = field(default_factory=Seen)
    load: Seen = field(default_factory=Seen)
    editions: dict[str, int] = field(default_factory=dict)


class WatchedRun:
    """One run. `look` reads what is new, and `news` returns what a page has not seen. Nothing is read without a page."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._run = RunDirectory(root)
        self._clock = clock
        self._looked_s = -LOOK_EVERY_S
        self._config: RunConfig | None = None
        self._config_state: tuple[int, int] | None = None
        self._texts: Texts | None = None
        self._problem = ""
        self._state, self._message = "gone", ""
        self._steps, self._load = StepColumns(), Columns()
        self._evaluations: list[EvaluationRecord] = []
        self._latest: StepRecord | None = None
        self._groups: list[Group] = []
        self._groups_s = -GROUPS_EVERY_S
        self._groups_changed = False
        self._shown: dict[str, Any] = {"evaluations": [], "groups": None, "settings": {}}
        self._editions = {"evaluations": 0, "groups": 0, "settings": 0}
        self._statuses: Mapping[str, StageStatus] = {}
        self._trends = Trends()
        run = self._run
        self._tail = Tail(run.metrics, StepRecord)
        self._evaluation_tail = Tail(run.evaluations, EvaluationRecord)
        self._group_tail = Tail(run.recorded, Group, newest=True)
        self._session_tail = Tail(run.sessions, _Settings, newest=True)
        self._timelines: dict[str, Tail[TimelineRecord]] = {}
        self._load_of: dict[int, TimelineRecord] = {}

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
            self._show("settings", session.config)
        self._look_at_evaluations()
        self._look_at_steps()
        if (evaluations := [self._evaluation(one) for one in self._evaluations]) != self._shown["evaluations"]:
            self._show("evaluations", evaluations)
        self._look_at_load()
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

    def _look_at_evaluations(self) -> None:
        found = self._evaluation_tail.look()
        if self._evaluation_tail.restarted:
            self._evaluations = []
        self._evaluations = without_repeated([*self._evaluations, *found], superseded)

    def _evaluation(self, one: EvaluationRecord) -> dict[str, Any]:
        """One evaluation, with its place on the three axes of the curves."""
        done = bisect_right(self._steps["version"], one.version)
        return {
            "when": one.when,
            "version": one.version,
            "version_min": one.version_min,
            "version_max": one.version_max,
            "minutes": max(0.0, one.time_s - self._steps.begin_s) / 60,
            "rollouts": self._steps["rollouts"][done - 1] if done else 0,
            "problems": one.problems,
            "reward": one.reward_mean,
            "error": one.reward_standard_error,
            "length": one.completion_length_mean,
            "failed": {printable(reason): count for reason, count in one.failed.items()},
        }

    def _look_at_steps(self) -> None:
        found = self._tail.look()
        if self._tail.restarted:
            self._steps.cut(0)
            self._latest = None
        for record in found:
            self._steps.add(record, self._evaluations)
            self._latest = record

    def _look_at_load(self) -> None:
        for path in self.root.glob(f"{TIMELINE_STEM}*.jsonl"):
            self._timelines.setdefault(path.name, Tail(path, TimelineRecord))
        found: list[TimelineRecord] = []
        for tail in self._timelines.values():
            of_engine = tail.look()
            if tail.restarted:
                self._load.cut(0)
            found += of_engine
        for record in sorted(found, key=lambda one: one.time_s):
            self._add_load(record)

    def _add_load(self, record: TimelineRecord) -> None:
        last = self._load_of.get(record.worker)
        minutes, keep = record.time_s / 60, self._load.rows
        if last is not None and record.time_s < last.time_s:  # a resumed run
            times = self._load["minutes"]
            while keep and times[keep - 1] >= minutes:
                keep -= 1
            self._load.cut(keep)
        self._load_of[record.worker] = record
        engines = self._load_of.values()
        self._load.append(
            {
                "minutes": max(minutes, self._load["minutes"][-1]) if keep else minutes,
                "in_progress": sum(one.in_progress for one in engines),
                "queued": sum(one.queued for one in engines),
            }
        )

    def _look_at_groups(self, now: float) -> None:
        if now - self._groups_s < GROUPS_EVERY_S or self._config is None:
            return
        found = self._group_tail.look()
        if self._group_tail.restarted:
            self._groups = []
        self._groups = newest_of([*self._groups, *found])
        self._groups_changed = self._groups_changed or bool(found)
        if not self._groups_changed:
            return
        self._texts = self._texts or Texts(self.root, self._config)
        if (texts := self._texts.get()) is not None:
            self._groups_s, self._groups_changed = now, False
            shown = [shown_group(group, texts) for group in reversed(self._groups)]
            self._show("groups", {"missing": printable(texts.missing), "groups": shown})

    def _show(self, part: str, value: Any) -> None:
        self._shown[part] = value
        self._editions[part] += 1

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
            records = (self._run.metrics, *self.root.glob(f"{TIMELINE_STEM}*.jsonl"))
            return time.time() - max(map(_changed_s, records)) < FRESH_S
        with suppress(OSError):
            fd = os.open(self.root / ".lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
        return False

    def _minutes_left(self) -> float | None:
        times, versions = self._steps["time_s"], self._steps["version"]
        back = min(SPEED_STEPS, len(times) - 1)
        if back < 1 or self._config is None:
            return None
        left = max(0.0, self._config.trainer.steps - versions[-1])
        return left * (times[-1] - times[-1 - back]) / (versions[-1] - versions[-1 - back]) / 60

    def _now(self) -> dict[str, Any]:
        """What changes all the time, as JSON-like data."""
        now, config, latest = self._clock(), self._config, self._latest
        live = self._state == "running"
        minutes = [record.time_s / 60 for record in (*self._load_of.values(), latest) if record is not None]
        found: dict[str, Any] = {
            "state": self._state,
            "message": self._message or self._problem,
            "folder": str(self.root),
            "version": latest.version if latest is not None else 0,
            "elapsed": max(minutes, default=0.0),
            "left": self._minutes_left() if live else None,
            "stages": [self._stage(status, now, live) for status in self._statuses.values()],
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
        return found | self._counts()

    def _stage(self, status: StageStatus, now: float, live: bool) -> dict[str, Any]:
        busy, rate = throughput(status, self._trends)
        silent_s = now - status.written_s
        reports = live and status.state in ("working", "waiting")
        return {
            "stage": status.stage,
            "state": status.state,
            "detail": printable(status.detail),
            "for_s": max(0.0, now - status.since_s) if live else None,
            "silent_s": silent_s if reports and silent_s > SILENT_S else None,
            "waits_on": waits_on(status, self._statuses),
            "machine": printable(status.machine),
            "busy": busy,
            "rate": rate if live else "",
        }

    def _counts(self) -> dict[str, Any]:
        """Slots, weights and rollouts, as the stages have counted them."""
        statuses, found = self._statuses, dict[str, Any]()
        trainer = trainer_progress(statuses) or TrainerProgress()
        if (engine := engine_total(statuses)) is not None:
            found["engine"] = {
                "slots": engine.slots,
                "in_progress": engine.in_progress,
                "queued": engine.queued,
                "version": engine.version,
                "updates": engine.weight_updates,
                "pause_s": engine.pauses_s[-1] if engine.pauses_s else None,
                "begun": sorted(engine.begun.items()),
                "published": trainer.published_version,
            }
        if (actor := actor_total(statuses)) is not None:
            found["rollouts"] = {
                "started": actor.rollouts_started,
                "in_progress": actor.rollouts_in_progress,
                "trained": trainer.trained,
                "queued": trainer.queued,
                "skipped": actor.groups_skipped,
                "dropped": {printable(reason): count for reason, count in dropped_by_reason(statuses).items()},
            }
        return found

    # ---- what a page has not seen

    def news(self, page: PageState) -> dict[str, Any]:
        """What `page`, which is brought up to date, has not seen of the run as of the last look."""
        found: dict[str, Any] = {"now": self._now()}
        points, page.steps = self._steps.since(page.steps)
        load, page.load = self._load.since(page.load)
        found |= {name: part for name, part in (("steps", points), ("load", load)) if part is not None}
        for part, edition in self._editions.items():
            if page.editions.get(part) != edition:
                page.editions[part] = edition
                found[part] = self._shown[part]
        return found


_HEADLINE = ("reward_mean", "lag_mean", "completion_length_mean")


def _changed_s(path: Path) -> float:
    """When the file was last changed; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
