"""A trainer's process and three engines' over gloo on loopback: weights are exact, and whoever dies or stops is named."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.hub.server import HubServer, WorkerKind
from tests.integration import collective_parts
from tests.integration.collective_parts import LAST, Doom
from tests.unit.hub.hub_parts import Place

pytestmark = pytest.mark.slow

AT = 2
ENDS_WITHIN_S = 120


class Part:
    """A process, forked from one that has imported all that it needs, and its last words."""

    def __init__(self, work: Callable[..., None], doom: Doom | None, *others: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([collective_parts.__name__])
        self._words: Connection
        self._words, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=work, args=(doom, theirs, *others))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def last_words(self) -> dict[str, Any]:
        """It must end by itself, in good order, within the bound."""
        assert self._words.poll(ENDS_WITHIN_S)
        words: dict[str, Any] = self._words.recv()
        self._process.join(ENDS_WITHIN_S)
        assert self._process.exitcode == 0
        return words

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._words.close()


class Run:
    """The four processes; whatever is left of them at the end of the test is killed."""

    def __init__(self, server: HubServer) -> None:
        self.parts: list[Part] = []
        self._server = server

    def start(
        self, *, who: str = "nobody", end: str = "SIGKILL", when: str = "between", encoding: str = "full"
    ) -> list[Part]:
        """The trainer, then the engines. `who` ends itself, as `Doom` says, at version 2."""

        def doom(name: str) -> Doom | None:
            return Doom(signal.Signals[end], when, AT) if who == name else None

        with self._server.connect(WorkerKind(follows=True)) as hub:
            self.parts.append(Part(collective_parts.trainer, doom("trainer"), hub, encoding))
        for index in range(3):
            with self._server.connect(WorkerKind(process=index)) as hub:
                self.parts.append(Part(collective_parts.engine, doom(f"engine-{index}"), hub, index))
        return self.parts

    def close(self) -> None:
        for part in self.parts:
            part.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with HubServer(Place(tmp_path, processes=3).hub) as server:
        run = Run(server)
        yield run
        run.close()


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_three_engines_get_every_version_exactly(run: Run, encoding: str) -> None:
    trainer, *engines = run.start(encoding=encoding)
    for engine in engines:
        assert engine.last_words() == {"version": LAST, "exact": True, "error": None}
    words = trainer.last_words()
    assert words["error"] is None
    assert sorted(words["versions"]) == sorted(list(range(LAST + 1)) * 3)


def exhaustive(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("end", "when", "encoding"),
    [
        exhaustive("SIGKILL", "between", "full"),
        exhaustive("SIGKILL", "middle", "full"),
        ("SIGKILL", "middle", "delta"),
        ("SIGSTOP", "between", "full"),
        exhaustive("SIGSTOP", "middle", "full"),
    ],
)
def test_an_engine_that_dies_or_stops_is_named_and_nobody_hangs(run: Run, end: str, when: str, encoding: str) -> None:
    trainer, victim, *others = run.start(who="engine-0", end=end, when=when, encoding=encoding)
    assert trainer.last_words()["error"].startswith("engine number 0 (engine-0) is gone, or stopped: ")
    for engine in others:
        words = engine.last_words()
        assert words["error"]
        assert words["exact"]
        assert words["version"] == (AT if when == "between" else AT - 1)
    assert victim.alive == (end == "SIGSTOP")


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_trainer_that_dies_or_stops_in_the_middle_is_noticed_by_all(run: Run, end: str) -> None:
    _, *engines = run.start(who="trainer", end=end, when="middle")
    for engine in engines:
        words = engine.last_words()
        assert words["error"]
        assert words["exact"]
        assert words["version"] == AT - 1
