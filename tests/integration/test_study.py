"""The stale-KV study on a real run, and what the command says about runs that it can't study."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.study.kv_cache import PolicyRecord, StudyRecord
from tests.integration.runs import run

pytestmark = pytest.mark.slow

SAVED = {"trainer__checkpoint_every": 1, "trainer__keep_checkpoints": 100}
SHORT = ("--lag", "3", "--problems", "8", "--attempts", "4", "--max-tokens", "30")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "r"
    run(path, trainer__steps=6, **SAVED)
    return path


def study(run_dir: Path, out: Path, *flags: str) -> StudyRecord:
    assert main(["lab", "study", "kv-cache", str(run_dir), *SHORT, "--out", str(out), *flags]) == 0
    assert "mixed, stale KV" in (out / "kv-cache.html").read_text()
    return msgspec.json.decode((out / "kv-cache.json").read_bytes(), type=StudyRecord)


def by_position(policy: PolicyRecord) -> list[float | None]:
    return [record.kl and record.kl.mean for record in policy.by_position]


def test_a_study_of_a_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = study(run_dir, tmp_path / "a")
    printed = capsys.readouterr()
    assert "mixed, stale KV" in printed.out
    assert "conventional lag 3 of 3" in printed.err
    assert [(start.version, start.target) for start in found.starts] == [(0, 3), (1, 4), (3, 6)]
    assert found.settings.switches == (20,)
    for start in found.starts:
        for policy in (start.stale, start.recomputed, *start.lagged):
            assert policy.engine_gap < 1e-4
            assert policy.tokens == sum(record.tokens for record in policy.by_position)
            assert policy.kl.low <= policy.kl.mean <= policy.kl.high
        means = [policy.kl.mean for policy in start.lagged]
        assert [policy.lag for policy in start.lagged] == [0, 1, 2, 3]
        assert means[0] == 0.0
        assert all(older > newer for newer, older in pairwise(means)), means
        # Until the first switch a mixed policy is the oldest weights: with the same random numbers, the same tokens.
        oldest = by_position(start.lagged[-1])
        for mixed in (start.stale, start.recomputed):
            assert by_position(mixed)[:2] == pytest.approx(oldest[:2], rel=1e-3)
            assert by_position(mixed)[2] != pytest.approx(oldest[2], rel=1e-2)
        assert by_position(start.stale)[2] != pytest.approx(by_position(start.recomputed)[2], rel=1e-3)
        difference = start.stale.kl.mean - start.recomputed.kl.mean
        assert start.stale_minus_recomputed.mean == pytest.approx(difference, abs=1e-12)
