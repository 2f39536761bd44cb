"""Whole runs whose weights go straight from the trainer into engine servers, by torch.distributed over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import assert_provenance, endless, run_processes, wait
from tests.integration.test_remote import Server
from tests.integration.test_remote import servers as servers  # noqa: PLC0414 - a fixture

pytestmark = pytest.mark.slow
BROADCAST = {"engine__kind": "http", "weights__kind": "collective"}


def test_a_run_broadcasts_to_the_servers_that_it_starts(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    # With the bound, rollouts are started at every step: however slow training is, some are in progress at an update.
    settings = {"engine__servers": 2, "engine__slots": 8, "actor__max_tokens": 100, "trainer__steps": 10}
    counts = run_processes(run_dir, schedule__max_lag=2, **settings, **BROADCAST)
    assert counts["weight_updates"] == 11
    assert assert_provenance(run_dir) > 0, "some tokens that were trained on span an update"


def test_servers_that_run_already_join_and_one_that_is_killed_is_named(servers: list[Server], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    urls = f"[{', '.join(server.url for server in servers)}]"

    with endless(run_dir, engine__urls=urls, **BROADCAST) as (process, _):
        servers[1].kill()
        ended = wait(process)
    assert ended.status == 1
    assert f"engine number 1 ({servers[1].url}) is gone: its process exited unexpectedly" in ended.error
    assert "Traceback" not in ended.out + ended.error
