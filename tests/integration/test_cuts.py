"""A network that is cut and heals changes nothing; one that stays cut ends the run, which can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.ports import free_port
from tests.chaos.faults import Proxy
from tests.chaos.plan import Fault, Kind
from tests.integration.runs import assert_gone_on, command, start_processes, steps, until, version_of, wait
from tests.integration.test_remote import Server
from tests.redis_server import redis_for_tests

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.needs_redis]

SERVERS = ("server-0", "server-1")
CUTS = {"redis": ["redis"], "server-0": ["server-0"], "both servers": SERVERS}


@contextmanager
def behind_proxies(folder: Path) -> Iterator[tuple[dict[str, Proxy], dict[str, Any], Callable[[], None]]]:
    """A Redis and two engine servers, each behind a proxy, the settings of a run that reaches them so, and what restarts the
    servers: they may hold weights of steps that were lost.
    """
    with ExitStack() as stack:
        port = free_port("127.0.0.1")
        stack.enter_context(redis_for_tests(folder / "redis", "--port", str(port)))
        proxies = {name: stack.enter_context(closing(Proxy(("127.0.0.1", port)))) for name in ("redis", *SERVERS)}

        def restart() -> None:
            for name in SERVERS:
                server = Server(folder / name)
                stack.callback(server.kill)
                server.wait()
                proxies[name].address = ("127.0.0.1", server.port)

        restart()
        urls = ",".join(f"http://127.0.0.1:{proxies[name].port}" for name in SERVERS)
        settings = {
            "stream__kind": "redis",
            "stream__url": f"redis://127.0.0.1:{proxies['redis'].port}/0",
            "engine__kind": "http",
            "engine__urls": f"[{urls}]",
            "engine__weights_dir": folder,
            "trainer__checkpoint_every": 2,
        }
        yield proxies, settings, restart


def hurt(proxies: dict[str, Proxy], place: str, kind: Kind) -> Callable[[], None]:
    """Returns what heals it."""
    heal = [proxies[name].disturb(Fault(kind=kind, place=name, steps=None, after_s=0.0)) for name in CUTS[place]]

    def all_heal() -> None:
        for one in heal:
            one()

    return all_heal


@pytest.mark.parametrize("kind", ["cut", "silence"])
@pytest.mark.parametrize("place", CUTS)
def test_a_cut_that_heals_changes_nothing(place: str, kind: Kind, tmp_path: Path) -> None:
    run_dir, goal = tmp_path / "r", 30
    with behind_proxies(tmp_path) as (proxies, settings, _):
        process = start_processes(run_dir, **settings, trainer__steps=goal, launch__preprocessor="process")
        for version, cut_s in ((3, 1.0), (12, 8.0)):
            until(lambda version=version: version_of(run_dir) >= version, process)  # type: ignore[misc]
            heal = hurt(proxies, place, kind)
            time.sleep(cut_s)
            heal()
        ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, goal)
    assert counts["restarts"] == {}
    assert counts["resumed_from"] is None


@pytest.mark.parametrize("kind", ["cut", "silence"])
@pytest.mark.parametrize("place", ["redis", "both servers"])
def test_a_cut_that_stays_ends_the_run(place: str, kind: Kind, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with behind_proxies(tmp_path) as (proxies, settings, restart):
        process = start_processes(run_dir, **settings, trainer__steps=100_000, launch__restarts=0, launch__watchdog_s=40)
        until(lambda: version_of(run_dir) >= 5, process)
        heal = hurt(proxies, place, kind)
        ended = wait(process)
        assert ended.status in (1, 3), ended.error
        assert "Traceback" not in ended.out + ended.error
        heal()
        restart()
        goal = len(steps(run_dir)) + 3
        ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}")
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, goal)
