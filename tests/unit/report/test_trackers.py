"""What follows a run: trackers and the callback get each record, also after errors and in a resumed run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import MetricsConfig, RunConfig
from pipelinerl.errors import MissingDependencyError
from pipelinerl.launch.checks import check_before_the_start
from pipelinerl.metrics.records import Record
from pipelinerl.report import trackers
from pipelinerl.report.trackers import CALLBACK, MOST_ROWS, Follower, Tracker, followed
from pipelinerl.run_directory import RunDirectory
from tests.unit.record_parts import answered, evaluation, step, write_records


def a_run(root: Path, **metrics: Any) -> tuple[RunDirectory, list[str]]:
    """A run directory with three steps, as a session leaves it; and a list for messages."""
    run = RunDirectory(root)
    run.make_folders()
    config = RunConfig.model_validate({"metrics": metrics, "environment": {"args": {"api_key": "hush"}}})
    run.settings.write_text(config.model_dump_json())
    write_records(root, *(step(version, float(version), loss=1 / version) for version in (1, 2, 3)))
    return run, []


def ended() -> threading.Event:
    stopping = threading.Event()
    stopping.set()
    return stopping


class Recorder(Tracker):
    """A tracker that keeps what it gets, and fails for the versions in `broken`, once each."""

    def __init__(self, known: str | None, broken: set[int]) -> None:
        self.id = known or "new"
        self.broken = broken
        self.got: list[int] = []
        self.summaries: list[Mapping[str, Any]] = []

    def write(self, record: Record, _answers: Sequence[Any]) -> None:
        if record.version in self.broken:
            self.broken.remove(record.version)
            raise ConnectionError("no network")
        self.got.append(record.version)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(summary)


def test_a_failing_tracker_is_tried_again_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "EVERY_S", 0.001)
    (run, messages), made = a_run(tmp_path), []
    run.summary.write_text('{"status":"finished"}')

    def make(_name: str, _folder: Path, _config: Mapping[str, Any], known: str | None) -> Recorder:
        made.append(Recorder(known, {2}))
        if len(made) < 3:
            raise PermissionError("no key")
        return made[-1]

    monkeypatch.setattr(trackers, "open_tracker", make)
    stopping, sent = threading.Event(), run.trackers / "recorder.json"
    thread = threading.Thread(target=Follower(run, "recorder", messages.append).follow, args=(stopping,))
    thread.start()
    while not (sent.exists() and b"[0,0]" not in sent.read_bytes()) and thread.is_alive():
        stopping.wait(0.001)
    stopping.set()
    thread.join()
    assert made[-1].got == [1, 1, 2, 3], "the records from the last place on, again"
    assert made[-1].summaries == [{"status": "finished"}]
    assert [line.partition(";")[0] for line in messages] == ["recorder: PermissionError: no key", "recorder: 3 errors"]

    write_records(run.root, step(4, 4.0))
    Follower(run, "recorder", messages.append).follow(ended())
    assert (made[-1].id, made[-1].got) == ("new", [4]), "a later session continues"
    sent.write_text("{")
    Follower(run, "recorder", messages.append).follow(ended())
    assert made[-1].got == [1], "damaged notes are none"


def test_a_callback_gets_each_record_and_its_errors_end_nothing(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(
        "def note(record):\n"
        f"    with open({str(out)!r}, 'a') as file:\n"
        "        print(type(record).__name__, record.version, file=file)\n"
        "    if record.version != 2:\n"
        "        raise SystemExit('enough')\n"
    )
    run, messages = a_run(tmp_path / "run", callback=f"{file}:note")
    write_records(run.root, evaluation("after", 3, 9.0))
    Follower(run, CALLBACK, messages.append).follow(ended())
    assert out.read_text().split() == ["StepRecord", "1", "StepRecord", "2", "StepRecord", "3", "EvaluationRecord", "3"]
    assert [line.partition(";")[0] for line in messages] == ["callback: SystemExit: enough", "callback: 3 errors"]
    Follower(run, CALLBACK, messages.append).follow(ended())
    assert len(out.read_text().splitlines()) == 4, "each record once"


@pytest.mark.slow
def test_a_run_that_ends_while_the_process_starts_is_followed_to_its_end(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(f"def note(record):\n    open({str(out)!r}, 'a').write(f'{{record.version}} ')\n")
    run, messages = a_run(tmp_path / "run", callback=f"{file}:note")
    with followed(run, MetricsConfig(callback=f"{file}:note"), messages.append):
        pass
    assert (out.read_text(), messages) == ("1 2 3 ", [])


def test_tensorboard_gets_curves_texts_and_answers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, messages = a_run(tmp_path, trackers=["tensorboard"])
    write_records(run.root, evaluation("after", 3, 9.0, metrics={"hard/reward": 0.25}))
    answers = [answered(0.5, prompt="1|1", completion="two\nlines")] * (MOST_ROWS + 4)
    run.evaluation("after").write_bytes(msgspec.json.Encoder().encode_lines(answers))
    run.summary.write_text('{"status":"finished","reward_last":0.75}')
    Follower(run, "tensorboard", messages.append).follow(ended())
    assert messages == []
    events = EventAccumulator(str(run.root / "tensorboard"))
    events.Reload()
    tags = ("loss", "evaluation/reward_mean", "evaluation/metrics/hard/reward")
    values = [[(event.step, round(event.value, 3)) for event in events.Scalars(tag)] for tag in tags]
    assert values == [[(1, 1.0), (2, 0.5), (3, 0.333)], [(3, 0.5)], [(3, 0.25)]]
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("config", "summary", "samples/held_out")
    }
    assert "hush" not in texts["config"]
    assert '"trainer": {' in texts["config"]
    assert '"reward_last": 0.75' in texts["summary"]
    assert texts["samples/held_out"].splitlines()[2:] == ["| 3 | 1\\|1 | two<br>lines | 0.5 | 1 |"] * MOST_ROWS


def test_a_tracker_that_is_not_there_is_refused_before_the_start(not_installed: Callable[[str], None]) -> None:
    not_installed("wandb")
    with pytest.raises(MissingDependencyError, match=r"metrics.trackers: .*pip install 'wandb>="):
        check_before_the_start(load_config(None, ["--metrics.trackers", "[wandb]"]))
