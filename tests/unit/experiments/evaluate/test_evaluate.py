"""Evaluations without a model: who is asked what, what is counted and written, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipelinerl.actor.client import EngineClient
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.cli import eval as command
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import ModelConfig
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.errors import PipelineRLError, RunDirectoryError, UserError
from pipelinerl.experiments.evaluate import evaluate as module
from pipelinerl.experiments.evaluate.evaluate import (
    AttemptRecord,
    EvaluationPlan,
    EvaluationSummary,
    ModelResult,
    Status,
    Tally,
    answer,
    evaluation_sections,
)
from pipelinerl.experiments.evaluate.models import Target, find_targets, run_config_of
from pipelinerl.experiments.statistics import Interval, pass_at_k
from pipelinerl.report import in_terminal
from pipelinerl.types import GenerationRequest, Problem
from tests.unit.experiments.parts import invoke
from tests.unit.record_parts import evaluation, write_records
from tests.unit.scripted_engine import STOP, CharTokenizer, ScriptedEngine

TARGET = Target("m", ModelConfig(path="somewhere"))
PLAN = EvaluationPlan(
    targets=[TARGET],
    config=load_config(None, ["--environment.kind", "letters", "--actor.max_tokens", "8"]),
    out=Path("out"),
    problems=3,
    training=False,
    attempts=4,
    pass_at=1.0,
    seed=0,
)


class Letters(SingleTurn):
    """Problem n asks for as many letters as n says; half a point for any other answer, an error for a `!`."""

    def problem(self, index: int) -> Problem:
        return Problem(id=f"letters/{index % 5}", payload={"n": index % 5})

    def held_out(self, count: int) -> list[Problem]:
        return [Problem(id=f"held-out/{n}", payload={"n": n}) for n in range(1, 4)][:count]

    def prompt(self, problem: Problem) -> str:
        return str(problem.payload["n"])

    def reward(self, problem: Problem, text: str) -> float:
        if "!" in text:
            raise ValueError("an exclamation")
        return 1.0 if len(text) == problem.payload["n"] else 0.5


def script(request: GenerationRequest) -> list[int]:
    """One to four letters, by the seed; a prompt of `3` is shouted at half of the time."""
    assert request.sampling.seed is not None
    choice = request.sampling.seed % 8
    if request.prompt_ids == (ord("3"),) and choice >= 4:
        return [ord("!"), STOP]
    return [ord("x")] * (choice % 4 + 1) + [STOP]


def play(engine: ScriptedEngine, *, seed: int = 0, slots: int = 4) -> list[AttemptRecord]:
    environment = Letters(CharTokenizer(), 0)
    client, tokenizer = EngineClient(engine), CharTokenizer()
    context = RolloutContext(
        PLAN.config.actor, environment, client, tokenizer, seed=seed, slots=slots, stop_token_ids=(STOP,)
    )
    records: list[AttemptRecord] = []
    assert asyncio.run(answer(context, environment.held_out(3), PLAN, stop=lambda: False, on_attempt=records.append))
    return records


def tally_of(records: list[AttemptRecord]) -> Tally:
    tally = Tally(PLAN)
    for record in records:
        tally.add(record)
    return tally


def test_every_attempt_has_a_seed_of_its_own_and_answers_do_not_depend_on_the_slots() -> None:
    def answers(records: list[AttemptRecord]) -> dict[tuple[int, int], str]:
        return {(record.number, record.attempt): record.completion for record in records}

    engine = ScriptedEngine(script)
    records = play(engine)
    assert sorted((record.number, record.attempt) for record in records) == [(n, k) for n in range(3) for k in range(4)]
    assert len({request.sampling.seed for request in engine.requests}) == 12
    assert max(engine.batch_sizes) == 4
    prompts = [request.prompt_ids for request in engine.requests]
    assert prompts == sorted(prompts)  # the attempts at a problem follow one another
    for slots in (1, 3):
        assert answers(play(ScriptedEngine(script), slots=slots)) == answers(records)
    assert answers(play(ScriptedEngine(script), seed=1)) != answers(records)


def test_the_numbers_of_a_model() -> None:
    records = play(ScriptedEngine(script))
    result = tally_of(records).result(TARGET, 7, None)
    assert result.estimates is not None
    passes = [sum(record.passed for record in records if record.number == n) for n in range(3)]
    assert 0 < sum(passes) < 12  # else this shows little
    assert {k: interval.mean for k, interval in result.estimates.passes.items()} == pytest.approx(
        {k: sum(pass_at_k(4, c, k) for c in passes) / 3 for k in (1, 2, 4)}
    )
    lengths = [record.length for record in records if record.failure is None]
    assert 0 < len(lengths) < 12
    assert result.failed == {"raised": 12 - len(lengths)}
    assert result.length_mean == pytest.approx(sum(lengths) / len(lengths))
    assert (result.problems, result.attempts, result.cut, result.version) == (3, 12, 0.0, 7)


def evaluation_table(*models: ModelResult, status: Status = "finished") -> str:
    summary = EvaluationSummary(status=status, settings={}, models=models)
    return "".join(map(in_terminal, evaluation_sections(PLAN, summary)))


def made(number: int, attempt: int, reward: float, finish: str = "stop") -> AttemptRecord:
    record = AttemptRecord(number=number, attempt=attempt, problem_id="x", reward=reward, passed=reward >= 1, length=2)
    return msgspec.structs.replace(record, finish_reason=finish)


def test_what_the_environment_measures_is_averaged_over_the_attempts_that_have_it() -> None:
    found = [{"boxed": 1.0}, {"boxed": 0.0, "rare": 7.0}, {}]
    records = [msgspec.structs.replace(made(0, k, 1.0), metrics=metrics) for k, metrics in enumerate(found)]
    failed = msgspec.structs.replace(made(1, 0, 0.0), failure="raised: x")
    result = tally_of([*records, failed]).result(TARGET, None, None)
    assert result.metrics == {"boxed": 0.5, "rare": 7.0}
    other = tally_of(records[:1]).result(TARGET._replace(name="other"), None, None)
    table = evaluation_table(result, other)
    (rare,) = [line.split() for line in table.splitlines() if "rare" in line]
    assert [cell for cell in rare if cell != "│"] == ["rare", "7", "-"]


def test_a_problem_with_attempts_missing_is_left_out_of_the_estimates() -> None:
    tally = tally_of([made(0, k, 1.0) for k in range(4)] + [made(1, k, 0.0, "length") for k in range(3)])
    result = tally.result(TARGET, None, None)
    assert (result.problems, result.attempts, result.cut) == (1, 7, 3 / 7)
    assert result.estimates is not None
    assert result.estimates.reward == Interval(1.0, 1.0, 1.0)


def test_differences_are_paired() -> None:
    """Problems that differ a lot, and a second model that is a little better at each: only pairing can tell."""
    one = tally_of([made(n, k, [0.0, 0.5, 0.9][n]) for n in range(3) for k in range(4)])
    other = tally_of([made(n, k, [0.1, 0.6, 1.0][n]) for n in range(3) for k in range(4)])
    first = one.result(TARGET, None, None)
    second = other.result(TARGET, None, one)
    assert first.minus_first is None
    assert first.estimates is not None
    assert second.minus_first is not None
    assert first.estimates.reward.high > 0.85
    difference = second.minus_first.reward
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.1, 0.1, 0.1))
    assert second.minus_first.passes[1].mean == pytest.approx(1 / 3)


def test_training_problems_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_tokenizer", lambda _: CharTokenizer())
    monkeypatch.setattr(module, "make_environment", lambda *_: Letters(CharTokenizer(), 0))
    found = module._load(TARGET, replace(PLAN, training=True, problems=12)).problems
    assert [problem.id for problem in found] == [f"letters/{n}" for n in range(5)]


def run_dir_with(path: Path, *versions: int) -> Path:
    for version in versions:
        folder = path / "checkpoints" / f"step_{version:08d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text("seed: 3\nmodel: {dtype: bfloat16}\n")
    return path


def test_what_a_run_directory_stands_for(tmp_path: Path) -> None:
    run = run_dir_with(tmp_path / "r", 5, 10, 200)

    def found(text: str) -> list[tuple[str, int | None]]:
        return [(target.name, target.version) for target in find_targets([text])]

    assert found(f"{run}") == found(f"{run}@200") == [("r@200", 200)]
    assert found(f"{run}@all") == [("r@5", 5), ("r@10", 10), ("r@200", 200)]
    assert found(f"{run}@0") == [("r@0", 0)]
    with pytest.raises(RunDirectoryError, match="no evaluation"):
        found(f"{run}@best")
    write_records(run, *(evaluation("online", version, reward_mean=reward) for version, reward in ((9, 0.7), (190, 0.6))))
    assert found(f"{run}@best") == [("r@10", 10)]
    (last,) = find_targets([str(run)])
    assert last.model == ModelConfig(path=str(run / "checkpoints" / "step_00000200"), dtype="bfloat16")
    assert last.checkpoint
    assert find_targets([f"{run}@0"])[0].model.path == "demo"
    config = run_config_of(f"{run}@all")
    assert config is not None
    assert config.seed == 3
    assert run_config_of("demo") is run_config_of("owner/name") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}/r@7", "give .*/r@all, .*/r@best, or one of the versions that it has: 0, 5"),
        ("{}/r@", "give .*/r@all, .*/r@best, or one of the versions"),
        ("{}/empty", "empty has no checkpoints; .*/empty@0 is the model"),
        ("{}@all", "is not a run directory"),
        ("{}", "has no config.json"),
        ("{}/absent", "does not exist"),
        ("{}/absent@all", "does not exist"),
        ("{}/r/config.yaml", "is a file"),
    ],
)
def test_what_is_no_model(tmp_path: Path, text: str, words: str) -> None:
    run_dir_with(tmp_path / "r", 5)
    run_dir_with(tmp_path / "empty")
    with pytest.raises(UserError, match=words):
        find_targets(["demo", text.format(tmp_path)])


def test_the_table_tells_an_interruption_and_differences_to_the_first_model() -> None:
    tally = tally_of(play(ScriptedEngine(script)))
    models = (tally.result(TARGET, None, None), tally.result(TARGET._replace(name="other[/b]"), 5, tally))
    text = evaluation_table(*models, status="interrupted")
    for shown in ("problems", "pass@4", "mean@4 - first", "tokens", "cut", "failed", "95% intervals", "INTERRUPTED", "[/b]"):
        assert shown in text
    alone = evaluation_table(models[0])
    assert "first" not in alone
    assert "INTERRUPTED" not in alone


GCD = ("--environment.kind", "gcd")
URL = ("--engine.kind", "http", "--engine.urls", "[http://127.0.0.1:1]")


def run_command(*arguments: str) -> int:
    return invoke(command.add_to, "eval", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo"], "give the environment to evaluate on, --environment.kind KIND"),
        (["demo", "--environment.kind", "gdc"], "Did you mean 'gcd'"),
        (["demo", *GCD, "--attempts", "0"], "argument --attempts: 0: give a whole number of at least 1"),
        (["demo", *GCD, "--evaluation.temperature", "-1"], "--evaluation.temperature: -1"),
        (["demo", *GCD, "--pass-at", "nan"], "--pass-at nan"),
        (["demo", *GCD, *URL, "--engine.api_key_env", "NOT_SET_ANYWHERE"], "this environment variable is not set"),
        (["demo", *GCD, *URL[2:]], "--engine.urls: the `local` engine has no servers"),
        (["demo", *GCD, *URL[:2]], "--engine.urls: give the addresses"),
        (["demo", *GCD, "--trainer.steps", "3"], "--trainer.steps: not used by this command"),
        (["demo", "demo", *GCD, *URL], "give one MODEL, not 2"),
        (["./absent", *GCD], "does not exist"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_tokenizer", lambda config: pytest.fail("it loads"))
    with pytest.raises(PipelineRLError) as caught:
        run_command(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
