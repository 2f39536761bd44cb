"""Which process a session ends because of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pipelinerl.errors import PipelineRLError, RankLostError, StageDiedError
from pipelinerl.launch.hosts.host import Host
from pipelinerl.launch.hosts.processes import Processes

RANKS = ["training", "training-rank-1", "training-rank-2"]
LOST, BROKEN = RankLostError("no answer"), StageDiedError("a bug")


class Process:
    """A process of the run that runs, or has ended with `error` (None: in good order)."""

    machine, log = "", Path("log")

    def __init__(self, role: str, *, running: bool = False, error: PipelineRLError | None = None) -> None:
        self.role, self.pid, self.running, self._error = role, RANKS.index(role) if role in RANKS else 9, running, error

    def failure(self) -> PipelineRLError | None:
        return self._error


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ((LOST, None, LOST), "the training-rank-1 process (pid 1) no longer answers"),
        ((None, LOST, LOST), "the training process (pid 0) no longer answers"),
        ((LOST, None, None), "the training-rank-1 process (pid 1) and the training-rank-2 process (pid 2) no longer"),
        ((None, None, None), None),  # nobody has ended
        ((LOST, LOST, LOST), None),  # nobody runs
        ((BROKEN, None, LOST), None),  # one has a reason of its own
    ],
)
def test_a_rank_that_the_others_have_ended_for_want_of_is_named(
    ends: tuple[PipelineRLError | None, ...], named: str | None
) -> None:
    workers: list[Any] = [Process(role, running=end is None, error=end) for role, end in zip(RANKS, ends, strict=True)]
    workers.append(Process("generation", error=BROKEN))  # an engine's end says nothing of ranks
    error = Processes(cast(Host, None), workers).silent_ranks(RANKS)
    assert (error is None) == (named is None)
    if error is not None:
        assert isinstance(error, RankLostError)
        assert str(error).startswith(named or "")
