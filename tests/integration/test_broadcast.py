"""Whole runs whose weights go straight from the trainer into engine servers, by torch.distributed over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.types import EngineProgress
from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    no_leftovers,
    start_processes,
    status_of,
    summary,
    until,
    wait,
    worker_pids,
)
from tests.integration.test_remote import Server
from tests.integration.test_remote import servers as servers  # noqa: PLC0414 - a fixture

pytestmark = pytest.mark.slow
BROADCAST = {"engine__kind": "http", "weights__kind": "collective"}


def test_a_run_broadcasts_to_the_servers_that_it_starts(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    # With the bound, rollouts are started at every step: however slow training is, some are in progress at an update.
    settings = {"engine__servers": 2, "engine__slots": 8, "actor__max_tokens": 100, "trainer__steps": 10}
    ended = wait(start_processes(run_dir, schedule__max_lag=2, **settings, **BROADCAST))
    assert (ended.status, ended.error) == (0, "")
    counts = summary(run_dir)
    assert counts["weight_updates"] == 11
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert assert_provenance(run_dir) > 0, "some tokens that were trained on span an update"


def test_servers_that_run_already_join_and_one_that_is_killed_is_named(servers: list[Server], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    urls = f"[{', '.join(server.url for server in servers)}]"

    def updates() -> int:
        status = status_of(run_dir, "engine")
        return status.progress.weight_updates if status and isinstance(status.progress, EngineProgress) else 0

    with no_leftovers(run_dir) as pids:
        process = start_processes(run_dir, trainer__steps=100_000, engine__urls=urls, **BROADCAST)
        until(lambda: updates() >= 3, process, timeout_s=120.0)
        pids.update(worker_pids(run_dir))
        servers[1].kill()
        ended = wait(process)
    assert ended.status == 1
    assert f"engine number 1 ({servers[1].url}) is gone: its process exited unexpectedly" in ended.error
    assert "Traceback" not in ended.out + ended.error
