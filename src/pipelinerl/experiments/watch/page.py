"""What a page shows of runs: the state of each, read from its directory, and the page as one file that loads nothing."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.resources
import math
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunDirectoryError
from pipelinerl.experiments.browse import TokenText, load_token_text, skip_text
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import Tail, superseded, without_repeated
from pipelinerl.metrics.records import TIMELINE_STEM, StepRecord, TimelineRecord
from pipelinerl.metrics.statistics import REWARD, engine_total
from pipelinerl.report import PageSection, count
from pipelinerl.report.curves import Columns, Seen, StepColumns
from pipelinerl.report.series import labels_of, name_of, read_config, read_summary
from pipelinerl.report.terminal import largest_gain, summary_sections
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import read_statuses
from pipelinerl.status.view import Trends, facts, one_line, printable, shown_stages
from pipelinerl.types import Group, Rollout, StageStatus, versions_from_spans

LOOK_EVERY_S = 0.9
GROUPS_EVERY_S = 3.0
"""How often the newest groups change: slowly enough to read."""
FRESH_S = 60.0
"""A run over several machines has no lock here: it runs if its records changed within this time."""
SPEED_STEPS = 50
"""Optimizer steps over which the time left is estimated."""
GROUPS = 3
"""The newest one whose rewards differ, and the newest others."""
ATTEMPTS = 4
MOST_TOKENS = 1200
"""Sampled tokens of an attempt that are shown; the rest is counted."""
MOST_CHARACTERS = 2000


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
        self._texts: TokenText | None = None
        self._loader: threading.Thread | None = None
        self._groups: list[Group] = []
        self._groups_s = -GROUPS_EVERY_S
        self._groups_changed = False
        self._parts: dict[str, Any] = {"evaluations": [], "groups": None, "settings": {}}
        self._statuses: Mapping[str, StageStatus] = {}
        self._trends = Trends()
        self._tail = Tail(run.metrics, StepRecord)
        self._evaluation_tail = Tail(run.evaluations, EvaluationRecord)
        self._group_tail = Tail(run.recorded, Group, newest=True)
        self._session_tail = Tail(run.sessions, dict[str, Any], newest=True)
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
            self._parts["settings"] = session.get("config", {})
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
        if self._loader is not None:
            self._loader.join()
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
            self.steps.cut("version", -math.inf)
            self._latest = None
        for record in steps:
            self.steps.add(record, self._evaluations)
            self._latest = record
        shown = []
        for one in self._evaluations:  # with its places on the axes of the curves
            done, metrics = bisect_right(self.steps["version"], one.version), one.metrics
            places = {
                "minutes": max(0.0, one.time_s - self.steps.begin_s) / 60,
                "rollouts": self.steps["rollouts"][done - 1] if done else 0,
                "metrics": {printable(name): metrics[name] for name in metrics if name.endswith(REWARD)},
                "failed": {printable(reason): times for reason, times in one.failed.items()},
            }
            shown.append(msgspec.to_builtins(one) | places)
        if shown != self._parts["evaluations"]:
            self._parts["evaluations"] = shown

    def _look_at_load(self) -> None:
        """The load of all engines together, from the timeline of each."""
        for path in self.root.glob(f"{TIMELINE_STEM}*.jsonl"):
            self._timelines.setdefault(path, Tail(path, TimelineRecord))
        found: list[TimelineRecord] = []
        for tail in self._timelines.values():
            found += tail.look()
            if tail.restarted:
                self._load.cut("minutes", -math.inf)
        for record in sorted(found, key=lambda one: one.time_s):
            last = self._load_of.get(record.worker)
            minutes = record.time_s / 60
            if last is not None and record.time_s < last.time_s:  # a resumed run
                self._load.cut("minutes", minutes)
            self._load_of[record.worker] = record
            engines = self._load_of.values()
            self._load.append(
                {
                    "minutes": max(minutes, self._load["minutes"][-1]) if self._load.rows else minutes,
                    "in_progress": sum(one.in_progress for one in engines),
                    "queued": sum(one.queued for one in engines),
                }
            )

    def _look_at_groups(self, now: float) -> None:
        found = self._group_tail.look()
        groups = [*([] if self._group_tail.restarted else self._groups), *found]  # the one to show first comes last
        differ = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1][-1:]
        self._groups = [*[group for group in groups if group not in differ][len(differ) - GROUPS :], *differ]
        self._groups_changed = self._groups_changed or bool(found)
        if self._groups_changed and self._loader is None:  # not in the way of the page, which may be stopped meanwhile

            def load() -> None:
                self._texts = load_token_text(self.root)

            self._loader = threading.Thread(target=load, daemon=True)
            self._loader.start()
        if self._groups_changed and self._texts is not None:
            self._groups_s, self._groups_changed = now, False
            shown = [_shown_group(group, self._texts) for group in reversed(self._groups)]
            self._parts["groups"] = {"missing": printable(self._texts.missing), "groups": shown}

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
        numbers = ("reward_mean", "lag_mean", "completion_length_mean")
        found: dict[str, Any] = {
            "state": self._state,
            "message": self._message or self._problem,
            "version": latest.version if latest is not None else 0,
            "elapsed": max(minutes, default=0.0),
            "left": None,
            "stages": [],
            "numbers": {} if latest is None else {name: getattr(latest, name) for name in numbers},
            "damaged": sum(tail.damaged for tail in (self._tail, self._evaluation_tail)),
        }
        if config is not None:
            found |= {
                "target": config.trainer.steps,
                "task": printable(config.environment.kind),
                "schedule": name_of(config.schedule),
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


def _changed_s(path: Path) -> float:
    """When the file was last changed; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# ---- groups, as text in spans of weight versions


