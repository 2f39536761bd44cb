"""Reading run directories for a report, what is wrong with them, and the page that comes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import EngineConfig, EnvironmentConfig, RunConfig, ScheduleConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.metrics.summary import summarize
from pipelinerl.metrics.timeline import TimelineRecord
from pipelinerl.report import html
from pipelinerl.report.figures import (
    DrawnRun,
    batch_sizes,
    drawn_run,
    environments,
    held_out,
    learning,
    metrics,
    on_policyness,
    throughput,
)
from pipelinerl.report.run_report import metric_rows, report_page
from pipelinerl.report.series import labels_of, name_of, read_run
from pipelinerl.trainer.records import TrainedRecord, TrainedSample
from pipelinerl.types import Completion, Group, Problem, Rollout, Turn, VersionSpan

CONFIG = RunConfig(
    environment=EnvironmentConfig(kind="/home/someone/task.py:Task"),
    engine=EngineConfig(slots=4, processes=2),
    schedule=ScheduleConfig(kind="conventional", steps_per_round=2),
)


def steps_of(count: int) -> list[StepRecord]:
    values = {"ess": 1.0, "lag_mean": 0.5, "lag_max": 1, "completion_length_mean": 4.0, "train_s": 0.25, "wait_s": 0.5}
    return [
        StepRecord(version=n, time_s=3.0 + n, samples=2, tokens_trained=8, reward_mean=0.05 * n, **values)  # type: ignore[arg-type]
        for n in range(1, count + 1)
    ]


def rollout(name: str, *turns: tuple[VersionSpan, ...]) -> Rollout:
    made = []
    for number, spans in enumerate(turns):
        count = spans[-1].end
        sampled = {"token_ids": (1,) * count, "logprobs": (-1.0,) * count, "weight_versions": spans}
        completion = Completion(request_id=f"{name}.t{number}", finish_reason="stop", **sampled)
        made.append(Turn(prompt_ids=(1, 2), completion=completion))
    return Rollout(turns=tuple(made), reward=1.0, id=name)


def trained(version: int, *names: str) -> TrainedRecord:
    samples = tuple(TrainedSample(id=name, group_index=0, tokens=4, lag_min=0, lag_max=1) for name in names)
    return TrainedRecord(version=version, samples=samples)


def write_lines(path: Path, *records: object) -> None:
    lines = JsonLines(path)
    for record in records:
        lines.write(record)
    lines.close()


def write_run(run_dir: Path, count: int = 12) -> Path:
    """A run of `count` steps as its processes would have left it."""
    (run_dir / "rollouts").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config_to_yaml(CONFIG))
    sink = JsonlSink(run_dir)
    for record in steps_of(count):
        sink.write(record)
    sink.close()
    summary = summarize(CONFIG, steps_of(count), [], {}, wall_s=9.0, status="finished")
    (run_dir / "summary.json").write_bytes(msgspec.json.encode(summary))
    return run_dir


def add_rollouts(run_dir: Path) -> None:
    group = Group(
        index=0,
        problem=Problem(id="p", payload={}),
        rollouts=(
            rollout("a", (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)), (VersionSpan(1, 0, 1),)),
            rollout("b", (VersionSpan(1, 0, 2),)),
        ),
        started=2,
    )
    write_lines(run_dir / "rollouts" / "rollouts.jsonl", group)
    # The run was resumed from version 1: its first try at step 2 does not count.
    write_lines(run_dir / "rollouts" / "trained.jsonl", trained(1), trained(2, "a", "b"), trained(2, "a"), trained(3, "b"))


def add_timeline(run_dir: Path) -> None:
    for worker in range(2):
        looks = [
            TimelineRecord(worker=worker, time_s=n / 4, in_progress=n % 5, queued=0, tokens_generated=n, version=0)
            for n in range(10, 60)
        ]
        write_lines(run_dir / f"timeline-{worker}.jsonl", *looks)


def test_lag_is_read_from_what_was_sampled_and_what_was_trained(tmp_path: Path) -> None:
    add_rollouts(write_run(tmp_path / "run"))
    lag = read_run(tmp_path / "run").lag
    assert lag is not None
    assert lag.position == [0, 1, 2, 3]
    # a at version 1: lags 1 1 0 0; b at version 2: lags 1 1
    assert lag.mean == [1.0, 1.0, 0.0, 0.0]
    assert lag.tokens == [2, 2, 1, 1]


def test_a_run_without_extras_is_read_and_drawn(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path / "run", count=1))
    assert records.lag is None
    assert records.timeline == []
    assert records.slots == 8
    drawn = drawn_run(records, "one")
    assert drawn.curves.time_s == [0.75]  # from 4 - 0.25 - 0.5
    assert drawn.curves.reward == [0.05]
    assert batch_sizes([drawn]) is None
    for png in (learning([drawn], 0.5), on_policyness([drawn]), throughput([drawn])):
        assert png.startswith(b"\x89PNG")


def test_short_runs_show_every_reward_and_longer_ones_windows(tmp_path: Path) -> None:
    short = drawn_run(read_run(write_run(tmp_path / "short", count=9)), "s")
    assert short.curves.reward == pytest.approx([0.05 * n for n in range(1, 10)])
    long = drawn_run(read_run(write_run(tmp_path / "long", count=12)), "l")
    assert long.curves.reward[4:] == pytest.approx([0.05 * (n - 2) for n in range(5, 13)])


def test_the_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_rollouts(run)
    add_timeline(run)
    page = report_page([run])
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert "<script" not in page
    assert "conventional:2" in page
    assert ">task.py:Task, demo<" in page
    assert "12 steps, 24 rollouts in 11.8 s" in page  # from 3.25 to 15
    assert "batch_size: " in page[page.index("Run files") :]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at images: drawing them takes most of the time."""
    monkeypatch.setattr("pipelinerl.report.figures.png_of", lambda figure: b"PNG")


