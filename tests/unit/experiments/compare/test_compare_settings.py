"""Which schedules and settings are compared: parsing, fair budgets, and the search for the fastest settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import EngineConfig, RunConfig, ScheduleConfig, TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.compare import start_settings, trial_length
from pipelinerl.experiments.compare.settings import (
    FULL,
    QUICK,
    ComparisonRequest,
    Contender,
    Settings,
    TuningTrial,
    axes,
    decide,
    engine_layouts,
    finalists,
    make_request,
    parse_contenders,
    run_config,
    search,
    settings_of,
    whole_rounds,
)
from pipelinerl.resources.hardware import Machine

MACHINE = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={})
START = Settings(processes=1, engine_threads=1, slots=8, trainer_threads=1)


def request(config: RunConfig | None = None, **changed: object) -> ComparisonRequest:
    arguments = {"schedules": None, "seeds": None, "quick": False, "tune": True} | changed
    return make_request(config or load_config(None), MACHINE, **arguments)  # type: ignore[arg-type]


def test_schedules_are_parsed() -> None:
    found = parse_contenders("pipeline, conventional:4,async:2")
    assert found == (Contender("pipeline"), Contender("conventional", 4), Contender("async", 2))
    assert [one.label for one in found] == ["pipeline", "conventional:4", "async:2"]


@pytest.mark.parametrize(
    "text", ["", "conventional", "pipeline:2", "async:0", "conventional:-1", "conventional:²", "x:1", "a,,b"]
)
def test_a_schedule_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--schedules: '.*' is not a schedule; write pipeline"):
        parse_contenders(text)


def test_a_schedule_named_twice() -> None:
    with pytest.raises(ConfigError, match="async:2 is listed twice"):
        parse_contenders("async:2,pipeline,async:02")


def test_budgets_are_whole_rounds_for_everyone() -> None:
    contenders = parse_contenders("pipeline,conventional:4,conventional:6")
    assert whole_rounds(140, contenders) == 132
    assert whole_rounds(12, contenders) == 12
    with pytest.raises(ConfigError, match="set it to a multiple of 12"):
        whole_rounds(11, contenders)


def test_defaults_depend_on_the_effort() -> None:
    full, quick = request(), request(quick=True)
    assert (full.seeds, quick.seeds) == (FULL.seeds, QUICK.seeds)
    assert full.steps <= 140
    assert full.steps % 8 == 0
    assert quick.steps == 48
    assert request(quick=True, seeds=3, schedules="pipeline").seed_numbers == [0, 1, 2]
    assert len(full.schedules) >= 3
    assert request(load_config(None, ["--seed", "7"]), seeds=2).seed_numbers == [7, 8]


def test_what_cant_be_compared() -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        request(seeds=0)
    with pytest.raises(ConfigError, match=r"launch\.kind"):
        request(load_config(None, ["--launch.kind", "embedded"]))


def test_a_run_has_its_schedule_and_settings_and_nothing_that_takes_time() -> None:
    base = load_config(None, ["--schedule.max_lag", "4", "--trainer.checkpoint_every", "5"])
    settings = Settings(processes=2, engine_threads=1, slots=32, trainer_threads=2)
    config = run_config(base, Contender("conventional", 4), settings, seed=3, steps=8, run_dir=Path("x"))
    assert config.schedule == ScheduleConfig(kind="conventional", steps_per_round=4, max_lag=None)
    assert (config.engine.processes, config.engine.threads, config.engine.slots) == (2, 1, 32)
    assert (config.trainer.threads, config.trainer.steps, config.trainer.checkpoint_every) == (2, 8, 0)
    assert (config.seed, config.run_dir, config.evaluation.problems) == (3, "x", 0)
    assert config.trainer.learning_rate == base.trainer.learning_rate
    ranks = run_config(
        base, Contender("conventional", 4), settings._replace(trainer_ranks=2), seed=3, steps=8, run_dir=Path("x")
    )
    assert ranks.trainer.ranks == 2
    assert settings._replace(trainer_ranks=2).folder != settings.folder
    assert run_config(base, Contender("pipeline"), settings, seed=0, steps=8, run_dir=Path("x")).schedule.max_lag == 4


def test_what_is_evaluated_is_the_same_for_all_schedules() -> None:
    asked = request(load_config(None, ["--trainer.steps", "50"]))
    assert (asked.steps, asked.held_out, asked.evaluate_every) == (48, 512, 3)
    assert asked.evaluated_versions == list(range(0, 49, 3))
    asked = request(schedules="pipeline", quick=True, evaluate_every=20)
    assert (asked.held_out, asked.evaluated_versions) == (256, [0, 20, 40, 48])
    assert request(held_out=0).evaluated_versions == []
    with pytest.raises(ConfigError, match="--held-out"):
        request(held_out=-1)
    with pytest.raises(ConfigError, match="--evaluate-every"):
        request(evaluate_every=0)


def test_what_a_run_file_leaves_open_is_decided_for_each_schedule() -> None:
    config = RunConfig(engine=EngineConfig(slots=8))
    assert settings_of(config, cores=4) == Settings(1, 2, 8, 2)
    assert start_settings(request(config, schedules="conventional:1"), Contender("conventional")) == Settings(1, 2, 8, 2)
    assert start_settings(request(config, schedules="pipeline"), Contender("pipeline")) == Settings(1, 1, 8, 1)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 16])
def test_layouts_use_at_most_all_cores(cores: int) -> None:
    layouts = engine_layouts(cores)
    assert len(set(layouts)) == len(layouts)
    assert {(1, 1), (1, cores), (cores, 1)} <= set(layouts)
    assert all(1 <= processes * threads <= cores for processes, threads in layouts)


def test_what_is_tried_on_two_cores() -> None:
    config = RunConfig(engine=EngineConfig(slots=8), trainer=TrainerConfig(batch_size=16))
    layout, slots, trainer = axes(config, cores=2, most_in_progress=None, slot_factors=(1, 2, 4))
    assert set(layout(START)) == {START, START._replace(engine_threads=2), START._replace(processes=2, slots=4)}
    assert [one.slots for one in slots(START)] == [8, 16, 32]
    assert [one.trainer_threads for one in trainer(START)] == [1, 2]
    in_turn = axes(config, cores=2, most_in_progress=None, slot_factors=(1,), in_turn=True)[2]
    assert [(one.trainer_ranks, one.trainer_threads) for one in in_turn(START)] == [(1, 1), (1, 2), (2, 1)]
    assert [one.trainer_threads for one in trainer(START._replace(trainer_ranks=2))] == [1]
    bounded = axes(config, cores=2, most_in_progress=16, slot_factors=(1, 2, 4))[1]
    assert [one.slots for one in bounded(START)] == [8, 16]
    assert [one.slots for one in bounded(START._replace(processes=2))] == [8]
    gpu = config.model_copy(update={"engine": EngineConfig(device="cuda:0"), "trainer": TrainerConfig(device="cuda:0")})
    assert len(axes(gpu, cores=2, most_in_progress=None, slot_factors=(1, 2))) == 1


def test_the_search_follows_what_is_faster_and_measures_nothing_twice() -> None:
    asked: list[Settings] = []

    def rate(settings: Settings) -> float:
        asked.append(settings)
        return 100 * settings.processes + settings.slots + 0.5 * settings.trainer_threads

    ways = axes(RunConfig(), cores=2, most_in_progress=None, slot_factors=(1, 2, 4))
    best, trials = search(START, ways, rate)
    # Two processes halve the slots of each and pay; 4 times the slots pay; a trainer's thread is within the margin.
    assert best == Settings(processes=2, engine_threads=1, slots=16, trainer_threads=1)
    assert len(asked) == len(set(asked)) == len(trials)
    assert trials[0].settings == START
    assert [trial.tokens_per_s for trial in trials if trial.settings == best] == [216.5]


def test_equal_rates_change_nothing_and_failures_lose() -> None:
    ways = axes(RunConfig(), cores=2, most_in_progress=None, slot_factors=(1, 2))
    assert search(START, ways, lambda settings: 100.0 + (settings != START))[0] == START
    assert search(START, ways, lambda settings: None if settings.slots == 16 else 1.0)[0] == START
    assert search(START, ways, lambda settings: None if settings == START else 1.0)[0] != START


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 8, 16, 40])
@pytest.mark.parametrize("steps", [1, 2, 12, 24])
def test_trials_are_whole_rounds_with_something_after_the_fill(rounds: int, steps: int) -> None:
    length, fill = trial_length(steps, Contender("conventional", rounds))
    assert length % rounds == fill % rounds == 0
    assert 0 < fill < length
    assert fill >= steps / 3
    assert length >= steps


def test_the_final_is_between_one_engine_process_and_several_with_as_many_slots() -> None:
    one, wide = START, START._replace(slots=16)
    two = START._replace(processes=2, slots=4)
    tried = [
        TuningTrial(one, 3.0),
        TuningTrial(one._replace(engine_threads=2), 1.0),
        TuningTrial(two, 2.0),
        TuningTrial(wide, 4.0),
    ]
    assert finalists(wide, tried) == [wide, START._replace(processes=2, slots=8)]
    assert finalists(wide, tried[:2]) == [wide]
    assert finalists(two._replace(slots=8), tried) == [two._replace(slots=8), wide]


def test_the_final_goes_to_the_clearly_faster() -> None:
    one, two = START, START._replace(processes=2, slots=4)
    assert decide([TuningTrial(one, 100.0, full=True), TuningTrial(two, 101.0, full=True)]) == one
    assert decide([TuningTrial(one, 100.0, full=True), TuningTrial(two, 103.0, full=True)]) == two
    assert decide([TuningTrial(one, None, full=True), TuningTrial(two, 1.0, full=True)]) == two
    assert decide([TuningTrial(one, 1.0, full=True), TuningTrial(two, None, full=True)]) == one
