"""What goes on while a run trains: evaluations and the filter of problems by difficulty. What is recorded, and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor.difficulty import OnlineFilter
from pipelinerl.config.schema import OnlineFilterConfig
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.types import Group
from tests.integration.runs import (
    assert_conserved,
    assert_gone_on,
    assert_provenance,
    assert_trained_once,
    assert_whole,
    groups,
    resume,
    rollouts_by_id,
    run,
    steps,
    trained,
    try_in_this_process,
    versions,
    write_environment,
)

pytestmark = pytest.mark.slow
MIXTURE = "{environments: {plain: {kind: gcd, weight: 3}, rare: {kind: gcd, weight: 1}}}"


def evaluations(run_dir: Path) -> list[EvaluationRecord]:
    return read_records(run_dir / "evaluations.jsonl", EvaluationRecord)


def assert_as_recorded(run_dir: Path, record: EvaluationRecord, *sets: str) -> None:
    """The line is what its answers say, and those to the further sets."""
    answers = read_lines(run_dir / "rollouts" / f"evaluation-{record.name}.jsonl", EvaluatedProblem)
    found = [span.version for answer in answers for span in answer.weight_versions]
    by_set = {of: {one.problem_id: one.reward for one in answers if one.evaluation_set == of} for of in ("", *sets)}
    assert sum(map(len, by_set.values())) == len(answers)
    assert [len(rewards) for rewards in by_set.values()] == [record.problems, *(4 for _ in sets)]
    assert (min(found), max(found)) == (record.version_min, record.version_max)
    assert record.reward_mean == sum(by_set[""].values()) / record.problems
    assert {f"{of}/reward": sum(by_set[of].values()) / 4 for of in sets}.items() <= record.metrics.items()


def test_they_are_recorded_and_the_same_run_file_gives_the_same_run(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    settings = {"environment__kind": "mixture", "environment__args": MIXTURE, "schedule__max_lag": 3}
    for run_dir in (one, other):
        counts = run(
            run_dir, trainer__steps=6, actor__max_tokens=24, evaluation__problems=6, evaluation__every=2, **settings
        )
        assert_conserved(counts)
    assert_trained_once(one)
    assert_provenance(one)
    records = evaluations(one)
    assert [record.when for record in records] == ["before", "online", "online", "after"]
    assert [record.version for record in records] == [0, 2, 4, 6]
    assert any(record.version_max > record.version for record in records), "weights change while they are answered"
    for record in records:
        assert_as_recorded(one, record)
        assert record.metrics.keys() == {"plain/reward", "rare/reward"}
        assert sum(record.metric_counts.values()) == record.problems
    for path in (one / "rollouts").iterdir():
        assert path.read_bytes() == (other / "rollouts" / path.name).read_bytes(), path.name
    for step in steps(one):
        assert sum(step.metric_counts.values()) == step.samples
        rewards = [step.metrics[name] * step.metric_counts[name] for name in step.metrics]
        assert sum(rewards) / step.samples == pytest.approx(step.reward_mean)


def of_sets(folder: Path, **sets: object) -> dict[str, object]:
    """Settings of a run that continues `N,N+1:`, and is evaluated on a share of these problems and on other sets."""
    for name, numbers in {"data": range(10, 34), "longer": range(34, 40), "hard": range(50, 55)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{n},{n + 1}:"}) + "\n" for n in numbers))
    (folder / "rewards.py").write_text(
        "def reward(completion, example):\n    return 1.0 if example['prompt'] >= '5' else 0.25 * (len(completion) % 2)\n"
    )
    args = {"data": f"{folder}/data.jsonl", "reward": f"{folder}/rewards.py:reward", "isolate": False}
    return {
        "environment__kind": "function",
        "environment__args": json.dumps(args),
        "evaluation__problems": 4,
        "evaluation__sets": json.dumps(sets),
    }


def test_rounds_do_not_wait_for_them_a_resume_repeats_none_and_each_set_has_a_reward_of_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    sets = {name: {"held_out": f"{tmp_path}/{name}.jsonl"} for name in ("hard", "longer")}
    settings = of_sets(tmp_path, **sets) | {"schedule__kind": "conventional", "schedule__steps_per_round": 2}
    counts = run(run_dir, trainer__steps=6, actor__max_tokens=12, evaluation__every=2, evaluation__share=0.5, **settings)
    assert counts["eval_reward_after"] < counts["eval_after_metrics"]["hard/reward"] == 1.0
    first = evaluations(run_dir)
    assert_conserved(resume(run_dir, trainer__steps=10))
    records = evaluations(run_dir)
    assert records[: len(first)] == first
    assert [(one.when, one.version) for one in first] == [("before", 0), ("online", 2), ("online", 4), ("after", 6)]
    assert [(one.when, one.version) for one in records[len(first) :]] == [("online", 8), ("after", 10)]
    for record in (*records[:3], *records[4:]):  # the first answers after training were replaced
        assert_as_recorded(run_dir, record, "hard", "longer")
    for rollout in rollouts_by_id(run_dir).values():
        assert len(set(versions(rollout))) == 1, "weights are frozen in a round, whatever is being evaluated"


@pytest.mark.parametrize(
    ("sets", "wrong"),
    [
        (
            {"hard": {"data": "hard.jsonl", "held_out": "data.jsonl"}},
            r"sets.hard: 4 of its 4 problems are also training problems \(data/",
        ),
        ({"hard": {"held_out": "none.jsonl"}}, "evaluation.sets.hard: .*none.jsonl"),
        ({"hard": {"helt_out": 0.1}}, "evaluation.sets.hard: .*helt_out: unknown; did you mean `held_out`"),
    ],
)
def test_a_set_that_can_not_be_used_ends_the_run_before_it_starts(
    sets: dict[str, dict[str, object]], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = of_sets(tmp_path, **sets)
    monkeypatch.chdir(tmp_path)
    try_in_this_process(monkeypatch)
    with pytest.raises(EnvironmentSetupError, match=wrong):
        run(tmp_path / "r", trainer__steps=2, **settings)
    assert not (tmp_path / "r").exists()


# Of eight problems, three are always solved and three never. The reward of the other two depends on the answer.
BODY = """
isolate_reward = False