@pytest.mark.usefixtures("undrawn")
def test_text_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>&")
    page = report_page([run])
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page
    assert html.table(["<i>"], [['"&'], ["x"]], strong=["x"]).count("<i>") == 0
    assert '<tr class="strong"><td>x</td></tr>' in html.table([], [["x"]], strong=["x"])


def test_the_report_has_an_answer_before_and_after_and_no_line_twice(tmp_path: Path, undrawn: None) -> None:
    run = write_run(tmp_path / "run")
    add_rollouts(run)
    for when, text, reward in (("before", ">35", 0.0), ("after", ">07", 1.0)):
        one = EvaluatedProblem(problem_id="p", prompt="07,35:", completion=text, reward=reward, length=2)
        write_lines(run / "rollouts" / f"evaluation-{when}.jsonl", one)
    same = tuple(Rollout(turns=(), reward=1.0, id=f"g99.a{number}") for number in range(3))
    group = Group(index=99, problem=Problem(id="q", payload={"q": 1}), rollouts=same, started=3)
    with (run / "rollouts" / "rollouts.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(group) + b"\n")
    page = report_page([run])
    assert page.index("<td>&gt;35</td>") < page.index("<td>&gt;07</td>")
    newest = page[page.index("Newest answers, training") :]
    assert newest.count("3 times") == 1
    assert "once" not in newest


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_in_columns(tmp_path: Path) -> None:
    page = report_page([write_run(tmp_path / "one"), write_run(tmp_path / "two")])
    assert "<th>one</th><th>two</th>" in page


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(RunDirectoryError, match="named twice"):
        labels_of([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_schedules_have_the_names_that_comparisons_use() -> None:
    assert name_of(CONFIG) == "conventional:2"
    assert name_of(RunConfig()) == "pipeline"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda path: None, "there is no such folder"),
        (Path.mkdir, "it has no config.yaml"),
        (lambda path: write_run(path, count=0), "holds no optimizer step"),
    ],
)
def test_a_folder_without_a_run_or_a_step(tmp_path: Path, made: Callable[[Path], object], said: str) -> None:
    made(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=said) as error:
        report_page([tmp_path / "run"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"{"),
        ("summary.json", b"[1]"),
        ("summary.json", b'{"status": "finished"}'),
        ("metrics.jsonl", b"{}\n"),
        ("rollouts/rollouts.jsonl", b"\xff\n"),
        ("rollouts/trained.jsonl", b'{"version": 1}\n'),
        ("timeline-0.jsonl", b'{"worker": "x"}\n'),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_damage_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    add_rollouts(run)
    (run / name).write_bytes(content)
    with pytest.raises(RunDirectoryError) as error:
        report_page([run])
    assert name.rpartition("/")[2] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed_is_still_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version": 13, "ti')  # torn
    assert "no summary" in report_page([run])


def test_an_evaluation_before_training_is_not_training_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_lines(run / "evaluations.jsonl", EvaluationRecord(when="before", version=0, time_s=3.5, problems=4))
    assert read_run(run).begin_s == 3.5


@pytest.mark.usefixtures("undrawn")
def test_online_evaluations_and_environments_have_a_section_and_metrics_a_table(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    assert not any(title in report_page([plain]) for title in ("Held-out reward", "By environment", "Metrics of the"))
    run = write_run(tmp_path / "run")
    metrics = [{"<a>/reward": 0.5}, {"b/reward": 0.0, "b/boxed": 1.0}, *[{"b/reward": 1.0}] * 2]
    changed = [
        msgspec.structs.replace(step, metrics=found, metric_counts=dict.fromkeys(found, number + 1))
        for number, (step, found) in enumerate(zip(steps_of(4), metrics, strict=True))
    ]
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", *changed)
    records = [
        EvaluationRecord(when=when, version=version, time_s=4.0, problems=4, reward_mean=0.5, metrics={"b/reward": reward})
        for when, version, reward in (("before", 0, 0.25), ("online", 2, 0.5), ("after", 4, 0.75))
    ]
    write_lines(run / "evaluations.jsonl", *records)
    page = report_page([run, plain])
    for text in ("Held-out reward", "By environment", "Metrics of the rollouts", "&lt;a&gt;/reward"):
        assert text in page
    assert metric_rows(changed, records) == [
        ["<a>/reward", "0.5", "-", "-", "-"],
        ["b/reward", "-", "1", "0.25", "0.75"],
    ]
    assert [row[:3] for row in metric_rows(changed * 4, [])] == [
        ["<a>/reward", "0.5", "0.5"],
        ["b/boxed", "1", "1"],
        ["b/reward", f"{7 / 9:.4g}", f"{7 / 9:.4g}"],
    ]


def test_environments_have_a_panel_each_and_held_out_rewards_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    steps = [msgspec.structs.replace(step, metrics={"a/reward": 1.0, "b/reward": 0.0}) for step in steps_of(12)]
    online = EvaluationRecord(when="online", version=5, time_s=9.0, problems=2, reward_mean=0.5, version_max=7)
    drawn = drawn_run(read_run(run)._replace(steps=steps, evaluations=[online]), "one")
    assert drawn.curves.by_environment["a"] == [1.0] * 12
    assert drawn.curves.by_metric == {}
    steps = [msgspec.structs.replace(step, metrics={"right": 1.0, "brief": 0.5}) for step in steps_of(12)]
    graded = drawn_run(read_run(run)._replace(steps=steps), "two")
    assert graded.curves.by_metric == {"brief": [0.5] * 12, "right": [1.0] * 12}
    for png in (environments([drawn]), held_out([drawn]), metrics([drawn, graded])):
        assert png is not None
        assert png.startswith(b"\x89PNG")


def test_batch_sizes_have_a_panel_for_each_label(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_timeline(run)
    drawn: list[DrawnRun] = [drawn_run(read_run(run), label) for label in ("a", "a", "b")]

    def height(png: bytes | None) -> int:
        assert png is not None
        return int.from_bytes(png[20:24], "big")

    assert height(batch_sizes(drawn)) == height(batch_sizes(drawn[1:])) > height(batch_sizes(drawn[:2]))
