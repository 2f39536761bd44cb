"""Export of a run: what is wrong with its folder is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.experiments.replay.export import export_run
from pipelinerl.report.series import read_config


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"\xff\xfe", "a run file is UTF-8 text"),
        (b"trainer: {steps", "config.yaml:1"),
        (b"no_key: 1", "no_key: unknown key"),
    ],
)
def test_a_damaged_run_file_is_named(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / "config.yaml").write_bytes(contents)
    for read in (read_config, lambda run_dir: export_run(run_dir, tmp_path / "out.tar")):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path)
