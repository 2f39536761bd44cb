"""What the terminal shows, recorded as text."""

from __future__ import annotations

import os
import sys
from io import StringIO
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from pipelinerl.status.view import (
    LiveView,
    PlainView,
    Rate,
    Trends,
    duration,
    headline,
    make_view,
    output_that_never_fails,
    printable,
    render,
    short,
)
from pipelinerl.types import ActorProgress, EngineProgress, StageStatus, TrainerProgress
from tests.unit.record_parts import status, statuses_of

LATEST = {"reward_read_mean": 0.625, "ess": 0.971, "lag_mean": 1.75, "lag_max": 5.0, "entropy_mean": 0.3}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_terminal_of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own surroundings, a log of CI for example, decide nothing."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def statuses(now: float, version: int = 37) -> dict[str, StageStatus]:
    load = {"slots": 64, "in_progress": 63, "queued": 2, "tokens_generated": int(1000 * now)}
    times = {"busy_s": 96.0, "ready_s": 100.0, "pauses_s": (0.5, 0.0012)}
    engine = EngineProgress(version=version - 1, weight_updates=36, **load, **times)
    rollouts = {"rollouts_started": 4200, "rollouts_in_progress": 63, "rollouts_dropped": {"timeout": 2}}
    actor = ActorProgress(**rollouts, evaluations={"before": 0.31})
    trainer = TrainerProgress(
        version=version, trained=version * 64, dropped={"stale": 10}, queued=40, tokens_trained=500 * version, latest=LATEST
    )
    times = {"since_s": now - 12, "written_s": now}
    return statuses_of(
        status("engine", "working", "one token for 63 sequences", engine, **times),
        status("actor", "waiting", "the trainer (version 37): [64] rollouts are outstanding", actor, **times),
        status("trainer", "working", "micro-batch 3", trainer, **times),
    )


def drawn(found: dict[str, StageStatus], now: float, *, trends: Trends | None = None, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width, height=50)
    console.print(render(found, now, 100, trends or Trends(), 72.0, width=width))
    return console.file.getvalue()


def test_the_screen_says_everything_at_a_glance() -> None:
    trends = Trends()
    for now in range(100, 120, 2):
        trends.observe(statuses(now, version=now - 82), now)
    text = drawn(statuses(119), 119, trends=trends)
    for shown in (
        "step 37/100   37%",
        "1:12 elapsed, 1:03 left",
        "reward 0.625",
        "ess 0.971",
        "lag 1.8 (max 5)",
        "held-out before 0.310",
        "waiting 12s  the trainer (version 37): [64] rollouts are outstanding",
        "96%",
        "1k tok/s",
        "64 samples/s, 500 tok/s",
        "trainer at version 37, engine at 36; 36 updates applied, last pause 1.2 ms",
        "63 of 64 slots in progress, 2 queued",
        "4200 started, 2368 trained, 40 queued, 63 in progress, 12 dropped (stale 10, timeout 2)",
    ):
        assert shown in text, f"{shown!r} is not in\n{text}"
    assert "no report" not in text
    assert "no report for 1:40; one token" in drawn(statuses(119), 219)
    assert [headline({"ess": ess})["ess"] for ess in (0.499, 0.5)] == ["0.499 (low)", "0.500"]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_an_early_or_narrow_screen_is_drawn_all_the_same(width: int) -> None:
    for found in ({}, statuses_of(status("engine", "starting", "loading")), statuses(5)):
        lines = drawn(found, 5.0, width=width).splitlines()
        assert lines
        assert all(len(line) <= width for line in lines)
    assert ("tok/s" in drawn(statuses(119), 119, width=width)) == (width == 200)


def test_the_live_view_draws_twice_a_second_and_leaves_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert isinstance(make_view("auto", Terminal(), target=1), PlainView), "a log of CI"
    monkeypatch.setenv("CI", "false")
    terminal = Terminal()
    view = make_view("auto", terminal, target=100)
    assert isinstance(view, LiveView)
    view.update(statuses(0, version=1), 0.0)
    size = len(terminal.getvalue())
    view.update(statuses(0.2, version=2), 0.2)
    assert len(terminal.getvalue()) == size
    view.update(statuses(0.6, version=3), 0.6)
    assert "step 3/100" in terminal.getvalue()
    view.update(statuses(0.7, version=4), 0.7)
    view.say("[a] message\nof two lines")
    assert "[a] message" in terminal.getvalue()
    view.close()
    assert "step 4/100" in terminal.getvalue()
    size = len(terminal.getvalue())
    view.close()
    assert len(terminal.getvalue()) == size


