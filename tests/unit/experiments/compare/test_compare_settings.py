"""Which schedules and settings are compared: parsing, fair budgets, and the search for the fastest settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import EngineConfig, RunConfig, ScheduleConfig, TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.request import (
    ComparisonRequest,
    Contender,
    make_request,
    parse_contenders,
    trial_length,
    whole_rounds,
)
from pipelinerl.experiments.compare.tuning import Settings, axes, tune
from pipelinerl.resources.machine import Machine

MACHINE = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={})
START = Settings(processes=1, engine_threads=1, slots=8, trainer_threads=1)
TWO = Settings(processes=2, engine_threads=1, slots=4, trainer_threads=1)


def request(config: RunConfig | None = None, **changed: object) -> ComparisonRequest:
    return make_request(config or load_config(None), MACHINE, **changed)  # type: ignore[arg-type]


def test_schedules_are_parsed() -> None:
    found = parse_contenders("pipeline, conventional:4,async:2")
    assert found == (Contender("pipeline"), Contender("conventional", 4), Contender("async", 2))
    assert [one.label for one in found] == ["pipeline", "conventional:4", "async:2"]


@pytest.mark.parametrize("text", ["", "conventional", "pipeline:2", "async:0", "async:²", "async:2,pipeline,async:02"])
def test_schedules_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--schedules: ('.*' is not a schedule; write pipeline|async:2 is listed twice)"):
        parse_contenders(text)


def test_budgets_are_whole_rounds_for_everyone() -> None:
    contenders = parse_contenders("pipeline,conventional:4,conventional:6")
    assert whole_rounds(140, contenders) == 132
    assert whole_rounds(12, contenders) == 12
    with pytest.raises(ConfigError, match="set it to a multiple of 12"):
        whole_rounds(11, contenders)


def test_defaults_depend_on_the_effort() -> None:
    full, quick = request(), request(quick=True)
    assert (full.seeds, full.held_out, full.finals) == (2, 512, True)
    assert (quick.seeds, quick.held_out, quick.finals, quick.steps) == (1, 256, False, 48)
    assert full.steps <= 140
    assert full.steps % 8 == 0
    assert request(load_config(None, ["--seed", "7"]), quick=True, seeds=2).seed_numbers == [7, 8]
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
    assert replace(settings, trainer_ranks=1).folder != settings.folder
    assert request(base).run_config(Contender("pipeline"), settings, steps=8).schedule.max_lag == 4


def test_what_is_evaluated_is_the_same_for_all_schedules() -> None:
    asked = request(load_config(None, ["--trainer.steps", "50"]))
    assert (asked.steps, asked.evaluate_every) == (48, 3)
    assert asked.evaluated_versions == list(range(0, 49, 3))
    assert request(schedules="pipeline", quick=True, evaluate_every=20).evaluated_versions == [0, 20, 40, 48]
    assert request(held_out=0).evaluated_versions == []


def test_what_a_run_file_leaves_open_is_decided_for_each_schedule() -> None:
    config = RunConfig(engine=EngineConfig(slots=8))
    assert Settings.of(config, cores=4) == Settings(1, 2, 8, 2)
    asked = request(config, schedules="pipeline,conventional:1")
    assert asked.start_settings(Contender("conventional")) == Settings(1, 2, 8, 2)
    assert asked.start_settings(Contender("pipeline")) == Settings(1, 1, 8, 1)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 16])
def test_layouts_use_at_most_all_cores(cores: int) -> None:
    layouts = [
        (one.processes, one.engine_threads)
        for one in axes(RunConfig(), cores, most_in_progress=None, in_turn=False)[0](START)
    ]
    assert len(set(layouts)) == len(layouts)
    assert {(1, 1), (1, cores), (cores, 1)} <= set(layouts)
    assert all(1 <= processes * threads <= cores for processes, threads in layouts)


def test_what_is_tried_on_two_cores() -> None:
    config = RunConfig(engine=EngineConfig(slots=8), trainer=TrainerConfig(batch_size=16))
    layout, slots, trainer = axes(config, 2, most_in_progress=16, in_turn=False)
    assert set(layout(START)) == {START, replace(START, engine_threads=2), TWO}
    assert [one.slots for one in slots(START)] == [16]
    assert [one.slots for one in slots(replace(START, slots=16))] == []
    assert [one.trainer_threads for one in trainer(START)] == [1, 2]
    in_turn = axes(config, 2, most_in_progress=None, in_turn=True)[2]
    assert [(one.trainer_ranks, one.trainer_threads) for one in in_turn(START)] == [(1, 1), (1, 2), (2, 1)]
    assert {one.trainer_threads for one in trainer(replace(START, trainer_ranks=2))} == {1}
    gpu = config.model_copy(update={"engine": EngineConfig(device="cuda:0"), "trainer": TrainerConfig(device="cuda:0")})
    assert len(axes(gpu, 2, most_in_progress=None, in_turn=False)) == 1


WAYS = axes(RunConfig(), 2, most_in_progress=None, in_turn=False)


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


@pytest.mark.parametrize(
    ("one", "two", "best"),
    [(100.0, 101.0, 1), (100.0, 103.0, 2), (None, 1.0, 2), (1.0, None, 1)],
)
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


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 8, 16, 40])
@pytest.mark.parametrize("steps", [1, 2, 12, 24])
def test_trials_are_whole_rounds_with_something_after_the_fill(rounds: int, steps: int) -> None:
    length, fill = trial_length(steps, Contender("conventional", rounds))
    assert length % rounds == fill % rounds == 0
    assert 0 < fill < length
    assert fill >= steps / 3
    assert length >= steps
