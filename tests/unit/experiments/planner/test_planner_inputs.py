"""What a plan is made from, and what is written and printed: files, flags, calibrations, errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pipelinerl.cli import main
from pipelinerl.cli import plan as plan_command
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.analytic import (
    LengthDistribution,
    conventional,
    parse_lengths,
    pipeline,
)
from pipelinerl.experiments.planner.calibration import read_calibration, write_calibration
from pipelinerl.experiments.planner.plan import Flags, ask, make_plan, plan_json, tabulated
from pipelinerl.experiments.planner.table import calibration_text, plan_text
from tests.unit.experiments.parts import CALIBRATION, group, histogram_of, invoke, turn, write_rollouts

# ------------------------------------------------------------------------------------------------ lengths


def test_lengths_of_a_run_are_sampled_tokens_of_all_turns(tmp_path: Path) -> None:
    groups = [group(0, [turn(3, versions=(0, 1, 1))], [turn(2), turn(5)]), group(1, [turn(7)], [turn(0)], [])]
    run = write_rollouts(tmp_path / "run", groups)
    assert histogram_of(parse_lengths(str(run))) == pytest.approx({3: 1 / 3, 7: 2 / 3})


def test_lengths_by_name_and_from_a_histogram(tmp_path: Path) -> None:
    assert histogram_of(parse_lengths("uniform:5")) == pytest.approx(dict.fromkeys(range(1, 6), 0.2))
    path = tmp_path / "lengths.json"
    path.write_text('{"4": 1, "12": 3}')
    assert histogram_of(parse_lengths(str(path))) == {4: 0.25, 12: 0.75}


@pytest.mark.parametrize("text", ["uniform:", "uniform:0", "uniform:many", "nowhere"])
def test_lengths_that_say_nothing(text: str) -> None:
    with pytest.raises(UserError, match="--lengths"):
        parse_lengths(text)


@pytest.mark.parametrize("content", ["[]", "{", '{"4": "x"}', "{}", '{"0": 1}', '{"4": -1}'])
def test_a_file_that_is_no_histogram(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(UserError, match="not a histogram of lengths"):
        parse_lengths(str(path))


def test_run_directories_without_lengths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        parse_lengths(str(tmp_path))
    with pytest.raises(UserError, match="no lengths in"):
        parse_lengths(str(write_rollouts(tmp_path / "empty", [])))
    damaged = write_rollouts(tmp_path / "damaged", [group(0, [turn(3)])])
    (damaged / "rollouts" / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="line 1"):
        parse_lengths(str(damaged))


# ------------------------------------------------------------------------------------------------ calibrations


def test_a_calibration_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    assert read_calibration(path) == CALIBRATION
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"lengths": {}},
        {"generation": msgspec.structs.replace(CALIBRATION.generation, decode=CALIBRATION.generation.decode[::-1])},
        {"slots": "many"},
    ],
)
def test_calibrations_that_can_not_be_used(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(CALIBRATION) | msgspec.to_builtins(change)))
    with pytest.raises(UserError, match="pipelinerl calibrate"):
        read_calibration(path)
    with pytest.raises(UserError, match="can't read"):
        read_calibration(tmp_path / "none.json")


def test_training_time_is_that_of_a_step_over_its_sampled_tokens() -> None:
    # 32 rollouts of 15 sampled tokens and 6 of prompt; half of the tokens go through the model.
    step_s = 0.064 + 32 * 0.001 + 0.0001 * 0.5 * 32 * (15 + 6)
    tau_s = CALIBRATION.training.tau_s(batch_size=32, mean_length=15.0, prompt_tokens=6.0)
    assert tau_s == pytest.approx(step_s / (32 * 15))


def test_a_measured_workload_is_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    work = ask(None, Flags(hardware=str(path))).workload
    assert (work.accelerators, work.batch_size, work.utilisation.unit) == (4, 32, "s")
    assert work.lengths.mean == 15.0
    # 16 sequences: a decode step, and on average 16/15 rollouts end in it.
    assert float(work.utilisation(16)) == pytest.approx(16 / (0.0025 + 16 / 15 * 0.0004))
    assert work.tau == CALIBRATION.training.tau_s(batch_size=32, mean_length=15.0, prompt_tokens=6.0)
    best = make_plan(ask(None, Flags(hardware=str(path)))).chosen.pipeline
    assert best is not None
    assert best.slots <= 16  # no more than were measured


def test_a_baseline_that_was_measured_too(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    write_calibration(ours, CALIBRATION)
    alone = msgspec.structs.replace(CALIBRATION, side_by_side=False, processes=2)
    write_calibration(theirs, alone)
    question = ask(None, Flags(hardware=str(ours), conventional=str(theirs)))
    assert question.baseline is not None
    found = conventional(question.baseline, 3)
    assert found.training_rate == pytest.approx(1 / question.workload.tau)  # one trainer with the whole machine
    drained = make_plan(question).chosen.conventional
    assert drained == conventional(question.baseline, drained.steps_per_round)
    with pytest.raises(UserError, match=r"schedule\.kind conventional"):
        ask(None, Flags(hardware=str(ours), conventional=str(ours)))


# ------------------------------------------------------------------------------------------------ questions


def test_without_anything_it_is_the_case_study() -> None:
    question = ask(None, Flags())
    assert (question.workload.accelerators, question.workload.batch_size, question.max_lag) == (128, 128, 133)
    plan = make_plan(question)
    assert plan.chosen.speed_up == pytest.approx(1.57, rel=0.02)
    assert {1, 2, 64, 128, 133} <= {comparison.max_lag for comparison in tabulated(plan)}


def test_flags_come_before_the_run_file() -> None:
    config = load_config(None, ["--schedule.max_lag", "9"])
    question = ask(config, Flags(accelerators=6))
    assert (question.workload.batch_size, question.max_lag) == (config.trainer.batch_size, 9)
    assert question.workload.lengths.longest == config.actor.max_tokens
    question = ask(config, Flags(accelerators=6, batch=7, lengths="uniform:3", mfu=0.25, max_lag=2, hardware="h200"))
    assert (question.workload.batch_size, question.max_lag, question.workload.tau) == (7, 2, 12.0)
    assert question.workload.lengths.longest == 3


def test_the_cache_counts_if_it_is_told() -> None:
    plain = ask(None, Flags()).workload.utilisation
    heavy = ask(None, Flags(kv_bytes_per_token=57344, model_params=7.6e9)).workload.utilisation
    assert float(heavy(1)) == pytest.approx(float(plain(1)), rel=0.02)
    context = sum(age * share for age, share in enumerate(LengthDistribution.uniform(8192).ages()))
    weights_ratio = 57344 * context / (2 * 7.6e9)
    base = float(heavy.step_time(0))
    assert float(heavy.step_time(100)) == pytest.approx(base * (1 + 100 * weights_ratio))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags(accelerators=1), "at least 2 accelerators"),
        (Flags(accelerators=0), "invalid workload"),
        (Flags(batch=0), "invalid workload"),
        (Flags(max_lag=0), "no pipeline has a lag of at most 0; there is one at --max-lag 1"),
        (Flags(max_lag=-1), "0 or more"),
        (Flags(mfu=2.0), "--mfu 2"),
        (Flags(mfu=0.4, tau=3.0), "give one of them"),
        (Flags(hardware="tpu"), "h100, h200, or a calibration"),
        (Flags(hardware="none.json"), "can't read none.json"),
        (Flags(conventional="none.json"), "can't read none.json"),
    ],
)
def test_questions_without_an_answer(flags: Flags, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(ask(None, flags))


def test_a_run_file_alone_does_not_say_how_many_accelerators_there_are() -> None:
    with pytest.raises(UserError, match="--accelerators N"):
        ask(RunConfig(), Flags())


def test_flags_of_modelled_hardware_do_not_go_with_measured(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    for mfu in (0.5, 0.0):
        with pytest.raises(UserError, match="--mfu is for"):
            ask(None, Flags(hardware=str(path), mfu=mfu))
    assert ask(None, Flags(hardware=str(path), tau=0.25)).workload.tau == 0.25


# ------------------------------------------------------------------------------------------------ answers


def test_the_plan_as_json_has_the_numbers_of_the_model() -> None:
    plan = make_plan(ask(None, Flags(accelerators=16, batch=32, max_lag=20)))
    written = json.loads(plan_json(plan))
    work, chosen = plan.question.workload, written["chosen"]
    again = pipeline(work, chosen["pipeline"]["slots"], chosen["pipeline"]["generating"])
    assert chosen["pipeline"]["rate"] == again.rate
    assert chosen["conventional"]["rate"] == conventional(work, chosen["conventional"]["steps_per_round"]).rate
    assert chosen["speed_up"] == again.rate / chosen["conventional"]["rate"]
    assert (written["unit"], written["accelerators"], written["batch_size"], chosen["max_lag"]) == ("flash", 16, 32, 20)
    assert [point["max_lag"] for point in written["throughput_by_max_lag"]] == [c.max_lag for c in plan.curve]


def test_what_is_printed_names_the_choice() -> None:
    config = load_config(None, [])
    plan = make_plan(ask(config, Flags(accelerators=16)))
    assert plan.chosen.pipeline is not None
    text = plan_text(plan, config)
    assert f"engine.slots {plan.chosen.pipeline.slots}" in text
    assert "The run file has engine.slots 128" in text


def test_a_busy_machine_is_said_to_have_been_busy() -> None:
    busy = msgspec.structs.replace(CALIBRATION.machine, load_average=4.5)
    assert "was busy" in calibration_text(msgspec.structs.replace(CALIBRATION, machine=busy))
    assert "was busy" not in calibration_text(CALIBRATION)


def command(*arguments: str) -> int:
    return invoke(plan_command.add_to, "plan", *arguments)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, written = tmp_path / "figure.png", tmp_path / "plan.json"
    assert command("--figure", str(figure), "--json", str(written), "--model-params", "7B") == 0
    assert "1.58x" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert json.loads(written.read_bytes())["tokens_per_s_of_a_token_per_unit"] == pytest.approx(989.4e12 / 14e9)


def test_the_command_takes_keys_of_the_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--accelerators", "8", "--trainer.batch_size", "48") == 0
    assert "48" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model-params", "big"), "invalid _amount value|invalid"),
        (("--figure", "/nowhere/f.png"), "can't write"),
        (("--json", "/nowhere/p.json"), "can't write"),
    ],
)
def test_the_commands_mistakes(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command(*arguments)


def test_a_plan_from_the_calibration_of_another_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration, run_file = tmp_path / "calibration.json", tmp_path / "run.yaml"
    write_calibration(calibration, CALIBRATION)
    for model, doubtful in ((CALIBRATION.model, False), ("owner/another", True)):
        run_file.write_text(f"model: {{path: {model}}}\n")
        assert main(["plan", str(run_file), "--hardware", str(calibration)]) == 0
        said = f"doubtful: the calibration is of model {CALIBRATION.model}, the run's is owner/another"
        assert (said in capsys.readouterr().out) is doubtful