def test_plain_lines_come_every_few_steps_or_ten_seconds() -> None:
    stream = StringIO()
    view = make_view("auto", stream, target=100)
    for tenth in range(0, 300, 5):
        now = tenth / 10
        version = 0 if now < 12 else int(now - 12)  # twelve seconds of nothing, then a step a second
        view.update(statuses(now, version=version), now)
    view.close()
    lines = stream.getvalue().splitlines()
    steps = [line.partition("]  ")[2].partition("  ")[0] for line in lines if line.startswith("[")]
    # after 10 s, then every 100 / 20 steps, and what there is at the end
    assert steps == ["step 0/100", "step 5/100", "step 10/100", "step 15/100", "step 17/100"]
    assert "reward 0.625" in lines[0]
    assert "12 dropped (stale 10, timeout 2)" in lines[0]
    assert "62.1 samples/s" in lines[-2]  # 16 steps of 64 in 16.5 s
    assert lines[1].strip() == "actor waiting for 12s: the trainer (version 37): [64] rollouts are outstanding"


def test_a_plain_log_says_what_the_first_step_waits_for() -> None:
    stream = StringIO()
    view = PlainView(stream, target=140)
    for now in range(0, 21, 2):
        evaluates = ActorProgress(evaluating="evaluates: 131 of 512 held-out problems")
        actor = status("actor", "working", "63 rollouts running", evaluates, written_s=now)
        loads = status("trainer", "starting", "loads the model", since_s=11, written_s=now)
        view.update(statuses_of(loads, actor, replace(actor, stage="actor-1", state="done")) if now > 11 else {}, float(now))
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        "[    10s]  step 0/140  queued 0",
        "no stage has reported yet",
        "[    20s]  step 0/140  queued 0",
        "trainer starting for 9s: loads the model",
        "actor evaluates: 131 of 512 held-out problems",
    ]


def test_numbers_as_text() -> None:
    durations = {None: "-", 0.4: "0s", 59.4: "59s", 59.6: "1:00", 187: "3:07", 7505: "2:05:05", -3: "0s"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
    numbers = {0: "0", 7.812: "7.81", 999.4: "999", 999.9: "1k", 7812: "7.81k", 1.2e6: "1.2M", None: "-"}
    assert {value: short(value) for value in numbers} == numbers


def test_a_rate_starts_with_the_first_movement_and_forgets_what_is_older_than_its_window() -> None:
    rate = Rate(10.0)
    found = []
    for now, count in [*((now, 0) for now in range(50)), (50, 10), (52, 14), (54, 14)]:
        rate.observe(now, count)
        found.append(rate.per_s)
    assert found == [None] * 51 + [2.0, 1.0]
    for now in range(55, 100):
        rate.observe(now, 1000 + 3 * now)
    assert rate.per_s == 3.0
    rate.observe(101, 5)
    assert rate.per_s is None, "the counter went back: the stage was restarted"


HOSTILE = "\x1b]0;title\x07 \x1b[2J [red]markup[/red]\u202e\x9b31m"


@pytest.mark.parametrize("kind", ["live", "plain", "none"])
def test_a_message_is_shown_once_and_text_of_data_and_models_never_controls_the_terminal(kind: Any) -> None:
    assert printable("\x1b[2J\a\r\x9b\u202e\ud800 fine\n") == "␛[2J␇␍<U+009B><U+202E><U+D800> fine\n"
    stream = Terminal()
    view = make_view(kind, stream, target=50)
    view.say("before")
    before = stream.getvalue()
    view.say(f"a message\twith {HOSTILE}")
    shown = stream.getvalue().removeprefix(before)
    for now, notes in ((0.0, ()), (1.0, ("COLLAPSED: all 0",)), (2.0, ("COLLAPSED: all 0",)), (3.0, ())):
        found = statuses(now)
        trainer = found["trainer"]
        view.update(found | {"trainer": replace(trainer, progress=replace(trainer.progress, notes=notes))}, now)
        assert stream.getvalue().count("COLLAPSED: all 0") == bool(now)
    found = statuses(now=1000.0)
    view.update({**found, "actor": replace(found["actor"], detail=HOSTILE)}, now=1000.0)
    view.close()
    assert "\x1b" not in shown
    assert "[red]markup[/red]" in shown
    assert not [code for code in ("\x07", "\x9b", "\u202e", "\x1b[2J", "\x1b]") if code in stream.getvalue()]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_nobody_reads_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `| head`, or with a log on a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, open("/dev/full", "w") as full:
        for stream in (pipe, full):
            monkeypatch.setattr(sys, name, stream)
            with output_that_never_fails():
                view = LiveView(getattr(sys, name), target=9)
                view.update(statuses(100.0), 100.0)
                view.say("x" * 100_000)
                view.close()
            assert getattr(sys, name) is stream
            with pytest.raises(OSError, match=r"Broken pipe|No space"):
                print("without it", file=stream, flush=True)
        monkeypatch.undo()
        for descriptor in (pipe, full):  # what they still buffer can't be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor.fileno())