def problem(self, index):
    found = super().problem(index % 8)
    return Problem(id=f"p{index % 8}", payload=found.payload)

def reward(self, problem, text):
    number = int(problem.id[1:])
    return 1.0 if number < 3 else 0.0 if number < 6 else float(sum(map(ord, text)) % 2)
"""
FILTER = OnlineFilterConfig(keep=0.3, at_least=0.1)


def filtered(folder: Path, **more: Any) -> dict[str, Any]:
    own = {f"actor__online_filter__{name}": value for name, value in FILTER.model_dump().items()}
    return {"environment__kind": write_environment(folder, BODY), "actor__max_tokens": 8, **own, **more}


def assert_filtered(run_dir: Path) -> list[Group]:
    """Every decision follows from the groups recorded before it. Returns the groups."""
    skips, found = OnlineFilter(FILTER, 0), groups(run_dir)
    assert len({group.index for group in found}) == len(found)
    for group in found:
        if group.skipped is not None:
            assert (group.started, group.rollouts) == (0, ())
            assert skips.decide(group.index, group.problem.id) == group.skipped
        skips.observe(group.index, group.problem.id, [rollout.reward for rollout in group.rollouts])
    return found


@pytest.mark.parametrize("schedule", ["conventional", "pipeline"])
def test_problems_that_teach_nothing_are_skipped_and_come_back(tmp_path: Path, schedule: str) -> None:
    counts = run(tmp_path / "r", schedule__kind=schedule, trainer__steps=12, **filtered(tmp_path))
    assert_whole(tmp_path / "r")
    found = assert_filtered(tmp_path / "r")
    skipped = [group for group in found if group.skipped]
    rewards = {group.problem.id: group.skipped.reward_mean for group in skipped}
    assert [rewards[f"p{number}"] for number in range(6)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    generated = [group.problem.id for group in found if not group.skipped]
    assert sum(generated.count(f"p{number}") >= 2 for number in range(6)) >= 3, "they come back"
    assert generated.count("p6") + generated.count("p7") > len(generated) / 3, "a quarter of the problems"
    assert counts["groups_skipped"] == len(skipped)
    started = counts["rollouts_started"] / 4
    assert counts["skipped_fraction"] == pytest.approx(len(skipped) / (len(skipped) + started))
    assert counts["generated_per_trained"]["rollouts"] == 1.0


def test_a_resumed_run_skips_what_it_would_have_skipped(tmp_path: Path) -> None:
    """In rounds nothing is on its way at a checkpoint: the two halves are the whole, to the last decision."""
    common = filtered(tmp_path, schedule__kind="conventional")
    run(tmp_path / "straight", trainer__steps=8, **common)
    run(tmp_path / "halves", trainer__steps=4, **common)
    resume(tmp_path / "halves", trainer__steps=8)
    assert_gone_on(tmp_path / "halves", 8)
    straight, halves = assert_filtered(tmp_path / "straight"), assert_filtered(tmp_path / "halves")
    assert any(group.skipped for group in straight)
    assert [(group.index, group.skipped) for group in straight] == [(group.index, group.skipped) for group in halves]
    assert trained(tmp_path / "straight") == trained(tmp_path / "halves")
