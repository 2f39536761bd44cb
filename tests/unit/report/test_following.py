"""What follows a run: trackers and the callback get each record, also after errors and in a resumed run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import MetricsConfig, RunConfig
from pipelinerl.errors import MissingDependencyError
from pipelinerl.launch.checks import check_before_the_start
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink, Record
from pipelinerl.metrics.trackers import Tracked, Tracker
from pipelinerl.report import following
from pipelinerl.report.following import CALLBACK, Follower, followed
from pipelinerl.run_directory import RunDirectory


def step(version: int) -> StepRecord:
    return StepRecord(version=version, time_s=float(version), samples=8, loss=1 / version)


def a_run(root: Path, steps: int = 3, **metrics: Any) -> RunDirectory:
    """A run directory with records, as a session leaves it."""
    run = RunDirectory(root)
    run.make_folders()
    config = RunConfig.model_validate({"metrics": metrics, "environment": {"args": {"api_key": "hush"}}})
    run.settings.write_text(config.model_dump_json())
    sink = JsonlSink(run.root)
    for version in range(1, steps + 1):
        sink.write(step(version))
    return run


def ended() -> threading.Event:
    stopping = threading.Event()
    stopping.set()
    return stopping


class Kept(Tracker):
    """A tracker that keeps what it gets, and fails for the versions in `broken`, once each."""

    def __init__(self, known: str | None, broken: set[int]) -> None:
        self.id = known or "new"
        self.broken = broken
        self.got: list[int] = []
        self.summaries: list[Mapping[str, Any]] = []

    def write(self, record: Record) -> None:
        if record.version in self.broken:
            self.broken.remove(record.version)
            raise ConnectionError("no network")
        self.got.append(record.version)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(summary)


def test_a_failing_tracker_is_tried_again_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "EVERY_S", 0.001)
    run, said, made = a_run(tmp_path), [], []
    run.summary.write_text('{"status":"finished"}')

    def make(_name: str, tracked: Tracked) -> Kept:
        made.append(Kept(tracked.id, {2}))
        if len(made) < 3:
            raise PermissionError("no key")
        return made[-1]

    monkeypatch.setattr(following, "open_tracker", make)
    stopping, sent = threading.Event(), run.trackers / "kept.json"
    thread = threading.Thread(target=Follower(run, "kept", said.append).follow, args=(stopping,))
    thread.start()
    while not (sent.exists() and b'"steps":0' not in sent.read_bytes()) and thread.is_alive():
        stopping.wait(0.001)
    stopping.set()
    thread.join()
    assert made[-1].got == [1, 1, 2, 3], "the records from the last place on, again"
    assert made[-1].summaries == [{"status": "finished"}]
    assert [line.partition(";")[0] for line in said] == ["kept: PermissionError: no key", "kept: 3 errors"]

    JsonlSink(run.root).write(step(4))
    Follower(run, "kept", said.append).follow(ended())
    assert (made[-1].id, made[-1].got) == ("new", [4]), "a later session continues"
    sent.write_text("{")
    Follower(run, "kept", said.append).follow(ended())
    assert made[-1].got == [1], "damaged notes are none"


def test_a_callback_gets_each_record_and_its_errors_end_nothing(tmp_path: Path) -> None:
    code = """
    seen = []
    def note(record):
        with open({out!r}, "a") as file:
            print(type(record).__name__, record.version, file=file)
        if record.version != 2:
            raise SystemExit("enough")
    """
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text("\n".join(line[4:] for line in code.format(out=str(out)).splitlines()))
    run, said = a_run(tmp_path / "run", callback=f"{file}:note"), []
    JsonlSink(run.root).write(EvaluationRecord(when="after", version=3, time_s=9.0, problems=1))
    Follower(run, CALLBACK, said.append).follow(ended())
    assert out.read_text().split() == ["StepRecord", "1", "StepRecord", "2", "StepRecord", "3", "EvaluationRecord", "3"]
    assert [line.partition(";")[0] for line in said] == ["callback: SystemExit: enough", "callback: 3 errors"]
    Follower(run, CALLBACK, said.append).follow(ended())
    assert len(out.read_text().splitlines()) == 4, "the place is kept"


def test_a_run_that_ends_while_the_process_starts_is_followed_to_its_end(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(f"def note(record):\n    open({str(out)!r}, 'a').write(f'{{record.version}} ')\n")
    run, said = a_run(tmp_path / "run", callback=f"{file}:note"), []
    with followed(run, MetricsConfig(callback=f"{file}:note"), said.append):
        pass
    assert (out.read_text(), said) == ("1 2 3 ", [])


def test_tensorboard_gets_curves_texts_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, said = a_run(tmp_path, trackers=["tensorboard"]), []
    JsonlSink(run.root).write(EvaluationRecord(when="after", version=3, time_s=9.0, problems=1, reward_mean=0.5))
    answer = EvaluatedProblem(problem_id="1", reward=0.5, prompt="1|1", completion="two\nlines")
    run.evaluation("after").write_bytes(msgspec.json.encode(answer) + b"\n")
    run.summary.write_text('{"status":"finished","reward_last":0.75}')
    Follower(run, "tensorboard", said.append).follow(ended())
    assert said == []
    events = EventAccumulator(str(run.root / "tensorboard"))
    events.Reload()
    values = {
        tag: [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]
        for tag in ("loss", "evaluation/reward_mean")
    }
    assert values == {"loss": [(1, 1.0), (2, 0.5), (3, 0.333)], "evaluation/reward_mean": [(3, 0.5)]}
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("config", "summary", "samples/held_out")
    }
    assert "hush" not in texts["config"]
    assert '"reward_last": 0.75' in texts["summary"]
    assert texts["samples/held_out"].splitlines()[-1] == "| 3 | 1\\|1 | two<br>lines | 0.5 | 0 |"


def test_a_tracker_that_is_not_there_is_refused_before_the_start(not_installed: Callable[[str], None]) -> None:
    not_installed("wandb")
    with pytest.raises(MissingDependencyError, match=r"metrics.trackers: .*pip install 'wandb>="):
        check_before_the_start(load_config(None, ["--metrics.trackers", "[wandb]"]))
