"""What a page learns about a run: its curves, state, stages and newest rollouts, while it runs, restarts or disappears."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.experiments.watch.page import GROUPS_EVERY_S, LOOK_EVERY_S, PageState, WatchedRun
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.metrics.statistics import REWARD
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import write_statuses
from pipelinerl.types import EngineProgress, TrainerProgress
from tests.unit.experiments.browse_parts import group, rollout, turn
from tests.unit.experiments.watch.watch_parts import HOSTILE, a_step, append, load, make_run
from tests.unit.record_parts import evaluation, status, statuses_of


class Watcher:
    """A page on one run, with a clock that moves on by a second with each look."""

    def __init__(self, root: Path) -> None:
        self._now_s = time.monotonic()
        self.run = WatchedRun(root, lambda: self._now_s)
        self.page = PageState()

    def look(self, passed_s: float = LOOK_EVERY_S + 0.1) -> dict[str, Any]:
        self._now_s += passed_s
        self.run.look()
        news: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.run.news(self.page)))
        return news


def test_a_finished_run_is_shown_whole_and_then_nothing_is_sent_again_and_nothing_written(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    write_statuses(RunDirectory(root).statuses, statuses_of(status("engine", "done")))
    before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}
    watcher = Watcher(root)
    news = watcher.look()
    columns = news["steps"]["columns"]
    assert columns["version"] == [1, 2, 3, 4]
    assert columns["reward_mean"] == [0.1, 0.2, 0.3, 0.4]
    assert columns["crossing_fraction"] == [0.5, 0, 0.5, 0]
    assert columns["rollouts"] == [8, 16, 24, 32]
    assert columns["minutes"] == [round(n / 60, 7) for n in (1, 2, 3, 4)]  # since the trainer began to wait, at 3 s
    assert columns["samples_per_s"] == [8, 8, 8, 8]
    assert news["load"]["columns"]["in_progress"] == list(range(8))
    assert [(one["when"], one["reward_mean"], one["minutes"]) for one in news["evaluations"]] == [("before", 0.25, 0)]
    assert (news["now"]["state"], news["now"]["version"], news["now"]["target"]) == ("finished", 4, 10)
    assert news["settings"] == {"seed": 0, "trainer": {"steps": 10}}
    assert set(watcher.look()) <= {"now", "groups"}
    watcher.look(GROUPS_EVERY_S + 1)
    assert {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")} == before


def test_a_running_run_is_followed_also_over_a_resume(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=4, status=None)
    watcher = Watcher(root)
    with closing(RunLock(RunDirectory(root))):
        watcher.look()
        assert watcher.look()["now"]["state"] == "running"
        append(root / "metrics.jsonl", a_step(5, 8.0, crossing_fraction=1.0))
        hostile = {"failed": {HOSTILE: 1}, "metrics": {f"{HOSTILE}{REWARD}": 0.5}}
        append(root / "evaluations.jsonl", evaluation("online", 5, 7.0, version_min=3, version_max=5, **hostile))
        news = watcher.look()
        shown = [*news["evaluations"][1]["failed"], *news["evaluations"][1]["metrics"]]
        assert not set("\x1b\u202e") & set("".join(shown))
        assert len(shown) == 2
        assert (news["steps"]["start"], news["steps"]["columns"]["version"]) == (4, [5])
        assert news["steps"]["columns"]["crossing_fraction"] == [1]
        assert news["now"]["left"] == 5 / 60  # five more steps of a second each
        assert [(one["version"], one["rollouts"]) for one in news["evaluations"]] == [(0, 0), (5, 40)]
        append(root / "metrics.jsonl", a_step(3, 11.0), a_step(4, 12.0))  # from the checkpoint of step 2
        append(root / "timeline-0.jsonl", load(0, 3.0, 7))
        news = watcher.look()
        assert news["steps"]["columns"]["version"] == [1, 2, 3, 4]
        assert news["load"]["columns"]["minutes"][-2:] == [0.0458333, 0.05]  # 2.75 s, and the 3 s of the resumed run
    now = watcher.look()["now"]
    assert (now["state"], now["message"]) == ("ended", "its last session ended without a summary: it was killed")


def test_stages_slots_and_sequences_that_cross_versions_come_from_the_board(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", status=None)
    engine = EngineProgress(version=7, slots=8, in_progress=6, queued=2, begun={5: 1, 6: 3, 7: 2}, busy_s=9.0, ready_s=10.0)
    statuses = statuses_of(
        status("actor", "working", "6 rollouts running"),
        status("engine", "working", "6 sequences", engine),
        status("trainer", "waiting", f"samples {HOSTILE}", TrainerProgress(version=4), waits_for=("actor",)),
    )
    write_statuses(RunDirectory(root).statuses, statuses)
    watcher = Watcher(root)
    with closing(RunLock(RunDirectory(root))):
        now = watcher.look()["now"]
        (detail,) = [one["detail"] for one in now["stages"] if one["stage"] == "trainer"]
        assert detail.startswith("samples <script>")
        assert "\x1b" not in detail
        assert {one["stage"]: (one["state"], one["waits_on"], one["busy"]) for one in now["stages"]} == {
            "actor": ("working", [], ""),
            "engine": ("working", [], "90%"),
            "trainer": ("waiting", ["actor"], "-"),
        }
        assert (now["engine"]["slots"], now["begun"]) == (8, [[5, 1], [6, 3], [7, 2]])
        assert now["facts"]["engine"] == "6 of 8 slots in progress, 2 queued"
        write_statuses(RunDirectory(root).statuses, {"engine": status("engine", "starting", "loads the model")})
        assert [one["state"] for one in watcher.look()["now"]["stages"]] == ["starting"]
        RunDirectory(root).statuses.write_bytes(b'{"engine": {')  # a full disk, or another program
        assert watcher.look()["now"]["stages"] == []


def test_failed_runs_say_why_and_runs_may_disappear_and_come_back(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", status="failed: the trainer died")
    watcher = Watcher(root)
    now = watcher.look()["now"]
    assert (now["state"], now["message"]) == ("failed", "the trainer died")
    os.utime(root / "control" / "plan.json")  # a session began after the summary was written
    os.utime(root / "summary.json", (2000, 2000))
    assert watcher.look()["now"]["state"] == "ended"
    shutil.rmtree(root)
    now = watcher.look()["now"]
    assert (now["state"], now["message"]) == ("gone", f"there is no run in {root} any more")
    make_run(root, steps=2, status="interrupted")
    news = watcher.look()
    assert (news["now"]["state"], news["steps"]["columns"]["version"]) == ("interrupted", [1, 2])
    (root / "config.yaml").write_text("trainer: [")
    assert "config.yaml" in watcher.look()["now"]["message"]


def test_the_newest_rollouts_come_in_spans_of_versions_every_few_seconds(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    watcher = Watcher(root)
    for _ in range(100):  # the tokenizer is loaded in a thread
        if (found := watcher.look(GROUPS_EVERY_S + 1).get("groups")) is not None:
            break
        time.sleep(0.05)
    newest, first = found["groups"]
    assert (newest["index"], first["index"]) == (1, 0)
    assert "<script>" in newest["problem"]
    assert "\x1b" not in newest["problem"]
    assert newest["skipped"] is None
    (shown,) = newest["attempts"][0]["turns"]
    assert [(span["version"], span["tokens"]) for span in shown["spans"]] == [(3, 4), (4, 5)]
    assert shown["finish"] == "stop"
    assert "groups" not in watcher.look(GROUPS_EVERY_S + 1)
    append(root / "rollouts" / "rollouts.jsonl", group(2, *(rollout(2, i, i % 4, turn("1,1:", "1")) for i in range(8))))
    newest = watcher.look(GROUPS_EVERY_S + 1)["groups"]["groups"][0]
    assert [(one["id"], one["reward"]) for one in newest["attempts"]] == [
        ("g2.a0", 0), ("g2.a3", 3), ("g2.a4", 0), ("g2.a7", 3)
    ]  # fmt: skip
    assert newest["more"] == 4
    append(root / "rollouts" / "rollouts.jsonl", *(group(n, rollout(n, 0, 1.0), rollout(n, 1, 1.0)) for n in range(3, 8)))
    groups = watcher.look(GROUPS_EVERY_S + 1)["groups"]["groups"]
    assert [one["index"] for one in groups] == [2, 7, 6]  # first the newest whose rewards differ
