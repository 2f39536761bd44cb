"""Records are followed while they are written, each once and in order; samples are those that the run wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.metrics.tail import SAMPLES, Tail, samples
from pipelinerl.types import Completion, Group, Problem, Rollout, Turn


def step(version: int) -> StepRecord:
    return StepRecord(version=version, time_s=float(version), samples=8)


def evaluation(version: int, time_s: float) -> EvaluationRecord:
    return EvaluationRecord(when="online", version=version, time_s=time_s, problems=20, reward_mean=0.5)


def test_records_are_read_once_and_in_the_order_of_their_times(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert tail.read() == []
    sink = JsonlSink(tmp_path)
    for record in (step(1), step(2), evaluation(1, 1.5)):
        sink.write(record)
    assert tail.read() == [step(1), evaluation(1, 1.5), step(2)]
    assert tail.read() == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        line = msgspec.json.encode(step(3)) + b"\n"
        file.write(line[:10])
        file.flush()
        assert tail.read() == [], "a line that is being written"
        file.write(line[10:] + b"damaged\n" + msgspec.json.encode(step(4)) + b"\n")
    before = tail.place
    assert tail.read() == [step(3), step(4)]
    assert Tail(tmp_path, before).read() == [step(3), step(4)]


def test_samples_are_answers_of_the_evaluation_and_the_newest_group(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    answers = [EvaluatedProblem(problem_id=str(i), reward=0.5, prompt="1+1", completion="2", length=3) for i in range(20)]
    (folder / "evaluation-v4.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(answers))
    rows = samples(tmp_path, evaluation(4, 1.0))
    assert len(rows) == SAMPLES
    assert rows[0] == (4, "1+1", "2", 0.5, 3)

    completion = Completion(
        request_id="r", token_ids=(5, 6), logprobs=(-1.0, -1.0), weight_versions=(), prompt_versions=(), finish_reason="stop"
    )
    rollout = Rollout(turns=(Turn(prompt_ids=(1,), completion=completion, text="7"),), reward=1.0)
    groups = [Group(index=i, problem=Problem(id="p", payload={"a": i}), rollouts=(rollout,), started=1) for i in range(2)]
    (folder / "rollouts.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(groups) + b'{"index":2,')
    assert samples(tmp_path, step(9)) == [(9, '{"a":1}', "7", 1.0, 2)]
