"""What the study writes: JSON that reads back, a picture, a table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.statistics import Interval
from pipelinerl.experiments.study.kv_cache import PolicyRecord, PositionRecord, StartRecord, StudyRecord, StudySettings
from pipelinerl.experiments.study.page import make_folder, write_study
from tests.unit.experiments.watch.test_watch_report import data_of


def interval(mean: float) -> Interval:
    return Interval(mean, 0.5 * mean, 2 * mean)


def policy(kind: str, kl: float, lag: int | None = None) -> PolicyRecord:
    positions = (
        PositionRecord(start=0, end=5, tokens=50, kl=interval(kl)),
        PositionRecord(start=5, end=9, tokens=0, kl=None),  # no completion came that far
    )
    return PolicyRecord(
        kind=kind,  # type: ignore[arg-type]
        lag=lag,
        tokens=50,
        lag_mean=1.5,
        kl=interval(kl),
        kl_k1=interval(2 * kl),
        kl_k3=interval(3 * kl),
        engine_gap=1e-6,
        by_position=positions,
    )


def study(starts: int = 2) -> StudyRecord:
    settings = StudySettings(
        lag=2,
        max_tokens=9,
        switches=(),
        problems=5,
        attempts=2,
        temperature=1.0,
        seed=0,
        resamples=100,
        level=0.95,
    )
    start = StartRecord(
        name="early",
        version=3,
        target=5,
        stale=policy("stale", 1.25e-3),
        recomputed=policy("recomputed", 1.125e-3),
        lagged=tuple(policy("lagged", 1e-3 * lag, lag) for lag in range(3)),
        stale_minus_recomputed=interval(1.25e-4),
        stale_minus_oldest=interval(-7.5e-4),
        equivalent_lag_stale=1.25,
        equivalent_lag_recomputed=None,
    )
    return StudyRecord(model="demo", environment="gcd", run_seed=0, settings=settings, starts=(start,) * starts)


def test_the_numbers_the_page_and_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    out = tmp_path / "new" / "folder"
    make_folder(out)
    text = write_study(study(), out)
    assert msgspec.json.decode((out / "kv-cache.json").read_bytes(), type=StudyRecord) == study()
    along, by_lag = data_of((out / "kv-cache.html").read_text())["sections"][0]["charts"]
    assert along["lines"]["mixed, stale KV"] == [1.25e-3, None]
    assert by_lag["lines"]["conventional, lag k"] == [0.0, 1e-3, 2e-3]
    lines = text.splitlines()
    assert sum("Weights 3 to 5" in line for line in lines) == 2
    stale = next(line for line in lines if "mixed, stale KV" in line)
    for shown in ("1.50", "1.25e-03 (6.25e-04 to 2.50e-03)", "2.50e-03", "3.75e-03", " 1.2 "):
        assert shown in stale
    assert "more" in next(line for line in lines if "mixed, recomputed KV" in line)
    assert any("stale - recomputed" in line and "1.25e-04" in line for line in lines)
    assert any("stale - lag 2" in line and "-7.50e-04" in line for line in lines)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="choose another --out"):
        make_folder(tmp_path / "file")
