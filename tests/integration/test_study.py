"""The stale-KV study on a real run: numbers, table and page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.study import RECOMPUTED, STALE, StudyRecord
from tests.integration.runs import run
from tests.unit.experiments.watch.test_watch_report import data_of

SHORT = ("--lag", "3", "--problems", "8", "--attempts", "4", "--max-tokens", "30")


@pytest.mark.slow
def test_a_study_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    run_dir, out = tmp_path / "r", tmp_path / "out"
    run(run_dir, trainer__steps=6, trainer__checkpoint_every=1, trainer__keep_checkpoints=100)
    capsys.readouterr()
    assert main(["lab", "study", "kv-cache", str(run_dir), *SHORT, "--out", str(out)]) == 0
    found = msgspec.json.decode((out / "kv-cache.json").read_bytes(), type=StudyRecord)
    printed = capsys.readouterr()
    assert "weights 3 to 6: lag 3" in printed.err
    assert [(start.version, start.target) for start in found.starts] == [(0, 3), (1, 4), (3, 6)]
    assert found.edges == (0, 10, 20, 30)
    for start in found.starts:
        for policy in start.policies.values():
            assert policy.engine_gap < 1e-4
            assert policy.kl.low <= policy.kl.mean <= policy.kl.high
        lagged = [start.policies[f"lag {lag}"] for lag in range(4)]
        assert [policy.lag_mean for policy in lagged] == [0, 1, 2, 3]
        assert lagged[0].kl.mean == 0.0
        assert all(older.kl.mean > newer.kl.mean for newer, older in pairwise(lagged))
        # Until the first switch a mixed policy is the oldest weights: with the same random numbers, the same tokens.
        oldest, stale, recomputed = (
            [kl.mean for kl in policy.by_position]
            for policy in (lagged[-1], start.policies[STALE], start.policies[RECOMPUTED])
        )
        for mixed in (stale, recomputed):
            assert mixed[:2] == pytest.approx(oldest[:2], rel=1e-3)
            assert mixed[2] != pytest.approx(oldest[2], rel=1e-2)
        assert stale[2] != pytest.approx(recomputed[2], rel=1e-3)
        difference = start.policies[STALE].kl.mean - start.policies[RECOMPUTED].kl.mean
        assert start.differences["stale - recomputed"].mean == pytest.approx(difference, abs=1e-12)

    first = found.starts[0].policies[STALE]
    along, by_lag = data_of((out / "kv-cache.html").read_text())["sections"][0]["charts"]
    assert along["lines"][STALE] == [kl.mean for kl in first.by_position]
    assert by_lag["lines"]["conventional, lag k"][0] == 0.0
    assert sum("stale - lag 3" in line for line in printed.out.splitlines()) == 3
