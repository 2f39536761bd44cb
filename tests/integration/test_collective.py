"""A trainer's process and three engines' over gloo on loopback: weights are exact, and whoever dies or stops is named."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pipelinerl.channel import listen
from tests.integration import collective_parts
from tests.integration.collective_parts import LAST, Doom

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

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def start(
        self, *, who: str = "nobody", end: str = "SIGKILL", when: str = "between", encoding: str = "full"
    ) -> list[Part]:
        """The trainer, then the engines. `who` ends itself, as `Doom` says, at version 2."""

        def doom(name: str) -> Doom | None:
            return Doom(signal.Signals[end], when, AT) if who == name else None

        with listen() as listener:
            port = listener.getsockname()[1]
            self.parts.append(Part(collective_parts.trainer, doom("trainer"), listener, encoding))
        for index in range(3):
            self.parts.append(Part(collective_parts.engine, doom(f"engine-{index}"), port, index))
        return self.parts

    def close(self) -> None:
        for part in self.parts:
            part.kill()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
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
    ("end", "when", "encoding", "complaint"),
    [
        exhaustive("SIGKILL", "between", "full", "engine number 0 (engine-0) is gone: its process exited unexpectedly"),
        exhaustive("SIGKILL", "middle", "full", "engine number 0 (engine-0) is gone: its process exited unexpectedly"),
        ("SIGKILL", "middle", "delta", "engine number 0 (engine-0) is gone: its process exited unexpectedly"),
        ("SIGSTOP", "between", "full", "engine number 0 (engine-0) sent nothing for 3 s"),
        exhaustive("SIGSTOP", "middle", "full", "engine number 0 (engine-0) sent nothing for 3 s"),
    ],
)
def test_an_engine_that_dies_or_stops_is_named_and_nobody_hangs(
    run: Run, end: str, when: str, encoding: str, complaint: str
) -> None:
    trainer, victim, *others = run.start(who="engine-0", end=end, when=when, encoding=encoding)
    assert complaint in trainer.last_words()["error"]
    for engine in others:
        words = engine.last_words()
        assert complaint in words["error"]
        assert words["exact"]
        assert words["version"] in ((AT,) if when == "between" else (AT - 1, AT))
    assert victim.alive == (end == "SIGSTOP")


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ("SIGKILL", "is gone: its process exited unexpectedly"),
        ("SIGSTOP", "the broadcast of weights made no progress for 6 s"),
    ],
)
def test_a_trainer_that_dies_or_stops_in_the_middle_is_noticed_by_all(run: Run, end: str, complaint: str) -> None:
    _, *engines = run.start(who="trainer", end=end, when="middle")
    for engine in engines:
        words = engine.last_words()
        assert complaint in words["error"]
        assert words["exact"]
        assert words["version"] == AT - 1
