"""What predictions start from: lengths and calibrations, with errors of one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.calibration import calibration_text, read_calibration, write_calibration
from tests.unit.experiments.parts import CALIBRATION

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
