"""Which schedules and settings are compared: parsing, fair budgets, and the search for the fastest settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig, ScheduleConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.compare import (
    ComparisonRequest,
    TuningTrial,
    make_request,
    parse_schedules,
    trial_length,
    tune,
)
from pipelinerl.experiments.compare.results import Settings
from pipelinerl.resources.machine import Machine

START, TWO = Settings(processes=1, slots=8), Settings(processes=2, slots=4)


def request(config: RunConfig | None = None, **changed: object) -> ComparisonRequest:
    machine = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={})
    return make_request(config or load_config(None), machine, **changed)  # type: ignore[arg-type]


def conventional(rounds: int) -> ScheduleConfig:
    return ScheduleConfig(kind="conventional", steps_per_round=rounds)


def test_schedules_are_parsed() -> None:
    bounded = ScheduleConfig(max_lag=4)
    found = parse_schedules("pipeline, conventional:4,async:2", bounded)
    assert found == (bounded, conventional(4), ScheduleConfig(kind="async", steps_per_round=2))
    for wrong in ("", "conventional", "pipeline:2", "async:0", "async:²", "async:2,pipeline,async:2"):
        with pytest.raises(ConfigError, match=r"--schedules"):
            parse_schedules(wrong, bounded)


def test_budgets_are_whole_rounds_for_everyone_and_the_same_versions_are_evaluated() -> None:
    def steps(given: int, schedules: str, **options: object) -> ComparisonRequest:
        return request(load_config(None, ["--trainer.steps", str(given)]), schedules=schedules, **options)

    assert steps(140, "pipeline,conventional:4,conventional:6").steps == 132
    assert steps(12, "conventional:4,conventional:6").steps == 12
    with pytest.raises(ConfigError, match="set it to a multiple of 12"):
        steps(11, "conventional:4,conventional:6")
    asked = steps(50, "pipeline,conventional:8")
    assert asked.evaluated_versions == list(range(0, 49, 3))
    assert steps(140, "pipeline", quick=True, evaluate_every=20).evaluated_versions == [0, 20, 40, 48]
    assert request(held_out=0).evaluated_versions == []
    with pytest.raises(ConfigError, match=r"launch\.kind"):
        request(load_config(None, ["--launch.kind", "embedded"]))


def test_a_run_has_its_schedule_and_settings_and_nothing_that_takes_time() -> None:
    base = load_config(None, ["--trainer.checkpoint_every", "5"])
    config = request(base).run_config(conventional(4), Settings(processes=2, slots=32, ranks=3), steps=8)
    assert config.schedule == conventional(4)
    assert (config.engine.processes, config.engine.slots, config.trainer.ranks) == (2, 32, 3)
    assert (config.trainer.steps, config.trainer.checkpoint_every, config.evaluation.problems) == (8, 0, 0)
    assert config.trainer.learning_rate == base.trainer.learning_rate


Rate = Callable[[Settings, bool], float | None]


def tuned(rate: Rate, *, most_slots: float = math.inf, finals: bool = False) -> tuple[Settings, list[TuningTrial]]:
    return tune(START, rate, processes=(1, 2), most_slots=most_slots, finals=finals)


def test_the_search_follows_what_is_faster_and_measures_nothing_twice() -> None:
    asked: list[Settings] = []

    def rate(settings: Settings, full: bool) -> float:
        assert not full
        asked.append(settings)
        return 100 * settings.processes + 2 * settings.slots

    used, trials = tuned(rate)
    # Two processes halve the slots of each and pay; twice the slots pay.
    assert used == Settings(2, 8)
    assert asked == [START, TWO, Settings(2, 8)]
    assert [trial.tokens_per_s for trial in trials] == [116, 208, 216]
    assert tuned(rate, most_slots=15)[0] == TWO, "more slots than rollouts of a round would stay empty"


def test_a_trainer_that_has_the_cores_for_itself_may_get_a_rank_on_each() -> None:
    used, _ = tune(START, lambda one, _: 1.0 * one.ranks, processes=(1,), most_slots=8, ranks=(2,), finals=False)
    assert used == Settings(1, 8, 2)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        (lambda settings: 100.0 + (settings != START), START),  # within the margin
        (lambda settings: None if settings.slots == 16 else 1.0, START),
        (lambda settings: None if settings == START else 1.0, TWO),
    ],
)
def test_equal_rates_change_nothing_and_failures_lose(rates: Callable[[Settings], float | None], best: Settings) -> None:
    assert tuned(lambda settings, full: rates(settings))[0] == best


@pytest.mark.parametrize(("one", "two", "best"), [(100.0, 101.0, 1), (100.0, 103.0, 2), (None, 1.0, 2), (1.0, None, 1)])
def test_runs_of_full_length_decide_between_one_engine_process_and_several(
    one: float | None, two: float | None, best: int
) -> None:
    """With as many slots in all, and in favour of the faster in short runs unless the other is clearly faster."""
    finals: list[Settings] = []

    def rate(settings: Settings, full: bool) -> float | None:
        if full:
            finals.append(settings)
            return one if settings.processes == 1 else two
        return 10.0 * settings.slots / settings.processes

    assert tuned(rate, finals=True)[0].processes == best
    assert finals == [Settings(1, 16), Settings(2, 8)]


@pytest.mark.parametrize("rounds", [1, 3, 5, 8, 40])
@pytest.mark.parametrize("quick", [False, True])
def test_trials_are_whole_rounds_with_something_after_the_fill(rounds: int, quick: bool) -> None:
    length, fill = trial_length(conventional(rounds), quick=quick)
    least = 8 if quick else 16
    assert length % rounds == fill % rounds == 0
    assert 0 < fill < length
    assert fill >= least / 3
    assert length >= least
