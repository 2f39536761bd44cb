"""What is known of several generation processes as if they were one: sums, the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.records import LOAD_EVERY_S, TimelineRecord, TimelineWriter
from pipelinerl.metrics.statistics import actor_total, engine_total
from pipelinerl.report.series import read_timeline
from pipelinerl.types import ActorProgress, EngineProgress
from tests.unit.record_parts import status, statuses_of

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
    assert engine_total(engines | actors) == EngineProgress(
        version=4,
        slots=16,
        in_progress=11,
        queued=1,
        busy_s=12.0,
        ready_s=40.0,
        weight_updates=5,
        pauses_s=(0.2, 0.3, 0.1, 0.4),
    )
    assert actor_total(engines | actors) == ActorProgress(
        rollouts_started=28,
        rollouts_dropped={"timeout": 3, "raised": 1},
        evaluations={"before": -0.5},
        dropped_tokens={"timeout": 100, "raised": 0},
        started_length_mean=12.5,
        started_lengths=40,
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
    assert records[0] == TimelineRecord(worker=0, time_s=10.0, in_progress=8, queued=0, tokens_generated=0, version=4)


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
    (tmp_path / "timeline-0.jsonl").write_text('{"worker":"x"}\n')
    with pytest.raises(RunDirectoryError, match=r"timeline-0\.jsonl, line 1"):
        read_timeline(tmp_path)
