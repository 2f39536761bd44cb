"""What predictions start from: lengths and calibrations, with errors of one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.calibration import calibration_text, parse_lengths, read_calibration, write_calibration
from tests.unit.experiments.parts import CALIBRATION, group, histogram_of, turn, write_rollouts

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
    with pytest.raises(UserError, match="pipelinerl lab calibrate"):
        read_calibration(path)
    with pytest.raises(UserError, match="can't read"):
        read_calibration(tmp_path / "none.json")


def test_a_busy_machine_is_said_to_have_been_busy() -> None:
    assert "was busy" in calibration_text(msgspec.structs.replace(CALIBRATION, load_average=4.5))
    assert "was busy" not in calibration_text(CALIBRATION)