def _shown_group(group: Group, texts: TokenText) -> dict[str, Any]:
    """The group as JSON-like data: the attempts of the lowest and of the highest rewards; `more`: how many others."""
    places = sorted(range(len(group.rollouts)), key=lambda place: group.rollouts[place].reward)
    chosen = sorted({*places[: ATTEMPTS // 2], *places[-ATTEMPTS // 2 :]})
    payload = one_line(msgspec.json.encode(group.problem.payload).decode())
    return {
        "index": group.index,
        "problem": f"{one_line(group.problem.id)} {payload}"[:MOST_CHARACTERS],
        "attempts": [_attempt(group.rollouts[place], texts) for place in chosen],
        "more": len(places) - len(chosen),
        "dropped": {one_line(reason): count for reason, count in group.dropped.items()},
        "skipped": None if group.skipped is None else skip_text(group.skipped),
    }


def _attempt(rollout: Rollout, texts: TokenText) -> dict[str, Any]:
    turns, left = [], MOST_TOKENS
    for turn in rollout.turns:
        completion, count = turn.completion, len(turn.completion.token_ids)
        try:
            versions = versions_from_spans(completion.weight_versions, count)[:left]
        except ValueError:
            versions = [-1] * min(count, left)  # damaged
        pieces = zip(versions, texts.pieces(completion.token_ids[:left]), strict=True)
        spans = [(version, [text for _, text in some]) for version, some in groupby(pieces, key=lambda piece: piece[0])]
        prompt = printable(texts.text(turn.prompt_ids[-left:] if left else ()))
        shown = {
            "prompt": prompt[-MOST_CHARACTERS:],
            "spans": [
                {"version": version, "tokens": len(some), "text": printable("".join(some))} for version, some in spans
            ],
            "tokens": count,
            "hidden": max(0, count - left),
            "finish": completion.finish_reason,
        }
        turns.append(shown)
        left = max(0, left - count)
    return {"id": one_line(rollout.id), "reward": rollout.reward, "turns": turns}


# ---- the page as one file: `pipelinerl report`, and the reports of experiments


def page(
    title: str,
    sections: Sequence[PageSection] = (),
    runs: Mapping[str, Mapping[str, Any]] | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a page on `runs`: what `shown_run` returns of each, by label. Runs with the same `colours` share one."""
    runs, colours = runs or {}, colours or {}
    groups = list(dict.fromkeys(colours.get(label, label) for label in runs))
    data = {
        "title": title,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "sections": sections,
        "runs": [{"label": label, "first": True, "colour": groups.index(colours.get(label, label))} for label in runs],
        "news": runs,
    }
    return _in_one_file(msgspec.json.encode(data).decode().replace("<", "\\u003c"))


def shown_run(run_dir: Path) -> dict[str, Any]:
    """What a page shows of a run. Raises ConfigError, and RunDirectoryError if it is no run or its summary is damaged."""
    config, summary, run = read_config(run_dir), read_summary(run_dir), WatchedRun(run_dir)
    shown, steps, result = run.everything(), run.steps, [("model", config.model.path)]
    if steps.rows and not shown["now"]["damaged"] and (training_s := 60 * steps["minutes"][-1]) > 0:
        samples = steps["rollouts"][-1]
        lengths = zip(steps["samples"], steps["completion_length_mean"], strict=True)
        tokens = sum(rollouts * mean for rollouts, mean in lengths if not math.isnan(mean))
        rates = f"{samples / training_s:.1f} samples/s, {tokens / training_s:.0f} tokens/s"
        took = f"{count(steps.rows, 'step')}, {samples:.0f} rollouts in {training_s:.1f} s: {rates}"
        result.append(("training, without start-up", took))
    try:
        result += [row for section in summary_sections(summary) for row in section] if summary is not None else []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{run_dir / 'summary.json'} is damaged ({error!r}); delete it") from error
    gain = zip(("before", "after"), largest_gain(run_dir) or (), strict=False)
    return shown | {
        "result": result,
        "gain": [[when, one.prompt, one.completion, f"{one.reward:.4g}"] for when, one in gain],
    }


def report_page(run_dirs: Sequence[Path]) -> str:
    """The HTML of a report on these runs. Raises as `shown_run`, and RunDirectoryError for a run that is named twice."""
    labels = labels_of(run_dirs)
    runs = {label: shown_run(run_dir) for label, run_dir in zip(labels, run_dirs, strict=True)}
    return page(f"pipelinerl: {', '.join(labels)}", runs=runs)


def _in_one_file(data: str) -> str:
    """The page with its styles, scripts and data in it. Its content security policy allows no other script."""
    assets = importlib.resources.files("pipelinerl") / "assets" / "watch"
    digests = []

    def inline(loaded: re.Match[str]) -> str:
        text = (assets / loaded[1]).read_text(encoding="utf-8")
        if loaded[1].endswith(".css"):
            return f"<style>{text}</style>"
        digests.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<script>{text}</script>"

    html = (assets / "index.html").read_text(encoding="utf-8")
    html = html.replace("</main>", f'</main>\n<script type="application/json" id="data">{data}</script>')
    html = re.sub(r'<(?:link rel="stylesheet" href|script src)="(.*?)">(?:</script>)?', inline, html)
    policy = (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return html.replace("<head>", f'<head>\n<meta http-equiv="content-security-policy" content="{policy}">')
