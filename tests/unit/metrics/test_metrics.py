"""Records of a run: how they are written, followed and read back, statistics, and rewards that fall to their floor."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.metrics import reading
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import Records, Tail, read_records
from pipelinerl.metrics.records import (
    LOAD_EVERY_S,
    PATIENCE,
    CollapseWatch,
    EngineRecord,
    StepRecord,
    TimelineRecord,
    TimelineWriter,
    collapse_of,
)
from pipelinerl.metrics.statistics import actor_total, engine_total, mean_metrics
from pipelinerl.report.series import read_timeline
from pipelinerl.types import ActorProgress, EngineProgress, VersionSpan
from tests.unit.record_parts import answered, evaluation, status, statuses_of, step, write_records


def test_records_survive_the_file_and_a_resumed_run_writes_on_after_a_torn_last_line(tmp_path: Path) -> None:
    engine = EngineRecord(version=1, in_progress=3, tokens_generated=90, tokens_per_s=45.0)
    records = [step(1, reward_mean=0.25, dropped={"stale": 2}), step(2, engine=engine)]
    write_records(tmp_path, *records, step(3, loss=math.nan, grad_norm=math.inf))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version":4,"time_s":')
    found = read_records(tmp_path / "metrics.jsonl", StepRecord)
    assert found == [*records, step(3)], "JSON has no number that is not finite"
    write_records(tmp_path, step(4))
    assert [one.version for one in read_records(tmp_path / "metrics.jsonl", StepRecord)] == [1, 2, 3, 4]


def test_steps_and_evaluations_repeated_after_a_resume_replace_the_abandoned_ones(tmp_path: Path) -> None:
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0), (4, 40.0)]
    write_records(tmp_path, *(step(version, loss=loss) for version, loss in losses))
    records = read_records(tmp_path / "metrics.jsonl", StepRecord)
    assert [(r.version, r.loss) for r in records] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    spans = [(20, 24), (40, 46), (60, 66), (45, 48), (60, 61)]  # a resume from version 45, which the one from 40 reached
    online = [evaluation("online", start, version_max=end) for start, end in spans]
    write_records(tmp_path, evaluation("before", 0), *online, *(evaluation("after", version) for version in (5, 5, 9)))
    found = read_records(tmp_path / "evaluations.jsonl", EvaluationRecord)
    assert [(one.when, one.version) for one in found] == [
        ("before", 0), ("online", 20), ("online", 45), ("online", 60), ("after", 5), ("after", 9)
    ]  # fmt: skip


def test_metrics_are_averaged_over_those_rollouts_that_have_them() -> None:
    found = mean_metrics([{"b": 1.0}, {"a": 0.25, "b": 0.0}, {}, {"b": 0.5}])
    assert found == ({"a": 0.25, "b": 0.5}, {"a": 1, "b": 3})
    assert list(found.means) == ["a", "b"]
    assert mean_metrics([{"huge": 1e308, "fine": 1.0}] * 2) == ({"fine": 1.0}, {"fine": 2})


def test_an_evaluation_has_the_statistics_of_its_answers_and_says_which_weights_answered() -> None:
    lengths = [answered(*one) for one in ((1.0, 10), (0.0, 20), (0.0, 30), (1.0, 100))]
    record = EvaluationRecord.of(lengths, when="after", version=7, time_s=60.0)
    assert (record.reward_mean, record.completion_length_mean, record.completion_length_p50) == (0.5, 40, 25)
    assert record.reward_standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert record.completion_length_p99 == pytest.approx(30 + 0.97 * 70)

    spans = (VersionSpan(version=4, start=0, end=10), VersionSpan(version=6, start=10, end=40))
    problems = [
        answered(1.0, 40, weight_versions=spans, metrics={"words": 1.0}),
        answered(0.0, 0, failure="timeout: slow"),
        answered(0.5, 0, evaluation_set="hard"),
    ]
    record = EvaluationRecord.of(problems, when="online", version=4, time_s=9.0, skipped=2)
    assert (record.name, record.problems, record.reward_mean) == ("v4", 2, 0.5)
    assert (record.completion_length_mean, record.metrics) == (40, {"hard/reward": 0.5, "words": 1.0})
    assert (record.version, record.version_min, record.version_max, record.version_mean) == (4, 4, 6, 5.5)
    assert (record.failed, record.skipped, record.metric_counts) == ({"timeout": 1}, 2, {"hard/reward": 1, "words": 1})
    numbers = record.numbers()
    assert (numbers["evaluation/metrics/words"], numbers["evaluation/failed/timeout"]) == (1.0, 1)
    assert not any("version" in name for name in numbers), "that is the axis"


def test_numbers_are_flat_and_finite() -> None:
    engine = EngineRecord(version=1, in_progress=4, tokens_generated=7)
    record = step(2, loss=0.5, grad_norm=math.nan, dropped={"stale": 3}, engine=engine, metrics={"m": 1.0})
    numbers = record.numbers()
    assert (numbers["loss"], numbers["dropped/stale"], numbers["engine/version"]) == (0.5, 3, 1)
    assert not {"ess", "grad_norm"} & numbers.keys()
    assert numbers["metrics/m"] == 1.0


# ---- several generation processes as if they were one: sums, the timeline

ENGINES = [
    EngineProgress(
        version=5, slots=8, in_progress=3, queued=1, busy_s=9.0, ready_s=10.0, weight_updates=5, pauses_s=(0.1, 0.4)
    ),
    EngineProgress(version=4, slots=8, in_progress=8, busy_s=3.0, ready_s=30.0, weight_updates=4, pauses_s=(0.2, 0.3)),
]
ACTORS = [
    ActorProgress(
        rollouts_started=20,
        rollouts_dropped={"timeout": 2, "raised": 1},
        evaluations={"before": -0.5},
        dropped_tokens={"timeout": 80, "raised": 0},
        started_length_mean=10.0,
        started_lengths=30,
    ),
    ActorProgress(
        rollouts_started=8,
        rollouts_dropped={"timeout": 1},
        dropped_tokens={"timeout": 20},
        started_length_mean=20.0,
        started_lengths=10,
    ),
    ActorProgress(),
]


def test_engines_and_actors_add_up() -> None:
    engines = statuses_of(*(status(f"engine-{index}", progress=one) for index, one in enumerate(ENGINES)))
    actors = statuses_of(*(status(f"actor-{index}", progress=one) for index, one in enumerate(ACTORS)))
    sums = {"slots": 16, "in_progress": 11, "queued": 1, "busy_s": 12.0, "ready_s": 40.0}
    others = {"version": 4, "weight_updates": 5, "pauses_s": (0.2, 0.3, 0.1, 0.4)}
    assert engine_total(engines | actors) == EngineProgress(**sums, **others)
    dropped = {"rollouts_dropped": {"timeout": 3, "raised": 1}, "dropped_tokens": {"timeout": 100, "raised": 0}}
    lengths = {"started_length_mean": 12.5, "started_lengths": 40}
    assert actor_total(engines | actors) == ActorProgress(
        rollouts_started=28, evaluations={"before": -0.5}, **dropped, **lengths
    )
    assert engine_total({"engine": status("engine", progress=ENGINES[0])}) is ENGINES[0]
    assert (engine_total({}), actor_total({})) == (None, None)


def test_a_timeline_has_a_few_looks_a_second(tmp_path: Path) -> None:
    now_s, asked = [100.0], []

    def progress() -> EngineProgress:
        asked.append(now_s[0])
        return ENGINES[1]

    writers = [TimelineWriter(tmp_path, worker, 90.0, clock=lambda: now_s[0]) for worker in (0, 1)]
    for _ in range(100):
        for writer in writers:
            writer.note(progress)
        now_s[0] += 0.01
    for writer in writers:
        writer.close()
    records = read_timeline(tmp_path)
    assert len(asked) == len(records) == 2 * 4
    assert [record.worker for record in records] == [0, 1] * 4
    assert [record.time_s for record in records[::2]] == pytest.approx(
        [10 + LOAD_EVERY_S * look for look in range(4)], abs=0.02
    )
    first = {"in_progress": 8, "queued": 0, "tokens_generated": 0, "version": 4, "update_cpu_s": ENGINES[1].update_cpu_s}
    assert records[0] == TimelineRecord(worker=0, time_s=10.0, cpu_s=records[0].cpu_s, **first)
    assert 0 < records[0].cpu_s <= records[-1].cpu_s <= time.process_time()


def test_a_resumed_timeline_goes_on_where_the_run_does(tmp_path: Path) -> None:
    now_s = [0.0]
    for begin_s, origin_s, looks in ((0.0, 0.0, 5), (100.0, 98.0, 2)):
        now_s[0] = begin_s
        writer = TimelineWriter(tmp_path, 0, origin_s, clock=lambda: now_s[0])
        for _ in range(looks):
            writer.note(lambda: ENGINES[0])
            now_s[0] += 1.0
        writer.close()
    assert [record.time_s for record in read_timeline(tmp_path)] == [0.0, 1.0, 2.0, 3.0]


def steps(rewards: Sequence[float]) -> list[StepRecord]:
    """Rewards of 0 and 1 with these means."""
    stds = {mean: math.sqrt(mean * (1 - mean)) for mean in rewards}
    return [step(version, reward_read_mean=mean, reward_std=stds[mean]) for version, mean in enumerate(rewards, start=1)]


RISEN = [0.25, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8]


def test_a_run_that_stays_at_its_floor_says_so_once_after_20_steps_and_which_steps_once_it_has_recovered() -> None:
    watch, notes = CollapseWatch(), []
    for one in steps(RISEN + [0.0] * 30):
        watch.observe(one)
        notes.append(watch.note)
    assert notes[: 7 + PATIENCE - 1] == [None] * (7 + PATIENCE - 1)
    (note,) = set(notes[7 + PATIENCE - 1 :])
    assert note is not None
    assert watch.now == note
    assert "lowest reward, 0, since step 8; the best 5 steps had a mean of 0.76" in note
    watch.observe(step(38, reward_read_mean=0.25, reward_std=0.4))
    assert "in steps 8 to 37" in str(watch.note)
    assert not watch.now


@pytest.mark.parametrize(
    "rewards",
    [
        [*RISEN, *[1.0] * 40],  # the ceiling
        [0.0] * 60,  # it never rose
        [0.0, 0.02, 0.0, 0.02, 0.0, *[0.0] * 40],  # a lucky answer
        [*RISEN, *[0.0] * 19, 0.25],  # for a short time
        [*RISEN, *[0.01] * 40],  # low, but rewards differ
    ],
)
def test_other_runs_have_not_collapsed(rewards: list[float]) -> None:
    assert collapse_of(steps(rewards)) is None


def test_the_floor_may_be_any_reward() -> None:
    fallen = [step(version, reward_mean=-2.0, reward_std=0.0) for version in range(8, 40)]
    assert collapse_of([*steps(RISEN), *fallen]) is not None


class Numbered(msgspec.Struct):
    n: int


def write(path: Path, *numbers: int, end: bytes = b"") -> None:
    with path.open("ab") as file:
        file.write(b"".join(b'{"n":%d}\n' % n for n in numbers) + end)


def seen(tail: Tail[Numbered]) -> list[int]:
    return [one.n for one in tail.look()]


def test_each_line_is_read_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, Numbered)
    assert seen(tail) == []
    write(path, 1, 2, end=b'{"n":')
    assert seen(tail) == [1, 2]
    write(path, end=b"3}\nnonsense\n")
    write(path, 4)
    assert (seen(tail), tail.damaged) == ([3, 4], 1)
    assert (seen(tail), tail.more, tail.restarted) == ([], False, False)
    path.unlink()  # a file that was replaced or cut is read from its start
    assert seen(tail) == []
    write(path, 7, 8, 9, 10)
    assert (seen(tail), tail.restarted) == ([7, 8, 9, 10], True)
    path.write_bytes(b'{"n":7}\n')
    assert (seen(tail), tail.restarted) == ([7], True)


def test_a_large_file_is_read_in_parts_and_of_the_newest_only_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "LOOK_BYTES", 40)
    path = tmp_path / "lines"
    write(path, *range(10, 30))
    tail, newest = Tail(path, Numbered), Tail(path, Numbered, newest=True)
    parts = [seen(tail)]
    while tail.more:
        parts.append(seen(tail))
    assert list(chain.from_iterable(parts)) == list(range(10, 30))
    assert all(len(part) <= 4 for part in parts)
    assert seen(newest) == [26, 27, 28, 29]  # its first line is only a part
    write(path, 30)
    assert seen(newest) == [30]
    write(path, end=b'{"n":1, "long": "%s"}\n' % (b"x" * 200))
    assert seen(tail) == [30]
    assert seen(tail) == [1]


def test_a_line_without_an_end_is_skipped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each look would read it again from its beginning, in the loop that serves a page."""
    monkeypatch.setattr(reading, "LOOK_BYTES", 40)
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 100)
    path = tmp_path / "numbers.jsonl"
    write(path, 1, end=b"x" * 500)
    tail = Tail(path, Numbered)
    assert seen(tail) == [1]
    place = tail.place
    assert seen(tail) == []
    assert place + 100 <= tail.place < place + 200
    write(path, 2, end=b"\n")
    write(path, 3)
    found = seen(tail)
    while tail.more:
        found += seen(tail)
    assert found == [3]
    assert tail.damaged == 2


@pytest.mark.parametrize("look_bytes", [40, 1 << 22])
def test_records_are_read_once_and_in_the_order_of_their_times(
    look_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LOOK_BYTES", look_bytes)
    first, second, third = step(1, 1.0), evaluation("online", 1, 1.5), step(2, 2.0)
    records = Records(tmp_path)
    assert records.read() == []
    write_records(tmp_path, first, third, second)
    assert records.read() == [first, second, third]
    assert records.read() == []
    before = records.place
    write_records(tmp_path, step(3), step(4))
    assert records.read() == [step(3), step(4)]
    assert Records(tmp_path, before).read() == [step(3), step(4)]
