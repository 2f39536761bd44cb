"""Which schedules and settings are compared: parsing, fair budgets, and the search for the fastest settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import EngineConfig, RunConfig, ScheduleConfig, TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.settings import (
    ComparisonRequest,
    Contender,
    Settings,
    axes,
    make_request,
    parse_contenders,
    tune,
)
from pipelinerl.resources.machine import Machine

START = Settings(processes=1, engine_threads=1, slots=8, trainer_threads=1)
TWO = Settings(processes=2, engine_threads=1, slots=4, trainer_threads=1)
PIPELINE = Contender("pipeline")


def request(config: RunConfig | None = None, *, cores: int = 2, **changed: object) -> ComparisonRequest:
    machine = Machine(cpu="a processor", cores=cores, memory_gib=4.0, system="Linux", versions={})
    return make_request(config or load_config(None), machine, **changed)  # type: ignore[arg-type]


def test_schedules_are_parsed() -> None:
    found = parse_contenders("pipeline, conventional:4,async:2")
    assert found == (PIPELINE, Contender("conventional", 4), Contender("async", 2))
    assert [one.label for one in found] == ["pipeline", "conventional:4", "async:2"]
    for wrong in ("", "conventional", "pipeline:2", "async:0", "async:²", "async:2,pipeline,async:2"):
        with pytest.raises(ConfigError, match=r"--schedules"):
            parse_contenders(wrong)


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
    base = load_config(None, ["--schedule.max_lag", "4", "--trainer.checkpoint_every", "5"])
    settings = Settings(processes=2, engine_threads=1, slots=32, trainer_threads=2, trainer_ranks=2)
    config = request(base).run_config(Contender("conventional", 4), settings, steps=8)
    assert config.schedule == ScheduleConfig(kind="conventional", steps_per_round=4, max_lag=None)
    assert (config.engine.processes, config.engine.threads, config.engine.slots) == (2, 1, 32)
    trainer = config.trainer
    assert (trainer.threads, trainer.ranks, trainer.steps, trainer.checkpoint_every) == (2, 2, 8, 0)
    assert config.evaluation.problems == 0
    assert trainer.learning_rate == base.trainer.learning_rate
    assert request(base).run_config(PIPELINE, settings, steps=8).schedule.max_lag == 4


def test_what_a_run_file_leaves_open_is_decided_for_each_schedule() -> None:
    asked = request(RunConfig(engine=EngineConfig(slots=8)), cores=4)
    assert asked.start_settings(Contender("conventional")) == Settings(1, 4, 8, 4)
    assert asked.start_settings(PIPELINE) == Settings(1, 2, 8, 2)


@pytest.mark.parametrize("cores", [1, 2, 3, 6])
def test_layouts_use_at_most_all_cores(cores: int) -> None:
    layouts = [(one.processes, one.engine_threads) for one in axes(request(cores=cores), PIPELINE)[0](START)]
    assert len(set(layouts)) == len(layouts)
    assert {(1, 1), (1, cores), (cores, 1)} <= set(layouts)
    assert all(1 <= processes * threads <= cores for processes, threads in layouts)


def test_what_is_tried_on_two_cores() -> None:
    asked = request(RunConfig(engine=EngineConfig(slots=8), trainer=TrainerConfig(batch_size=16)))
    layout, slots, trainer = axes(asked, Contender("async", 1))
    assert set(layout(START)) == {START, replace(START, engine_threads=2), TWO}
    assert [one.slots for one in slots(START)] == [16]
    assert [one.slots for one in slots(replace(START, slots=16))] == []
    assert [one.trainer_threads for one in trainer(START)] == [1, 2]
    in_turn = axes(asked, Contender("conventional", 1))[2]
    assert [(one.trainer_ranks, one.trainer_threads) for one in in_turn(START)] == [(1, 1), (1, 2), (2, 1)]
    assert {one.trainer_threads for one in trainer(replace(START, trainer_ranks=2))} == {1}
    gpu = asked.config.model_copy(
        update={"engine": EngineConfig(device="cuda:0"), "trainer": TrainerConfig(device="cuda:0")}
    )
    assert len(axes(replace(asked, config=gpu), PIPELINE)) == 1


WAYS = axes(request(RunConfig()), PIPELINE)


def test_the_search_follows_what_is_faster_and_measures_nothing_twice() -> None:
    asked: list[Settings] = []

    def rate(settings: Settings, full: bool) -> float:
        assert not full
        asked.append(settings)
        return 100 * settings.processes + 2 * settings.slots + 0.5 * settings.trainer_threads

    found = tune(START, WAYS, rate, finals=False)
    # Two processes halve the slots of each and pay; twice the slots pay; a trainer's thread is within the margin.
    assert found.used == replace(TWO, slots=8)
    assert len(asked) == len(set(asked)) == len(found.trials)
    assert found.trials[0].settings == START
    assert [trial.tokens_per_s for trial in found.trials if trial.settings == found.used] == [216.5]


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        (lambda settings: 100.0 + (settings != START), START),  # within the margin
        (lambda settings: None if settings.slots == 16 else 1.0, START),
        (lambda settings: None if settings == START else 1.0, replace(START, slots=8, engine_threads=2)),
    ],
)
def test_equal_rates_change_nothing_and_failures_lose(rates: Callable[[Settings], float | None], best: Settings) -> None:
    assert tune(START, WAYS, lambda settings, full: rates(settings), finals=False).used == best


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

    found = tune(START, WAYS, rate, finals=True)
    assert finals == [replace(START, slots=16), replace(TWO, slots=8)]
    assert found.used.processes == best


@pytest.mark.parametrize("rounds", [1, 3, 5, 8, 40])
@pytest.mark.parametrize("quick", [False, True])
def test_trials_are_whole_rounds_with_something_after_the_fill(rounds: int, quick: bool) -> None:
    length, fill = request(quick=quick).trial_length(Contender("conventional", rounds))
    least = 8 if quick else 16
    assert length % rounds == fill % rounds == 0
    assert 0 < fill < length
    assert fill >= least / 3
    assert length >= least
