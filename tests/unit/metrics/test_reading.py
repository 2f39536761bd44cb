"""Growing files are read once, from where the last look ended; samples are those that the run wrote."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.metrics import reading
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import Records, Tail
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.metrics.trackers import SAMPLES, samples
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Completion, Group, Problem, Rollout, Turn


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
    assert seen(tail) == [3, 4]
    assert tail.damaged == 1
    assert seen(tail) == []
    assert not tail.more
    assert not tail.restarted


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, Numbered)
    write(path, 1, 2, 3)
    assert seen(tail) == [1, 2, 3]
    path.unlink()
    assert seen(tail) == []
    write(path, 7, 8, 9, 10)
    assert seen(tail) == [7, 8, 9, 10]
    assert tail.restarted
    path.write_bytes(b'{"n":7}\n')
    assert seen(tail) == [7]
    assert tail.restarted


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


def step(version: int) -> StepRecord:
    return StepRecord(version=version, time_s=float(version), samples=8)


def evaluation(version: int, time_s: float) -> EvaluationRecord:
    return EvaluationRecord(when="online", version=version, time_s=time_s, problems=20, reward_mean=0.5)


@pytest.mark.parametrize("look_bytes", [40, 1 << 22])
def test_records_are_read_once_and_in_the_order_of_their_times(
    look_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LOOK_BYTES", look_bytes)
    records = Records(tmp_path)
    assert records.read() == []
    sink = JsonlSink(tmp_path)
    for record in (step(1), step(2), evaluation(1, 1.5)):
        sink.write(record)
    assert records.read() == [step(1), evaluation(1, 1.5), step(2)]
    assert records.read() == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        line = msgspec.json.encode(step(3)) + b"\n"
        file.write(line[:10])
        file.flush()
        assert records.read() == [], "a line that is being written"
        file.write(line[10:] + b"damaged\n" + msgspec.json.encode(step(4)) + b"\n")
    before = records.place
    assert records.read() == [step(3), step(4)]
    assert Records(tmp_path, before).read() == [step(3), step(4)]


def test_samples_are_answers_of_the_evaluation_and_the_newest_group(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    answers = [EvaluatedProblem(problem_id=str(i), reward=0.5, prompt="1+1", completion="2", length=3) for i in range(20)]
    (folder / "evaluation-v4.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(answers))
    rows = samples(RunDirectory(tmp_path), evaluation(4, 1.0))
    assert len(rows) == SAMPLES
    assert rows[0] == (4, "1+1", "2", 0.5, 3)

    completion = Completion(
        request_id="r", token_ids=(5, 6), logprobs=(-1.0, -1.0), weight_versions=(), prompt_versions=(), finish_reason="stop"
    )
    rollout = Rollout(turns=(Turn(prompt_ids=(1,), completion=completion, text="7"),), reward=1.0)
    groups = [Group(index=i, problem=Problem(id="p", payload={"a": i}), rollouts=(rollout,), started=1) for i in range(2)]
    (folder / "rollouts.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(groups) + b'{"index":2,')
    assert samples(RunDirectory(tmp_path), step(9)) == [(9, '{"a":1}', "7", 1.0, 2)]
